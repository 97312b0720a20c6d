"""Record how this attempt spends its time (``toolkit/goodput.py``), and compute the run's goodput so far."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.checkpoint_folder import step_of
from toolkit.goodput import (
    Attempt,
    AttemptTimes,
    Goodput,
    SaveRecord,
    append_save,
    compute_goodput,
    read_saves,
    read_times,
    write_saves,
    write_times,
)
from toolkit.hooks import CompletedStep, Hook, SaveObserver
from toolkit.monitor.sink import Row
from toolkit.observe.progress_hooks import STATUS_SECONDS
from toolkit.restart_phases import RestartPhase, RestartPhases, write_restart

log = logging.getLogger(__name__)


class GoodputTracker(Hook, SaveObserver):
    """Track one attempt. For rank 0; it comes before the hooks that save.

    Args:
        folder: the attempt's folder.
        earlier: the attempts before it.
        clock: seconds since 1970.
        restart: the phases of the restart that started this attempt.
    """

    def __init__(
        self,
        folder: Path,
        earlier: Sequence[Attempt],
        clock: Callable[[], float] = time.time,
        *,
        restart: RestartPhases | None = None,
    ) -> None:
        self._folder, self._earlier, self._clock = folder, tuple(earlier), clock
        self._restart = restart
        now = clock()
        self._times = read_times(folder) or AttemptTimes(began=now, seen=now)
        self._next = 0.0
        self._saving: dict[int, float] = {}  # seconds of steps when the save of a step started
        self._saved = 0.0  # seconds of steps that this attempt's newest checkpoint includes

    def on_start(self, step: int) -> None:
        self._update(first=step, step=step)
        self._write()
        self._next = (
            0.0  # write the first step at once: what follows a failure depends on whether there was one
        )

    def on_step(self, completed: CompletedStep) -> None:
        times, now = self._times, self._clock()
        if times.first_step is None:
            starting = max(0.0, now - times.began - completed.seconds - times.evaluating - times.saving)
            self._update(first_step=now, starting=starting)
            since_end = ""
            if self._earlier:
                waited = max(0.0, now - self._earlier[-1].times.end)
                since_end = f", and {waited:.1f} s after the previous attempt ended"
            since_start = f"{now - times.began:.1f} s after the start"
            log.info(f"completed the first step (step {completed.step}) {since_start}{since_end}")
            if self._restart is not None:
                phases = self._restart.ended(RestartPhase.FIRST_STEP, now)
                log.info(phases.describe())
                write_restart(self._folder, phases)
        self._update(step=completed.step, stepping=times.stepping + completed.seconds, active=now)
        if now >= self._next:
            self._write()

    def on_eval(self, row: Row) -> None:
        self._update(evaluating=self._times.evaluating + row["seconds"], active=self._clock())

    def on_rollback(self, path: Path) -> None:
        step, saves = step_of(path) or 0, read_saves(self._folder)
        times = self._times
        useful = Attempt(times, saves).work(step)
        self._update(
            first=min(times.first or 0, step),
            step=step,
            stepping=useful,
            repeated=times.repeated + times.stepping - useful,
        )
        write_saves(self._folder, (save for save in saves if save.step <= step))
        self._saving.clear()
        self._saved = min(self._saved, useful)
        self._write()

    def on_end(self, step: int) -> None:
        self._write()

    # ---- saves

    def on_save_start(self, step: int) -> None:
        self._saving[step] = self._times.stepping

    def on_save_blocked(self, seconds: float) -> None:
        self._update(saving=self._times.saving + seconds, active=self._clock())

    def on_save_end(self, step: int, seconds: float, size: int) -> None:
        stepping = self._saving.pop(step, None)
        if stepping is None:  # the last step may be saved twice
            return
        self._saved = stepping
        append_save(self._folder, SaveRecord(step=step, seconds=seconds, bytes=size, stepping=stepping))
        self._write()

    def set_interval(self, seconds: float, pause: float | None, between_failures: float) -> None:
        """Record the interval of ``checkpoint.every=auto`` with the next write; see ``AttemptTimes``."""
        self._update(save_interval=seconds, save_pause=pause, between_failures=between_failures)

    # ---- the run so far

    @property
    def began(self) -> float:
        """Start of this attempt, in seconds since 1970."""
        return self._times.began

    @property
    def has_saved(self) -> bool:
        """Whether this attempt has saved a checkpoint."""
        return bool(read_saves(self._folder))

    def unsaved_seconds(self) -> float:
        """Return the seconds of this attempt's steps since its newest checkpoint."""
        return self._times.stepping - self._saved

    def goodput(self, saved_step: int | None = None) -> Goodput | None:
        """Compute the goodput of all attempts.

        Args:
            saved_step: step of the newest checkpoint, if the run stops before its last step and later steps
                are lost.
        """
        saves = read_saves(self._folder) if saved_step is not None else ()
        current = Attempt(replace(self._times, seen=self._clock()), saves)
        return compute_goodput([*self._earlier, current], kept=saved_step)

    def status(self) -> Mapping[str, Any] | None:
        goodput = self.goodput()
        return goodput.to_json() if goodput is not None else None

    def _update(self, **changes: Any) -> None:
        self._times = replace(self._times, **changes)

    def _write(self) -> None:
        now = self._clock()
        self._update(seen=now)
        self._next = now + STATUS_SECONDS
        write_times(self._folder, self._times)
