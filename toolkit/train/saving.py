"""Save checkpoints at their cadence, after the last step and before a stop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.checkpoint.online.store import CheckpointStore, PendingSave
from toolkit.checkpoint_folder import step_of
from toolkit.config.checkpoint import parse_cadence
from toolkit.config.schema import OnNonfinite
from toolkit.hooks import CompletedStep, Hook, SaveObserver
from toolkit.step_parts import CHECKPOINT
from toolkit.train.metric_tracking import BestCheckpoints
from toolkit.train.nonfinite import Diverged, finite_on_all_ranks
from toolkit.train.soundness import Fault, FaultKind, RollbackRequired
from toolkit.train.state import StateWriter

log = logging.getLogger(__name__)


class SaveTimer:
    """Whether ``seconds`` have passed since the last save. Only rank 0's counts, because clocks differ.
    ``checkpoint.every=auto`` sets its ``seconds`` during the run.
    """

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._since = clock()

    def due(self) -> bool:
        return self.seconds is not None and self._clock() - self._since >= self.seconds

    def restart(self) -> None:
        self._since = self._clock()


class Checkpoints(Hook):
    """Save at ``checkpoint.every``, after an evaluation that is among the best if these are kept, after the
    last step if configured, and before a stop if there is time.

    A failed background save is logged, and the next save is made in the foreground: it succeeds, or ends the
    run on all ranks at the same step.

    A state that is not finite is never saved, so ``latest`` and retention never prefer it to a sound one.
    Training ends there, goes back with ``train.on_nonfinite=rollback``, or goes on with ``skip`` if more
    steps follow.

    Args:
        on_checkpoint: receives the path of each complete checkpoint.
        observers: receive the timing of saves.
        sound: called once for each save; returns whether the state is sound.
        best: ranks checkpoints by a metric; None: all are alike.

    Attributes:
        skipped_last_save: the ranks agreed to stop, and there was no time to save.
    """

    part = CHECKPOINT

    def __init__(
        self,
        writer: StateWriter,
        store: CheckpointStore,
        timer: SaveTimer,
        *,
        on_checkpoint: Callable[[Path], None],
        observers: Sequence[SaveObserver] = (),
        sound: Callable[[], bool] = lambda: True,
        best: BestCheckpoints | None = None,
    ) -> None:
        self.skipped_last_save = False
        self._writer, self._store, self._timer = writer, store, timer
        self._context, self._plan = writer.context, writer.context.plan
        self._on_checkpoint, self._observers, self._sound, self._best = on_checkpoint, observers, sound, best
        self._every_steps = parse_cadence(self._plan.config.checkpoint.every).steps
        self._pending: PendingSave | None = None
        self._failed = False

    def on_step(self, completed: CompletedStep) -> None:
        step, consensus, last = completed.step, completed.consensus, completed.last
        if self._pending is not None and self._pending.done():
            self._finish_pending()
        if consensus.stop and consensus.too_late_to_save and not last:
            self.skipped_last_save = True
            return
        checkpoint = self._plan.config.checkpoint
        by_steps = self._every_steps is not None and step % self._every_steps == 0
        at_end = last and (checkpoint.at_end or checkpoint.export)
        best = self._best is not None and self._best.due(step)
        if by_steps or at_end or best or consensus.save_due or consensus.stops:
            self._save(completed, last=last or consensus.stops)

    def on_rollback(self, path: Path) -> None:
        self._store.forget_last_save()

    def on_end(self, step: int) -> None:
        self.wait()

    def wait(self) -> None:
        """Wait for the pending save, if there is one."""
        start = time.monotonic()
        self._finish_pending()
        self._report_blocked(start)

    def _save(self, completed: CompletedStep, *, last: bool) -> None:
        """Save the state; ``last`` if this attempt makes no later save."""
        start, step = time.monotonic(), completed.step
        self._finish_pending()
        shards = self._writer.engine.shards()
        if not finite_on_all_ranks(shards, self._context.all_reduce_flags):
            reason = f"after step {step} weights or the optimizer's state are not finite, and are not saved"
            if self._plan.config.train.on_nonfinite is OnNonfinite.rollback:
                raise RollbackRequired(
                    Fault(
                        step=step,
                        kind=FaultKind.STATE,
                        loss=completed.result.loss,
                        grad_norm=completed.result.grad_norm,
                        weights_finite=False,
                        cause=reason,
                    )
                )
            if last or self._plan.config.train.on_nonfinite is OnNonfinite.stop:
                raise Diverged(reason, weights_finite=False)
            self._warn(reason)
            return
        for observer in self._observers:
            observer.on_save_start(step)
        background = self._plan.saves.background and not last and not self._failed
        self._pending = self._writer.save(
            self._store,
            step,
            shards,
            sound=self._sound(),  # before the hooks' states
            background=background,
            best=self._best.steps(step) if self._best is not None else [],  # before the hooks' states
        )
        self._timer.restart()
        if not background:
            self._finish_pending()
        self._report_blocked(start)

    def _finish_pending(self) -> None:
        """Wait for the pending save, if there is one, and report how it ended."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.wait()
        except Exception as error:  # noqa: BLE001  the next save, in the foreground, shows whether the error persists
            self._failed = True
            self._warn(
                f"{pending.path} could not be saved, and the next save is made in the foreground: "
                f"{type(error).__name__}: {error}"
            )
        else:
            self._failed = False
            step = step_of(pending.path)
            assert step is not None, f"{pending.path} is a checkpoint of this run"
            for observer in self._observers:
                observer.on_save_end(step, pending.seconds or 0.0, pending.size)
            self._on_checkpoint(pending.path)

    def _report_blocked(self, start: float) -> None:
        seconds = time.monotonic() - start
        for observer in self._observers:
            observer.on_save_blocked(seconds)

    def _warn(self, message: str) -> None:
        if self._context.rank == 0:
            log.warning(message)
