"""Robust statistics over a bounded number of values, used by the detectors as references."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from statistics import median

# median absolute difference of two normal values, in standard deviations: sqrt(2) times their quartile of
# 0.6745
NEIGHBOURS = 0.954


def noise_level(values: Sequence[float]) -> float:
    """Estimate the standard deviation from the median difference of neighbours, which ignores a trend."""
    return median(abs(after - before) for before, after in itertools.pairwise(values)) / NEIGHBOURS


class BestMedian:
    """The smallest median of a block of values so far: the best that a healthy run reached.

    It never rises, so that a slow decline is compared with the beginning. The median keeps a single lucky
    value out.
    """

    def __init__(self, block: int, first: int | None = None) -> None:
        """``first``: the length of the first block, if a reference is needed before a full block is
        available.
        """
        self._block = block
        self._values: list[float] = []
        self._length = first or block
        self.value: float | None = None  # None until the first block is complete

    def add(self, value: float) -> None:
        self._values.append(value)
        if len(self._values) == self._length:
            middle = median(self._values)
            self.value = middle if self.value is None else min(self.value, middle)
            self._values.clear()
            self._length = self._block


class LastingCondition:
    """Whether a condition held in at least ``least`` of the last ``length`` steps."""

    def __init__(self, length: int, least: int) -> None:
        self._newest: deque[bool] = deque(maxlen=length)
        self.length, self._least = length, least

    def add(self, holds: bool) -> bool:
        self._newest.append(holds)
        return self.count >= self._least

    @property
    def count(self) -> int:
        return sum(self._newest)


class BlockMinima:
    """The minima of equal blocks of a long series. When there are too many, pairs of blocks are merged.

    Minima, because the memory of a process fluctuates and a leak raises its minimum.
    """

    def __init__(self, most: int, first: int = 1) -> None:
        assert most % 2 == 0, f"{most} blocks cannot be merged in pairs"
        self._most, self.length = most, first
        self.values: list[float] = []
        self._low, self._count = float("inf"), 0

    def add(self, value: float) -> bool:
        """Add a value; return whether it completes a block."""
        self._low, self._count = min(self._low, value), self._count + 1
        if self._count < self.length:
            return False
        self.values.append(self._low)
        self._low, self._count = float("inf"), 0
        if len(self.values) == self._most:
            self.values = [min(pair) for pair in zip(self.values[::2], self.values[1::2], strict=True)]
            self.length *= 2
        return True
