"""Whether the state can still be saved before a run that was asked to stop is ended; and what is lost where it cannot.

A save that does not fit would be torn in the middle: nothing of it counts, and the run would end as a failure instead of a stop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from toolkit.goodput import SaveRecord
from toolkit.plan.saving import assumed_speed, rank_bytes
from toolkit.plan.types import RunPlan
from toolkit.progress import duration, quantity
from toolkit.train.saving import NoCosts

SAVES = 5  # the newest, whose speed counts


@dataclass(frozen=True, slots=True)
class SaveEstimate:
    seconds: float
    words: str


class SaveDeadline(NoCosts):
    """
    Args:
        earlier: saves of earlier attempts, in their order, as far as this rank can read of them.
    """

    def __init__(self, plan: RunPlan, earlier: Iterable[SaveRecord] = ()) -> None:
        self._size, self._assumed = rank_bytes(plan), assumed_speed(plan.world)
        self._left: float | None = None  # when it was found to be too late
        self._saves = deque(
            ((save.seconds, save.bytes) for save in earlier if save.bytes and save.seconds), maxlen=SAVES
        )

    def saved(self, step: int, seconds: float, size: int) -> None:
        if seconds and size:
            self._saves.append((seconds, size))
            self._size = size

    def estimate(self) -> SaveEstimate | None:
        """Of a save now; None where nothing is known of it."""
        if self._saves:
            speed = median(size / seconds for seconds, size in self._saves)
            seconds = (
                self._size / speed if self._size is not None else median(took for took, _ in self._saves)
            )
            return SaveEstimate(
                seconds, f"a save takes about {seconds:.3g} s, by the speed of the last {len(self._saves)}"
            )
        if self._size is None:
            return None
        seconds = self._size / self._assumed
        return SaveEstimate(
            seconds,
            f"a save of {quantity(self._size, 'B')} a rank takes about {seconds:.3g} s, if a rank writes "
            f"{quantity(self._assumed, 'B')} a second, which nobody has measured here",
        )

    def too_late(self, seconds_left: float | None) -> bool:
        """``seconds_left`` is None where this rank was not asked to stop, or nobody ends it."""
        if seconds_left is None:
            return False
        estimate = self.estimate()
        late = estimate is not None and estimate.seconds > seconds_left
        self._left = seconds_left if late else None
        return late

    def words(self, reason: str, *, step: int, saved: int | None, work: float) -> str:
        """To people and for ``status.json``, of a stop without a save.

        Args:
            saved: step of the newest checkpoint; None: there is none.
            work: seconds of the steps since then.
        """
        estimate = self.estimate()
        known = (
            estimate is not None and self._left is not None
        )  # else another rank, which was asked, has found it
        why = (
            f"{estimate.words}, and {self._left:.3g} s were left"
            if estimate is not None and known
            else "there was no time for it"
        )
        kept = f"the newest checkpoint is of step {saved}" if saved is not None else "there is no checkpoint"
        steps = step - (saved or 0)
        return (
            f"{reason}; not saved: {why}; {kept}, so {steps} step{'s' * (steps != 1)} and {duration(work)} of work will be done again. "
            f"checkpoint.every decides how much that is"
        )
