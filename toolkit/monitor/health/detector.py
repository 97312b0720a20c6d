"""What all detectors share. A detector sees rows, keeps a bounded memory of them, and says when something is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from toolkit.monitor.alert import Alert
from toolkit.monitor.sink import Kind, Row

# The first steps of a start compile, allocate and fill caches: no time of theirs is compared with anything.
WARM_UP = 10
# Something is lasting when it was so in this many of so many steps: no noise is, and it is known within 20 steps.
LASTING_STEPS, WINDOW = 16, 20
LONG_WINDOW = 200  # steps that are looked at for what comes now and then
GROUP_SECONDS = 1.0  # steps that are shorter are joined before a lasting state is judged: twenty of a few milliseconds are one hiccup
# Less than this of a step is what a machine's scheduler does to any process, and nobody's trouble.
MIN_SECONDS = 0.005

T = TypeVar("T")
SizeOfStep = Callable[
    [int], int
]  # completed steps -> samples of the newest of them: a batch ramp changes what a step costs


class Detector:
    """``see`` gets every row of ``kinds``, in the order of their steps within a kind. It may answer with the same trouble at every row:
    ``Limiter`` decides how often people hear of it."""

    kinds: ClassVar[tuple[Kind, ...]] = (Kind.STEP,)

    def see(self, kind: Kind, row: Row) -> Alert | None:
        """What is wrong by now; None: nothing that this detector knows of."""
        raise NotImplementedError


class WarmUp:
    """Counts the first rows of a start."""

    def __init__(self, steps: int = WARM_UP) -> None:
        self._left = steps

    def over(self) -> bool:
        """Of one more row."""
        self._left -= 1
        return self._left < 0


class TimeGroups(Generic[T]):
    """Joins the entries of steps until they last ``UNIT_SECONDS``."""

    def __init__(self) -> None:
        self._held: list[T] = []
        self._seconds = 0.0

    def add(self, lasted: float, entry: T) -> tuple[T, ...] | None:
        """The entries of a whole unit, if this step of ``lasted`` seconds is its last one."""
        self._held.append(entry)
        self._seconds += lasted
        if self._seconds < GROUP_SECONDS:
            return None
        unit, self._held, self._seconds = tuple(self._held), [], 0.0
        return unit


def format_seconds(value: float) -> str:
    """``0.0123`` -> ``12.3 ms``."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def format_percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"
