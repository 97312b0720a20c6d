"""Positions of a run's order that it leaves out, after a rollback to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SkippedSamples:
    """Ranges of positions, ascending and separate; each includes its first position and excludes its end.

    Worked example: with ``ranges=((4, 8),)`` the samples that a run trains on are those at the positions
    0, 1, 2, 3, 8, 9, ...
    """

    ranges: tuple[tuple[int, int], ...] = ()

    def positions(self, numbers: Ints) -> Ints:
        """Return the positions of the samples that are number 0, 1, ... among those that are not skipped."""
        for first, end in self.ranges:
            numbers = np.where(numbers >= first, numbers + (end - first), numbers)
        return numbers

    def position(self, number: int) -> int:
        return int(self.positions(np.array(number, dtype=np.int64)))

    def add(self, ranges: Iterable[tuple[int, int]]) -> SkippedSamples:
        """Return these ranges and others, joined where they overlap or touch."""
        joined: list[tuple[int, int]] = []
        for first, end in sorted([*self.ranges, *ranges]):
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], end))
            else:
                joined.append((first, end))
        return SkippedSamples(tuple(joined))

    def counts(self, number: int, before: Callable[[int], Sequence[int]]) -> list[int]:
        """Return how many of the first ``number`` samples come from each source.

        Args:
            before: returns the number of samples of each source before a position, skipped ones included.
        """
        position = self.position(number)
        counts = list(before(position))
        for first, end in self.ranges:
            if end <= position:
                counts = [
                    count - (after - until)
                    for count, until, after in zip(counts, before(first), before(end), strict=True)
                ]
        return counts

    def to_state(self) -> dict[str, Any]:
        """Return what a checkpoint records, in JSON types; empty if nothing is skipped."""
        return {"skipped": [list(each) for each in self.ranges]} if self.ranges else {}

    @staticmethod
    def from_state(state: Any) -> SkippedSamples:
        return SkippedSamples().add((int(first), int(end)) for first, end in state.get("skipped", ()))
