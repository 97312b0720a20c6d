"""When the state is saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from toolkit.checkpoint.online.store import CheckpointStore, PendingSave
from toolkit.checkpoint_folder import step_of
from toolkit.config.schema import OnNonfinite, parse_cadence
from toolkit.data.registry import SampleStream
from toolkit.engine.protocol import Engine
from toolkit.engine.rank_sync import FlagReduce
from toolkit.hooks import Hook, StepDone
from toolkit.monitor.step_parts import CHECKPOINT
from toolkit.plan.types import RunPlan
from toolkit.train import state
from toolkit.train.nonfinite import Diverged, finite_on_all_ranks


class Timer:
    """Whether ``seconds`` have passed since the last save. Only rank 0's is asked: clocks differ."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._since = clock()

    def due(self) -> bool:
        return self._seconds is not None and self._clock() - self._since >= self._seconds

    def restart(self) -> None:
        self._since = self._clock()


class Costs(Protocol):
    """Who keeps account of saves."""

    def save_begun(self, step: int) -> None:
        """The state after ``step`` is about to be saved."""

    def stood_still(self, seconds: float) -> None:
        """Training waited so long for saves."""

    def saved(self, step: int, seconds: float, size: int) -> None:
        """A save of ``size`` bytes on this rank has taken so long to its commit, in the background or not."""


class NoCosts(Costs):
    def save_begun(self, step: int) -> None:
        pass

    def stood_still(self, seconds: float) -> None:
        pass

    def saved(self, step: int, seconds: float, size: int) -> None:
        pass


class AllCosts(Costs):
    """Tells several."""

    def __init__(self, *several: Costs) -> None:
        self._several = several

    def save_begun(self, step: int) -> None:
        for one in self._several:
            one.save_begun(step)

    def stood_still(self, seconds: float) -> None:
        for one in self._several:
            one.stood_still(seconds)

    def saved(self, step: int, seconds: float, size: int) -> None:
        for one in self._several:
            one.saved(step, seconds, size)


class Checkpoints(Hook):
    """Saves at the cadence of ``checkpoint.every``, after the last step if asked, and before a stop unless there is no time for it.

    A save in the background that fails is told, and the next one is made in the foreground: it saves, or ends the run on all ranks
    at the same step.

    A state that is not finite is never saved, so neither ``latest`` nor retention ever prefers it to a sound one.
    Training ends there, unless ``train.on_nonfinite=continue`` and more steps are to come.

    Args:
        ask: over all ranks, before each save, whether the state of one of them is not finite.
        flush: called before a save: a run that is killed later goes on from it, and its rows up to there are written.
        costs: is told what saves take.

    Attributes:
        given_up: a stop was agreed, and there was no time to save.
    """

    part = CHECKPOINT

    def __init__(
        self,
        plan: RunPlan,
        engine: Engine,
        store: CheckpointStore,
        stream: SampleStream,
        timer: Timer,
        *,
        rank: int,
        attempt: int,
        all_reduce_flags: FlagReduce,
        flush: Callable[[], None],
        announce: Callable[[Path], None],
        tell: Callable[[str], None],
        costs: Costs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._costs, self._clock = costs or NoCosts(), clock
        self.given_up = False
        self._plan, self._engine, self._store, self._timer = plan, engine, store, timer
        self._stream, self._rank, self._attempt = stream, rank, attempt
        self._all_reduce_flags, self._flush, self._announce, self._tell = (
            all_reduce_flags,
            flush,
            announce,
            tell,
        )
        self._every_steps = parse_cadence(plan.config.checkpoint.every).steps
        self._pending: PendingSave | None = None
        self._failed = False

    def on_step(self, done: StepDone) -> None:
        if self._pending is not None and self._pending.done():
            self._settle()
        if done.agreed.stop and done.agreed.no_time and not done.last:
            self.given_up = True
            return
        checkpoint = self._plan.config.checkpoint
        by_steps = self._every_steps is not None and done.step % self._every_steps == 0
        at_end = done.last and (checkpoint.at_end or checkpoint.export)
        if by_steps or at_end or done.agreed.save or done.agreed.stop:
            self._save(done.step, last=done.last or done.agreed.stop)

    def on_end(self, step: int) -> None:
        began = self._clock()
        self._settle()
        self._costs.stood_still(self._clock() - began)

    def _save(self, step: int, *, last: bool) -> None:
        """``last``: no later save of this attempt will hold these steps."""
        began = self._clock()
        self._settle()
        shards = self._engine.shards()
        if not finite_on_all_ranks(shards, self._all_reduce_flags):
            reason = f"after step {step} weights or the optimizer's state are not finite, and are not saved"
            if last or self._plan.config.train.on_nonfinite is OnNonfinite.stop:
                raise Diverged(reason, weights_finite=False)
            self._tell(reason)
            return
        self._flush()
        self._costs.save_begun(step)
        scalars = state.scalars(
            self._plan,
            state.TrainState(step),
            self._stream.fingerprint(),
            self._stream.state(step),
            self._engine.scalars(),
        )
        background = self._plan.config.checkpoint.background and not last and not self._failed
        self._pending = self._store.save(
            step,
            shards,
            scalars,
            namespace=state.namespace(self._plan),
            rank=self._rank,
            ranks=self._plan.world.ranks,
            attempt=self._attempt,
            background=background,
        )
        self._timer.restart()
        if not background:
            self._settle()
        self._costs.stood_still(self._clock() - began)

    def _settle(self) -> None:
        """Wait for the save under way, if there is one, and tell how it ended."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.wait()
        except Exception as error:  # noqa: BLE001  whatever it was, the next save shows whether it lasts
            self._failed = True
            self._tell(
                f"{pending.path} could not be saved, the next one is not made in the background: {type(error).__name__}: {error}"
            )
        else:
            self._failed = False
            step = step_of(pending.path)
            assert step is not None, f"{pending.path} is a checkpoint of this run"
            self._costs.saved(step, pending.seconds or 0.0, pending.size)
            self._announce(pending.path)
