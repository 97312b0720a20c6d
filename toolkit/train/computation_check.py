"""Compute a micro-batch of one data rank on all of them, every ``monitor.computation_every`` steps.

A GPU or core that computes wrong values reports no error, and the comparison of replicas does not notice it,
because averaged gradients spread the wrong values to all replicas alike.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from toolkit.checkpoint.directory import newest_sound_step
from toolkit.checkpoint_folder import step_of
from toolkit.config.monitor import OnWrongComputation
from toolkit.engine.protocol import CountedBatch, Engine, MicroBatch, Objective, count_units
from toolkit.errors import InputError
from toolkit.hooks import CompletedStep, Hook
from toolkit.layout.axes import Coordinates
from toolkit.monitor.alert import Alert
from toolkit.monitor.computation import RankForward, find_difference, make_alert
from toolkit.observe.context import RankContext
from toolkit.rundir.excluded_hosts import ExcludedHost, exclude_hosts
from toolkit.train.nonfinite import Diverged

log = logging.getLogger(__name__)

T = TypeVar("T")


class WrongComputation(Diverged):
    """Training ends because ranks computed different values from the same micro-batch.

    Attributes:
        confirmed_faulty: the ranks that compute wrong values; empty if they are unknown.
        agreed_step: the step of the last check in which all ranks agreed; None: none is known.
        why_not_left: why an elastic run does not continue without them; None: it was not asked to.
    """

    def __init__(
        self, alert: Alert, run_dir: str, confirmed_faulty: Sequence[RankForward], agreed_step: int | None
    ) -> None:
        super().__init__(f"step {alert.step}: {alert.cause}", weights_finite=True)
        self.step, self.confirmed_faulty, self.agreed_step = alert.step, tuple(confirmed_faulty), agreed_step
        self.why_not_left: str | None = None
        self._remedy = alert.next_step.replace("RUN_DIR", run_dir)

    def describe(self, checkpoint: str | None, *, checked: bool) -> str:
        ends = f"; the run ends although monitor.on_wrong_computation=leave, because {self.why_not_left}"
        newest = f"the newest checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint"
        return f"{self}{ends if self.why_not_left else ''}; {newest}.\n    remedy: {self._remedy}"


class ComputationCheck(Hook):
    """Compare forward passes of one micro-batch over the data axis.

    Each check takes the micro-batch of another data rank. If all ranks agree, it costs one forward pass. If
    not, each computes it a second time, which shows ranks that disagree with themselves. A single data rank
    always computes it twice.

    It comes before the hooks that save, so that a run that ends here does not save what it doubts.
    Checkpoints record the step of the last check in which all ranks agreed, because later states are doubtful
    after a difference, also in a later attempt.
    """

    def __init__(
        self, context: RankContext, engine: Engine, objective: Objective, alert: Callable[[Alert], None]
    ) -> None:
        monitor = context.plan.config.monitor
        self._every = monitor.computation_every
        self._reaction = monitor.on_wrong_computation
        self._context, self._engine, self._objective, self._alert = context, engine, objective, alert
        self._axes = context.plan.axes
        at = self._axes.coordinates(context.rank)
        self._place = (at.pipeline, at.context, at.tensor)
        self._equal_at: int | None = None

    def on_step(self, completed: CompletedStep) -> None:
        if completed.step % self._every or completed.consensus.nonfinite:
            return
        batch = self._choose(completed)
        first = self._engine.forward_hashes(batch)
        if self._axes.data > 1 and self._all_equal(first):
            self._equal_at = completed.step
            return
        second = self._engine.forward_hashes(batch)
        device = str(self._engine.device)
        own = RankForward(self._context.rank, self._place, _host_name(), device, (first, second))
        difference = find_difference(self._gather(own))
        if difference is None:
            self._equal_at = completed.step
            return
        alert = make_alert(completed.step, difference, self._equal_at)
        if self._context.rank == 0:
            self._alert(alert if self._reaction is not OnWrongComputation.leave else _with_departure(alert))
            self._exclude(difference.confirmed_faulty_hosts, alert)
        if self._reaction is not OnWrongComputation.alert:
            raise WrongComputation(
                alert, self._context.plan.run_dir, difference.confirmed_faulty, self._equal_at
            )

    def on_rollback(self, path: Path) -> None:
        if self._equal_at is not None:
            self._equal_at = min(self._equal_at, step_of(path) or 0)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._equal_at is None else {"equal_at": self._equal_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._equal_at = int(state["equal_at"])

    def confirmed_checkpoints(self) -> tuple[int, ...]:
        """Return the step of the newest sound checkpoint that a later check has confirmed, if there is one.
        After a difference the run continues from it, so retention keeps it.
        """
        agreed = self._equal_at  # the thread that saves calls this
        step = None if agreed is None else newest_sound_step(self._context.directory.checkpoints, agreed)
        return () if step is None else (step,)

    def _exclude(self, hosts: Sequence[str], alert: Alert) -> None:
        entries = [ExcludedHost(host=host, step=alert.step, reason=alert.cause) for host in hosts]
        try:
            excluded = exclude_hosts(Path(self._context.plan.run_dir), entries)
        except (InputError, OSError) as error:  # this rank must end or leave with the others
            log.warning("the next start of this run does not exclude %s: %s", ", ".join(hosts), error)
            return
        if excluded:
            log.warning("the next start of this run on Slurm excludes %s", ", ".join(excluded))

    def _choose(self, completed: CompletedStep) -> MicroBatch:
        """Return the micro-batch of this check. Collective."""
        turn, replica = divmod(completed.step // self._every, self._axes.data)
        batch = completed.micro_batches[turn % len(completed.micro_batches)]
        if self._axes.data == 1:
            return batch
        source = self._axes.rank(Coordinates(tensor=0, context=0, data=replica, pipeline=0))
        sent: list[Any] = [None]
        if self._context.rank == source:
            sent[0] = (
                {name: tensor.cpu() for name, tensor in batch.items()},
                count_units(self._objective, batch),
            )
        dist.broadcast_object_list(sent, src=source)
        tensors, units = sent[0]
        return CountedBatch({name: tensor.to(self._engine.device) for name, tensor in tensors.items()}, units)

    def _all_equal(self, hashes: dict[str, int]) -> bool:
        digest = hashlib.blake2b(repr(hashes).encode(), digest_size=8).digest()
        found = set(self._gather((self._place, digest)))
        return len(found) == len({place for place, _ in found})

    def _gather(self, value: T) -> list[T]:
        everyone = [value] * self._axes.size
        if self._axes.size > 1:
            dist.all_gather_object(everyone, value)
        return everyone


def _with_departure(alert: Alert) -> Alert:
    """Return the alert of a run whose faulty nodes leave it if they can."""
    departed = "none if the run continues on the other nodes (departures.jsonl)"
    return replace(alert, next_step=f"{departed}; otherwise {alert.next_step}")


def _host_name() -> str:
    """Return the name by which Slurm excludes this host, if it runs there."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
