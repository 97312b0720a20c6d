"""Rows of any number become curves of a bounded number of points, in one pass and in bounded memory.

Rows are cut into buckets of equal width along their steps (or their time). Of each figure a bucket keeps the smallest, the median and the
largest value, so no spike is lost, however many rows there are; a bucket with one row keeps that row as it is.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

POINTS = 1200  # buckets of a curve: about as many as a screen has pixels
MEDIAN_SAMPLE = 65_536  # values of which an overall median is taken


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure, aligned with ``Curves.x``; None where a bucket has no finite value of it.

    ``sum`` is for what adds up, as time does: a save in one of a hundred steps is not in their median.
    """

    low: list[float | None]
    mid: list[float | None]
    high: list[float | None]
    sum: list[float | None]


@dataclass(slots=True)
class RunningStats:
    """One figure over all rows, whatever the buckets are. All but ``not_finite`` are of the finite values.

    ``keep`` values, evenly spread, are held for the median; 0: it is not asked for.
    """

    keep: int = MEDIAN_SAMPLE
    count: int = 0
    not_finite: int = 0
    sum: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    first: float | None = None
    last: float | None = None
    _sample: array[float] = field(default_factory=lambda: array("d"))
    _stride: int = 1

    def add(self, values: Sequence[float]) -> list[float]:
        """Take values in the order of their rows; returns the finite ones."""
        finite = [value for value in values if math.isfinite(value)]
        self.not_finite += len(values) - len(finite)
        if finite:
            self.count += len(finite)
            self.sum += math.fsum(finite)
            self.low, self.high = min(self.low, min(finite)), max(self.high, max(finite))
            self.first, self.last = finite[0] if self.first is None else self.first, finite[-1]
        if self.keep:
            self._sample.extend(finite[:: self._stride])
        if len(self._sample) > self.keep:
            self._sample, self._stride = self._sample[::2], self._stride * 2
        return finite

    @property
    def median(self) -> float | None:
        """Exact up to ``keep`` values. None without a finite value."""
        return statistics.median(self._sample) if self._sample else None

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Curves:
    """
    Attributes:
        x: the place of each bucket: its only row's step or time, or the middle of its first and last row's.
        rows: how many there were.
        width: of a bucket, in steps or seconds.
    """

    x: list[float]
    curves: dict[str, Curve]
    totals: dict[str, RunningStats]
    rows: int
    width: float

    def total(self, name: str) -> RunningStats:
        """An empty one where no row has this figure."""
        return self.totals.get(name, RunningStats())


NO_CURVES = Curves([], {}, {}, 0, 1)


def bucket_width(first: float, last: float, points: int = POINTS) -> float:
    """In steps, such that at most ``points`` buckets reach from ``first`` to ``last``, both in."""
    return max(1, math.ceil((last - first + 1) / points))


def downsample(
    rows: Iterable[tuple[float, Mapping[str, float]]], first: float, width: float, keep: int = MEDIAN_SAMPLE
) -> Curves:
    """Place and figures of each row, in order; a row that goes back to an earlier bucket begins another one."""
    x: list[float] = []
    points: dict[str, dict[int, tuple[float, float, float, float]]] = defaultdict(
        dict
    )  # by figure, then by index into x
    totals: dict[str, RunningStats] = defaultdict(lambda: RunningStats(keep))
    count = 0
    for _, bucket in groupby(rows, lambda row: math.floor((row[0] - first) / width)):
        held: dict[str, list[float]] = defaultdict(list)
        begin = end = math.nan
        before = count
        for place, figures in bucket:
            begin, end, count = (place if count == before else begin), place, count + 1
            for name, value in figures.items():
                held[name].append(value)
        for name, values in held.items():
            finite = totals[name].add(values)
            if finite:
                points[name][len(x)] = (
                    min(finite),
                    statistics.median(finite),
                    max(finite),
                    math.fsum(finite),
                )
        x.append(begin if begin == end else (begin + end) / 2)
    return Curves(
        x, {name: _aligned(by_index, len(x)) for name, by_index in points.items()}, dict(totals), count, width
    )


def _aligned(by_index: Mapping[int, tuple[float, float, float, float]], length: int) -> Curve:
    points = [by_index.get(number) for number in range(length)]
    return Curve(*([None if point is None else point[which] for point in points] for which in range(4)))
