"""Estimate whether the state can still be saved before a run that was asked to stop is killed.

A save that does not fit would be interrupted: nothing of it would count, and the run would end as a failure
instead of a stop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from toolkit.goodput import SaveRecord
from toolkit.hooks import SaveObserver
from toolkit.plan.checkpoint_size import assumed_speed, rank_bytes
from toolkit.plan.types import RunPlan
from toolkit.progress import duration, quantity

MAX_SAVES = 5  # the newest saves, whose speed counts


@dataclass(frozen=True, slots=True)
class SaveEstimate:
    seconds: float
    explanation: str


class SaveDeadline(SaveObserver):
    """
    Args:
        earlier: saves of earlier attempts, in order, as far as this rank can read of them.
    """

    def __init__(
        self, plan: RunPlan, earlier: Iterable[SaveRecord] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._started: float | None = None  # when the save that is still being written started
        self._size, self._assumed_speed = rank_bytes(plan), assumed_speed(plan.world)
        self._seconds_left: float | None = None  # when it was found to be too late
        self._saves = deque(
            ((save.seconds, save.bytes) for save in earlier if save.bytes and save.seconds), maxlen=MAX_SAVES
        )

    def on_save_start(self, step: int) -> None:
        self._started = self._clock()

    def on_save_end(self, step: int, seconds: float, size: int) -> None:
        self._started = None
        if seconds and size:
            self._saves.append((seconds, size))
            self._size = size

    def estimate(self) -> SaveEstimate | None:
        """Estimate the duration of a save now; None if nothing is known about it."""
        if self._saves:
            if self._size is not None:
                seconds = self._size / median(size / seconds for seconds, size in self._saves)
            else:
                seconds = median(seconds for seconds, _ in self._saves)
            explanation = f"a save takes about {seconds:.3g} s, by the speed of the last {len(self._saves)}"
            return SaveEstimate(seconds, explanation)
        if self._size is None:
            return None
        seconds = self._size / self._assumed_speed
        return SaveEstimate(
            seconds,
            f"a save of {quantity(self._size, 'B')} per rank takes about {seconds:.3g} s, if a rank writes "
            f"{quantity(self._assumed_speed, 'B')} per second, which has not been measured here",
        )

    def too_late(self, seconds_left: float | None) -> bool:
        """Return whether a save does not fit after the one that is still being written, if there is one.
        None: this rank was not asked to stop, or is not killed.
        """
        if seconds_left is None:
            return False
        estimate = self.estimate()
        late = estimate is not None and estimate.seconds + self._pending_seconds(estimate) > seconds_left
        self._seconds_left = seconds_left if late else None
        return late

    def _pending_seconds(self, estimate: SaveEstimate) -> float:
        """Return the seconds that the save in the background still needs."""
        if self._started is None:
            return 0.0
        return max(0.0, estimate.seconds - (self._clock() - self._started))

    def describe_lost_work(self, reason: str, *, step: int, saved: int | None, seconds: float) -> str:
        """Describe a stop without a save, for the log and ``status.json``.

        Args:
            saved: step of the newest checkpoint; None if there is none.
            seconds: time of the steps since then.
        """
        estimate = self.estimate()
        if estimate is not None and self._seconds_left is not None:
            pending = "" if self._started is None else ", after the one before, which had not ended"
            why = f"{estimate.explanation}{pending}, and {self._seconds_left:.3g} s were left"
        else:  # another rank found it too late
            why = "there was no time for it"
        newest = (
            f"the newest checkpoint is of step {saved}" if saved is not None else "there is no checkpoint"
        )
        steps = step - (saved or 0)
        return (
            f"{reason}; not saved: {why}; {newest}, so {steps} step{'s' * (steps != 1)} and "
            f"{duration(seconds)} of work will be repeated. checkpoint.every decides how much that is"
        )
