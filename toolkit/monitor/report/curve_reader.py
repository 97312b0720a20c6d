"""Files of rows read into curves, in one pass."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeGuard

from toolkit.monitor.report.downsample import (
    MEDIAN_SAMPLE,
    NO_CURVES,
    POINTS,
    Curves,
    bucket_width,
    downsample,
)
from toolkit.rows import last_row, read_rows

Advance = Callable[[float], object]  # is told how many bytes were read
ADVANCE_BYTES = 1 << 20  # between two updates of the display
HEAD = 50  # rows at the beginning of a file that stand for the others
LEAST_SECONDS = 1e-3


def ignore_progress(amount: float) -> None:
    """For what is too small to be shown."""


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_curves(
    path: Path,
    place: str,
    figures: Callable[[Mapping[str, Any]], Mapping[str, float]],
    advance: Advance,
    *,
    width: Callable[[Path, str, int], float],
    points: int = POINTS,
    keep: int = MEDIAN_SAMPLE,
    every: int = 1,
) -> Curves:
    """A file's figures over ``place``, the key that orders its rows, in about ``points`` buckets; empty where there is none. ``every``: see
    ``read_rows``."""
    first = next(rows_with(path, place), None)
    if first is None:
        return NO_CURVES
    rows = ((row[place], figures(row)) for row in rows_with(path, place, advance, every))
    return downsample(rows, first[place], width(path, place, points), keep)


def step_bucket_width(path: Path, place: str, points: int) -> float:
    """Of the buckets of a file with a row a step."""
    first, last = next(rows_with(path, place)), last_row(path)
    if last is None or not is_number(last.get(place)):
        last = max(rows_with(path, place), key=lambda row: row[place])
    return bucket_width(first[place], max(first[place], last[place]), points)


def time_bucket_width(path: Path, place: str, points: int) -> float:
    """Of the buckets of samples that come at regular times. A run may lie for days between two attempts, and that takes no buckets: so it
    is not asked how long all of it took, but how many rows there are, and how far apart the first ones are."""
    times, rows = _head(path, place)
    interval = statistics.median([after - before for before, after in pairwise(times)] or [1.0])
    return max(interval, LEAST_SECONDS) * max(0.5, math.ceil(rows / points))


def estimate_rows(path: Path, place: str) -> float:
    """How many rows a file has, by its size and its first ones'."""
    return _head(path, place)[1]


def _head(path: Path, place: str) -> tuple[list[float], float]:
    """The places of the first rows, and how many there may be in all."""
    read = 0.0

    def count(characters: float) -> None:
        nonlocal read
        read += characters

    places = [row[place] for row in islice(rows_with(path, place, count), HEAD)]
    return places, path.stat().st_size / read * len(places) if places else 0.0


def rows_with(
    path: Path, place: str, advance: Advance = ignore_progress, every: int = 1
) -> Iterator[dict[str, Any]]:
    """The rows that have ``place``."""
    return (
        row
        for row in read_rows(path, advance, every)
        if is_number(row.get(place)) and math.isfinite(row[place])
    )


@contextmanager
def batch_progress(advance: Advance) -> Iterator[Advance]:
    """Told of each line, tells of each megabyte, and at the end of the rest: a display is not to cost more than reading."""
    held = 0.0

    def add(amount: float) -> None:
        nonlocal held
        held += amount
        if held >= ADVANCE_BYTES:
            advance(held)
            held = 0.0

    yield add
    advance(held)
