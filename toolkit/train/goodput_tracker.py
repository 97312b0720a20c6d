"""What an attempt's time goes into, kept in its folder while it runs (``toolkit/goodput.py``), and what the run's goodput is so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.goodput import (
    Attempt,
    AttemptTimes,
    Goodput,
    SaveRecord,
    append_save,
    compute_goodput,
    read_saves,
    read_times,
    write_times,
)
from toolkit.hooks import Hook, StepDone
from toolkit.monitor.sink import Row
from toolkit.observe.reporting import STATUS_SECONDS
from toolkit.train.saving import Costs


class GoodputTracker(Hook, Costs):
    """For rank 0. Comes before the hooks that save.

    Args:
        folder: the attempt's.
        before: the attempts before it.
        say: takes the words about the first step.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        before: Sequence[Attempt],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._before, self._say, self._clock = folder, tuple(before), say, clock
        now = clock()
        self._times = read_times(folder) or AttemptTimes(began=now, seen=now)
        self._next = 0.0
        self._begun: dict[int, float] = {}  # by step: seconds of steps when its save began
        self._saved = 0.0  # seconds of steps that the newest save of this attempt keeps

    def on_start(self, step: int) -> None:
        self._change(first=step, step=step)
        self._write()
        self._next = (
            0.0  # the first step stands there at once: whether there was one decides what follows a failure
        )

    def on_step(self, done: StepDone) -> None:
        times, now = self._times, self._clock()
        if times.first_step is None:
            starting = max(0.0, now - times.began - done.seconds - times.evaluating - times.saving)
            self._change(first_step=now, starting=starting)
            waited = ""
            if self._before:
                waited = f", and {max(0.0, now - self._before[-1].times.end):.1f} s after the end of the attempt before"
            self._say(
                f"the first step (step {done.step}) is done {now - times.began:.1f} s after the start{waited}"
            )
        self._change(step=done.step, stepping=times.stepping + done.seconds, active=now)
        if now >= self._next:
            self._write()

    def on_eval(self, row: Row) -> None:
        self._change(evaluating=self._times.evaluating + row["seconds"], active=self._clock())

    def on_end(self, step: int) -> None:
        self._write()

    # ---- saves

    def save_begun(self, step: int) -> None:
        self._begun[step] = self._times.stepping

    def stood_still(self, seconds: float) -> None:
        self._change(saving=self._times.saving + seconds, active=self._clock())

    def saved(self, step: int, seconds: float, size: int) -> None:
        stepping = self._begun.pop(step, None)
        if stepping is None:  # it was told before
            return
        self._saved = stepping
        append_save(self._folder, SaveRecord(step=step, seconds=seconds, bytes=size, stepping=stepping))
        self._write()

    # ---- the run so far

    @property
    def has_saved(self) -> bool:
        """Whether this attempt has saved a checkpoint."""
        return bool(read_saves(self._folder))

    def unsaved(self) -> float:
        """Seconds of this attempt's steps since its newest save."""
        return self._times.stepping - self._saved

    def goodput(self, kept: int | None = None) -> Goodput | None:
        """``kept``: the newest checkpoint's step where the run ends before its last one, and later steps will be lost."""
        now = Attempt(
            replace(self._times, seen=self._clock()),
            tuple(read_saves(self._folder)) if kept is not None else (),
        )
        return compute_goodput([*self._before, now], kept=kept)

    def status(self) -> Mapping[str, Any] | None:
        found = self.goodput()
        return found.to_json() if found is not None else None

    def _change(self, **changes: Any) -> None:
        self._times = replace(self._times, **changes)

    def _write(self) -> None:
        now = self._clock()
        self._change(seen=now)
        self._next = now + STATUS_SECONDS
        write_times(self._folder, self._times)
