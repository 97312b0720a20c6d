"""Roll a run back: decide to which sound checkpoint, load it in the running processes, and skip the samples
that precede the fault from then on.

``rollbacks.jsonl`` in the run's directory has a row for each decision, with the facts that it follows from.
Checkpoints record the skipped samples too; the rows matter for a start from a checkpoint that is older than
the rollback.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.directory import newest_sound_step, rewind_to_checkpoint
from toolkit.checkpoint_folder import committed_checkpoints, step_name
from toolkit.data.order.skipped import SkippedSamples
from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.sinks.jsonl import append_durable_row
from toolkit.observe.context import RankContext
from toolkit.plan.types import BatchPlan, RampStage
from toolkit.rows import float_or_nan, read_rows
from toolkit.train import state
from toolkit.train.nonfinite import Diverged
from toolkit.train.soundness import Fault, FaultKind

if TYPE_CHECKING:
    from toolkit.train.build import Training, TrainingHooks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackFacts:
    """What decides how a run continues after a fault; the first part of a row of ``rollbacks.jsonl``.

    Attributes:
        attempt: the start of the run that decides.
        step: the bad step, counted from 1.
        reason: a ``FaultKind``.
        loss, grad_norm: of the bad step.
        losses: those before a spike, with which it was compared.
        checkpoint_step: that of the newest checkpoint that every rank finds sound; None: there is none.
        unsound: the steps of later checkpoints, which are damaged or not sound.
        earlier: the ``checkpoint_step`` of each rollback of this run so far.
        window, limit: the values of ``train.rollback``.
        batch: the batch sizes of the run.
        already_skipped: the ranges of positions of the run's order that are skipped so far.
    """

    attempt: int
    step: int
    reason: str
    loss: float
    grad_norm: float
    losses: tuple[float, ...]
    checkpoint_step: int | None
    unsound: tuple[int, ...]
    earlier: tuple[int, ...]
    window: int
    limit: int
    batch: BatchPlan
    already_skipped: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """One rollback, as a row of ``rollbacks.jsonl`` describes it.

    Attributes:
        step: the bad step, counted from 1.
        reason: a ``FaultKind``.
        loss, grad_norm: of the bad step.
        checkpoint_step: the completed steps to which the run goes back.
        skipped: the first of the positions of the run's order that are skipped, and their end.
        attempt: the start of the run that decided it.
    """

    step: int
    reason: str
    loss: float
    grad_norm: float
    checkpoint_step: int
    skipped: tuple[int, int]
    attempt: int

    def to_alert(self) -> Alert:
        first, end = self.skipped
        return Alert(
            name="rollback",
            fault=self.reason,
            level=Level.WARNING,
            step=self.step,
            where=f"step {self.step}",
            cause=f"the run went back from step {self.step} to the checkpoint of step "
            f"{self.checkpoint_step}, and skips {end - first} samples",
            evidence=f"loss {self.loss:g}, gradient norm {self.grad_norm:g} in step {self.step}; skipped "
            f"positions {first} to {end - 1} of the order of samples (rollbacks.jsonl)",
            next_step="none if it stays a single one; if they become more frequent, look at the skipped "
            "samples, and use a smaller optim.lr or optim.clip in a new run: run.fork=RUN_DIR",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackDecision:
    """A decision; with its facts a row of ``rollbacks.jsonl``.

    Attributes:
        rollback: None: the run ends.
        refusal: why it ends, as a clause; None: it goes back.
    """

    facts: RollbackFacts
    rollback: Rollback | None
    refusal: str | None

    def to_row(self) -> dict[str, Any]:
        skipped = None if self.rollback is None else self.rollback.skipped
        return {**asdict(self.facts), "skipped": skipped, "refusal": self.refusal}


def decide_rollback(facts: RollbackFacts) -> RollbackDecision:
    """Decide how a run continues after a fault: from the newest sound checkpoint, or not at all.

    The samples of the bad step and of the ``facts.window - 1`` steps before it are skipped. Those before the
    checkpoint stay: its weights have learned from them.
    """
    target = facts.checkpoint_step
    if target is None:
        refusal = "there is no sound checkpoint to go back to"
        return RollbackDecision(facts=facts, rollback=None, refusal=refusal)
    before = facts.earlier.count(target)
    if before >= facts.limit:
        refusal = f"{before} rollbacks to {step_name(target)} have not helped (train.rollback.limit)"
        return RollbackDecision(facts=facts, rollback=None, refusal=refusal)
    first_step = max(target, facts.step - facts.window)
    first, end = facts.batch.at(first_step).first_sample, facts.batch.at(facts.step).first_sample
    skipped = SkippedSamples(facts.already_skipped)
    rollback = Rollback(
        step=facts.step,
        reason=facts.reason,
        loss=facts.loss,
        grad_norm=facts.grad_norm,
        checkpoint_step=target,
        skipped=(skipped.position(first), skipped.position(end - 1) + 1),
        attempt=facts.attempt,
    )
    return RollbackDecision(facts=facts, rollback=rollback, refusal=None)


def skipped_on_resume(
    recorded: SkippedSamples, rollbacks: Iterable[Rollback], consumed: int
) -> SkippedSamples:
    """Return what a run skips that continues from a checkpoint.

    Args:
        recorded: what the checkpoint records.
        rollbacks: all rollbacks of the run. Those that the checkpoint does not record because they came later
            count from its position on; what it has learned from is not skipped afterwards.
        consumed: the number of samples that the checkpoint has learned from.
    """
    position = recorded.position(consumed)
    return recorded.add(rollback.skipped for rollback in rollbacks if rollback.skipped[0] >= position)


def read_rollbacks(file: Path) -> list[Rollback]:
    """Return the rollbacks of a run in order. An incomplete last row, whose rollback did not begin, is left
    out, and so are decisions to end the run."""
    return [_rollback_of(row) for row in read_rows(file) if row.get("refusal") is None]


def read_decisions(file: Path) -> list[RollbackDecision]:
    """Return the decisions of a run in order. Rows of earlier versions have no facts, and are left out."""
    names = [field.name for field in fields(RollbackFacts)]
    found = []
    for row in read_rows(file):
        if "refusal" not in row:
            continue
        values = {name: row[name] for name in names} | {
            "loss": float_or_nan(row["loss"]),
            "grad_norm": float_or_nan(row["grad_norm"]),
            "losses": tuple(row["losses"]),
            "unsound": tuple(row["unsound"]),
            "earlier": tuple(row["earlier"]),
            "batch": BatchPlan(
                **row["batch"] | {"stages": tuple(RampStage(**stage) for stage in row["batch"]["stages"])}
            ),
            "already_skipped": tuple((first, end) for first, end in row["already_skipped"]),
        }
        found.append(
            RollbackDecision(
                facts=RollbackFacts(**values),
                rollback=_rollback_of(row) if row["refusal"] is None else None,
                refusal=row["refusal"],
            )
        )
    return found


def _rollback_of(row: Mapping[str, Any]) -> Rollback:
    return Rollback(
        step=row["step"],
        reason=row["reason"],
        loss=float_or_nan(row["loss"]),
        grad_norm=float_or_nan(row["grad_norm"]),
        checkpoint_step=row["checkpoint_step"],
        skipped=(row["skipped"][0], row["skipped"][1]),
        attempt=row["attempt"],
    )


def roll_back(training: Training, hooks: TrainingHooks, fault: Fault) -> Iterable[Any]:
    """Go back to the newest sound checkpoint, and return the samples of the steps after it. Collective.

    Rows and checkpoints of the steps that are repeated move to the folder of this attempt, as a restart moves
    them. If the process is killed during the rollback, the next start resumes from the same checkpoint; it
    meets the same fault again unless the rollback is recorded.

    Raises:
        Diverged: there is no sound checkpoint, or ``train.rollback.limit`` rollbacks to it did not help.
        CheckpointError: the checkpoint is damaged.
    """
    context, stream = training.context, training.data.stream
    plan, directory, attempt = context.plan, context.directory, context.attempt
    hooks.checkpoints.wait()
    decision = decide_rollback(_collect_facts(training, fault))
    decided = decision.rollback
    if decided is None:
        if context.rank == 0:
            append_durable_row(directory.rollbacks_file, decision.to_row())
        raise Diverged(
            f"{fault.cause}, and {decision.refusal}",
            weights_finite=fault.weights_finite,
            otherwise="to continue after loss spikes, set train.on_spike=ignore"
            if fault.kind is FaultKind.SPIKE
            else None,
        )
    step = decided.checkpoint_step
    folder = directory.checkpoints / step_name(step)
    training.monitor.recorder.discard_steps()
    reader = open_reader(folder, state.namespace(plan), plan.shape)
    stream.close()
    hooks.all.on_rollback(folder)
    training.sink.flush()
    if context.rank == 0:
        aside = directory.set_aside_folder(attempt)
        rewind_to_checkpoint(directory.checkpoints, folder, step, aside)
        directory.cut_rows_after(step, attempt)
        append_durable_row(directory.rollbacks_file, decision.to_row())
        alert = decided.to_alert()
        training.monitor.alert(alert)
        log.warning(f"{fault.cause}: {alert.cause}")
    training.rollbacks.append(decided)
    training.engine.load(reader)
    training.monitor.hangs.beat(f"loading {folder.name}")
    training.state.step = step
    training.end.reason = None  # it was asked for after steps that are repeated
    stream.skipped = stream.skipped.add([decided.skipped])
    hooks.all.load_state_dict(state.hook_states(reader))
    return stream.steps(step)


def _collect_facts(training: Training, fault: Fault) -> RollbackFacts:
    """Return the facts of a decision. Collective: the ranks agree on the checkpoint."""
    context, stream = training.context, training.data.stream
    settings, target = context.plan.config.train.rollback, agreed_sound_step(context)
    saved = committed_checkpoints(context.directory.checkpoints)
    return RollbackFacts(
        attempt=context.attempt,
        step=fault.step,
        reason=fault.kind.value,
        loss=fault.loss,
        grad_norm=fault.grad_norm,
        losses=fault.losses,
        checkpoint_step=target,
        unsound=tuple(step for step in saved if target is None or step > target),
        earlier=tuple(rollback.checkpoint_step for rollback in training.rollbacks),
        window=settings.window,
        limit=settings.limit,
        batch=context.plan.batch,
        already_skipped=stream.skipped.ranges,
    )


def agreed_sound_step(context: RankContext, up_to: int | None = None) -> int | None:
    """Return the newest step whose checkpoint every rank finds sound; None if there is none. Collective.

    Args:
        up_to: as in :func:`newest_sound_step`.
    """
    own = newest_sound_step(context.directory.checkpoints, up_to)
    (lowest,) = context.all_reduce_flags([1 if own is None else -own])
    return None if lowest > 0 else -lowest
