"""Continue an elastic run without the nodes that compute wrong values
(``monitor.on_wrong_computation=leave``).

The state after the last check in which all ranks agreed is doubtful. So nothing is saved, and the run goes
back to a checkpoint that this check has confirmed. The agents of the faulty nodes end, and those of the other
nodes start the ranks again (``cluster/stop/elastic_stop.py``). ``departures.jsonl`` in the run's directory
has a row for each decision, with the facts that it follows from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from toolkit.checkpoint.directory import rewind_to_checkpoint
from toolkit.checkpoint_folder import step_name
from toolkit.config.monitor import OnWrongComputation
from toolkit.monitor.sinks.jsonl import append_durable_row
from toolkit.rows import read_rows
from toolkit.train.build import Training, TrainingHooks
from toolkit.train.computation_check import WrongComputation
from toolkit.train.rollback import agreed_sound_step

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ElasticNodes:
    """What a rank of an elastic run knows of torchrun.

    Attributes:
        min_nodes: the run needs at least so many.
        restarts_left: how often the agent of this node may start the ranks again.
        serves_rendezvous: returns whether the agent of this node serves the rendezvous, which ends with it.
        leave: takes a reason, and makes the agent of this node end when the ranks stop.
    """

    min_nodes: int
    restarts_left: int
    serves_rendezvous: Callable[[], bool]
    leave: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DepartureFacts:
    """What decides whether faulty nodes leave; the first part of a row of ``departures.jsonl``.

    Attributes:
        step: the check after this step found wrong values.
        cause: who computed what.
        faulty_nodes: numbers of the nodes that compute wrong values; empty if they are unknown.
        hosts: the names of their hosts.
        nodes: of this attempt.
        min_nodes: the run needs at least so many; None: the number of nodes is fixed.
        can_restart: torchrun may start the ranks of every node again.
        host_leaves: a faulty node serves the rendezvous of all nodes.
        agreed_step: the step of the last check in which all ranks agreed; None: none is known.
        checkpoint_step: that of the newest sound checkpoint up to ``agreed_step``; None: there is none.
    """

    attempt: int
    step: int
    cause: str
    faulty_nodes: tuple[int, ...]
    hosts: tuple[str, ...]
    nodes: int
    min_nodes: int | None
    can_restart: bool
    host_leaves: bool
    agreed_step: int | None
    checkpoint_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A decision; with its facts a row of ``departures.jsonl``.

    Attributes:
        leaving: the nodes that leave; empty: the run ends.
        refusal: why it ends, as a clause; None: it continues on the other nodes.
    """

    facts: DepartureFacts
    leaving: tuple[int, ...]
    refusal: str | None

    def to_row(self) -> dict[str, Any]:
        return {**asdict(self.facts), "leaving": self.leaving, "refusal": self.refusal}

    def __str__(self) -> str:
        facts = self.facts
        numbers = f"node{'s' * (len(self.leaving) > 1)} {', '.join(map(str, self.leaving))}"
        return (
            f"step {facts.step}: {facts.cause}; {numbers} ({', '.join(facts.hosts)}) left the run, which "
            f"continues from {step_name(facts.checkpoint_step or 0)}, or a snapshot in memory up to step "
            f"{facts.agreed_step}, after which all ranks agreed"
        )


def decide_departure(facts: DepartureFacts) -> Departure:
    """Decide whether the faulty nodes leave and the run continues on the others."""
    left = facts.nodes - len(facts.faulty_nodes)
    refusal = None
    if facts.min_nodes is None:
        refusal = "the number of nodes is fixed"
    elif not facts.faulty_nodes:
        refusal = "no majority of the data ranks shows which node computes wrong values"
    elif left < facts.min_nodes:
        refusal = f"{left} of {facts.nodes} nodes would be left, and the run needs {facts.min_nodes}"
    elif not facts.can_restart:
        refusal = "torchrun has no restarts left (--max-restarts)"
    elif facts.host_leaves:
        refusal = "a faulty node serves the rendezvous (is_host=1), without which the others cannot restart"
    elif facts.checkpoint_step is None:
        refusal = "no sound checkpoint is from before a check in which all ranks agreed"
    return Departure(facts=facts, leaving=facts.faulty_nodes if refusal is None else (), refusal=refusal)


def read_departures(file: Path) -> list[Departure]:
    """Return the decisions of a run in order."""
    names = {field.name for field in fields(DepartureFacts)}
    found = []
    for row in read_rows(file):
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in row.items()
        }
        facts = DepartureFacts(**{name: values[name] for name in names})
        found.append(Departure(facts=facts, leaving=values["leaving"], refusal=values["refusal"]))
    return found


def leave_faulty_nodes(
    training: Training, hooks: TrainingHooks, wrong: WrongComputation, elastic: ElasticNodes | None
) -> Departure | None:
    """Decide which nodes leave after ``wrong``, and prepare the restart of the others. Collective.

    Call it after the last save has ended. Checkpoints after the one to continue from move to the folder of
    this attempt, and so do the rows of metrics after the last check in which all ranks agreed. Later
    snapshots in memory are removed: the rows of the next attempt would make them valid again
    (``train/snapshot_choice.py``). If the process is killed before, the next start finds the fault again,
    because checkpoints record the step of that check.

    Args:
        elastic: None: the number of nodes is fixed.

    Returns:
        The departure; None if the run ends, and then ``wrong`` explains why.
    """
    context = training.context
    if context.plan.config.monitor.on_wrong_computation is not OnWrongComputation.leave:
        return None
    world, directory = context.plan.world, context.directory
    faulty = tuple(sorted({rank.rank // world.ranks_per_node for rank in wrong.confirmed_faulty}))
    host_leaves, no_restart = context.all_reduce_flags(
        [
            elastic is not None and context.node in faulty and elastic.serves_rendezvous(),
            elastic is not None and elastic.restarts_left == 0,
        ]
    )
    agreed = wrong.agreed_step
    decision = decide_departure(
        DepartureFacts(
            attempt=context.attempt,
            step=wrong.step,
            cause=str(wrong).partition(": ")[2],
            faulty_nodes=faulty,
            hosts=tuple(dict.fromkeys(rank.host for rank in wrong.confirmed_faulty)),
            nodes=world.nodes,
            min_nodes=None if elastic is None else elastic.min_nodes,
            can_restart=not no_restart,
            host_leaves=bool(host_leaves),
            agreed_step=agreed,
            checkpoint_step=None if agreed is None else agreed_sound_step(context, agreed),
        )
    )
    wrong.why_not_left = decision.refusal
    if decision.refusal is None and agreed is not None and hooks.snapshots is not None:
        hooks.snapshots.remove_after(agreed)
    if context.rank == 0:
        if decision.refusal is None:
            _rewind(training, hooks, decision.facts)
        append_durable_row(directory.departures_file, decision.to_row())
    if context.node in decision.leaving:
        assert elastic is not None, "nodes leave an elastic run only"
        elastic.leave(str(wrong))
    return decision if decision.refusal is None else None


def _rewind(training: Training, hooks: TrainingHooks, facts: DepartureFacts) -> None:
    directory, attempt = training.context.directory, training.context.attempt
    assert facts.checkpoint_step is not None, "without a checkpoint the run ends"
    assert facts.agreed_step is not None, "the checkpoint is not later"
    folder = directory.checkpoints / step_name(facts.checkpoint_step)
    training.sink.flush()
    rewind_to_checkpoint(
        directory.checkpoints, folder, facts.checkpoint_step, directory.set_aside_folder(attempt)
    )
    directory.cut_rows_after(facts.agreed_step, attempt)
    if hooks.status is not None:
        hooks.status.on_rollback(folder)
