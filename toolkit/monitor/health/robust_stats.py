"""Statistics that one odd value does not move, of a bounded number of values: what detectors compare with."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from statistics import median

NEIGHBOURS = 0.954  # median absolute difference of two normal values, in standard deviations: sqrt(2) times their quartile of 0.6745


def noise_level(values: Sequence[float]) -> float:
    """The standard deviation of values around whatever they follow, by the median difference of neighbours: a trend is none."""
    return median(abs(after - before) for before, after in itertools.pairwise(values)) / NEIGHBOURS


class BestMedian:
    """The smallest median of a block of values so far: what a run can do when nothing is wrong with it.

    It only falls, so that what gets worse slowly is compared with how it began. The median of a block keeps a lucky value out of it.
    """

    def __init__(self, block: int, first: int | None = None) -> None:
        """``first``: the length of the first block, where one should not wait for a whole one."""
        self._block = block
        self._values: list[float] = []
        self._length = first or block
        self.value: float | None = None  # None until the first block is whole

    def add(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) == self._length:
            middle = median(self._values)
            self.value = middle if self.value is None else min(self.value, middle)
            self._values.clear()
            self._length = self._block


class LastingCondition:
    """Whether something has been so in most of the newest steps: ``least`` of ``length``."""

    def __init__(self, length: int, least: int) -> None:
        self._newest: deque[bool] = deque(maxlen=length)
        self.length, self._least = length, least

    def add(self, so: bool) -> bool:
        self._newest.append(so)
        return self.count >= self._least

    @property
    def count(self) -> int:
        return sum(self._newest)


class BlockMinima:
    """A long series in a bounded number of values: each the smallest of a block, and blocks double when there are too many.

    The smallest, because what a process holds rises and falls within a step: a leak lifts the floor.
    """

    def __init__(self, most: int, first: int = 1) -> None:
        assert most % 2 == 0, f"{most} blocks cannot be joined in pairs"
        self._most, self.length = most, first
        self.values: list[float] = []
        self._low, self._count = float("inf"), 0

    def add(self, value: float) -> bool:
        """Whether a block is whole with it."""
        self._low, self._count = min(self._low, value), self._count + 1
        if self._count < self.length:
            return False
        self.values.append(self._low)
        self._low, self._count = float("inf"), 0
        if len(self.values) == self._most:
            self.values = [min(pair) for pair in zip(self.values[::2], self.values[1::2], strict=True)]
            self.length *= 2
        return True
