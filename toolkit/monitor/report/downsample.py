"""Reduce any number of rows to curves with a bounded number of points, in one pass and bounded memory.

Rows are divided into buckets of equal width in steps or time. Of each metric a bucket keeps the minimum,
median and maximum, so that no spike is lost.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

POINTS = 1200  # buckets of a curve, about the width of a screen in pixels
MEDIAN_SAMPLE = 65_536  # values from which an overall median is computed


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric, aligned with ``Curves.x``; None if a bucket has no finite value.

    ``sum`` is for additive metrics such as time: a save in one of a hundred steps does not change their
    median.
    """

    low: list[float | None]
    mid: list[float | None]
    high: list[float | None]
    sum: list[float | None]


@dataclass(slots=True)
class RunningStats:
    """Statistics of one metric over all rows. All except ``not_finite`` are over the finite values.

    ``keep`` evenly spread values are stored for the median; 0 disables it.
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
        """Add values in the order of their rows, and return the finite ones."""
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
        """Exact up to ``keep`` values; None without a finite value."""
        return statistics.median(self._sample) if self._sample else None

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves of several columns over the same buckets.

    Attributes:
        x: position of each bucket: the middle of its first and last row's step or time.
        rows: the number of rows.
        width: of a bucket, in steps or seconds.
    """

    x: list[float]
    curves: dict[str, Curve]
    totals: dict[str, RunningStats]
    rows: int
    width: float

    def total(self, name: str) -> RunningStats:
        """Return the statistics of a metric, empty if no row has it."""
        return self.totals.get(name, RunningStats())


NO_CURVES = Curves([], {}, {}, 0, 1)


def bucket_width(first: float, last: float, points: int = POINTS) -> float:
    """Return the width in steps such that at most ``points`` buckets cover ``first`` to ``last``
    inclusively.
    """
    return max(1, math.ceil((last - first + 1) / points))


def downsample(
    rows: Iterable[tuple[float, Mapping[str, float]]], first: float, width: float, keep: int = MEDIAN_SAMPLE
) -> Curves:
    """Downsample rows of (x, metrics) in order. A row that goes back to an earlier bucket starts another
    one.
    """
    x: list[float] = []
    # by metric, then by index into x
    points: dict[str, dict[int, tuple[float, float, float, float]]] = defaultdict(dict)
    totals: dict[str, RunningStats] = defaultdict(lambda: RunningStats(keep))
    count = 0
    for _, bucket in groupby(rows, lambda row: math.floor((row[0] - first) / width)):
        values_by_metric: dict[str, list[float]] = defaultdict(list)
        begin = end = math.nan
        before = count
        for position, metrics in bucket:
            begin, end, count = (position if count == before else begin), position, count + 1
            for name, value in metrics.items():
                values_by_metric[name].append(value)
        for name, values in values_by_metric.items():
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
