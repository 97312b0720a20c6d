"""The interface of detectors and what they share. A detector reads rows, keeps bounded state, and returns
alerts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from toolkit.monitor.alert import Alert
from toolkit.monitor.sink import Kind, Row

# The first steps of a start compile, allocate and fill caches, so their times are not compared.
WARM_UP = 10
# A condition lasts if it held in this many of the last ``WINDOW`` steps: noise does not, and a fault is found
# within 20 steps.
LASTING_STEPS, WINDOW = 16, 20
LONG_WINDOW = 200  # steps searched for occasional problems
# shorter steps are joined to groups of this length, because twenty steps of a few milliseconds are one hiccup
GROUP_SECONDS = 1.0
# Differences below this are caused by the operating system's scheduler.
MIN_SECONDS = 0.005

T = TypeVar("T")
SizeOfStep = Callable[
    [int], int
]  # completed steps -> samples in the newest step; a batch ramp changes the cost of a step


class Detector:
    """Base class. ``check`` receives every row of ``kinds``, ordered by step within each kind.

    A detector may return the same alert for every row; ``AlertLimiter`` decides which alerts are shown.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.STEP,)

    def check(self, kind: Kind, row: Row) -> Alert | None:
        """Return an alert if something is wrong after this row."""
        raise NotImplementedError


class WarmUp:
    """Count the first rows of an attempt."""

    def __init__(self, steps: int = WARM_UP) -> None:
        self._left = steps

    def advance(self) -> bool:
        """Count one more row and return whether the warm-up is over."""
        self._left -= 1
        return self._left < 0


class TimeGroups(Generic[T]):
    """Join the entries of consecutive steps until they last ``GROUP_SECONDS``."""

    def __init__(self) -> None:
        self._entries: list[T] = []
        self._seconds = 0.0

    def add(self, lasted: float, entry: T) -> tuple[T, ...] | None:
        """Add a step's entry; return the entries of the group if this step completes it."""
        self._entries.append(entry)
        self._seconds += lasted
        if self._seconds < GROUP_SECONDS:
            return None
        group, self._entries, self._seconds = tuple(self._entries), [], 0.0
        return group


def format_seconds(value: float) -> str:
    """Format ``0.0123`` as ``12.3 ms``."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def format_percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"
