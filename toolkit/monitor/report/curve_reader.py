"""Read files of rows into downsampled curves, in one pass."""

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

Advance = Callable[[float], object]  # receives the number of bytes read
ADVANCE_BYTES = 1 << 20  # between two updates of the progress bar
HEAD = 50  # rows at the beginning of a file from which the others are estimated
LEAST_SECONDS = 1e-3


def ignore_progress(amount: float) -> None:
    """Ignore the progress of reading small files."""


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_curves(
    path: Path,
    x_key: str,
    metrics: Callable[[Mapping[str, Any]], Mapping[str, float]],
    advance: Advance,
    *,
    width: Callable[[Path, str, int], float],
    points: int = POINTS,
    keep: int = MEDIAN_SAMPLE,
    every: int = 1,
) -> Curves:
    """Read a file's metrics over ``x_key``, by which its rows are ordered, into about ``points`` buckets.

    Returns no curves if the file has no rows. ``every``: see ``read_rows``.
    """
    first = next(rows_with(path, x_key), None)
    if first is None:
        return NO_CURVES
    rows = ((row[x_key], metrics(row)) for row in rows_with(path, x_key, advance, every))
    return downsample(rows, first[x_key], width(path, x_key, points), keep)


def step_bucket_width(path: Path, x_key: str, points: int) -> float:
    """Return the bucket width for a file with one row per step."""
    first, last = next(rows_with(path, x_key)), last_row(path)
    if last is None or not is_number(last.get(x_key)):
        last = max(rows_with(path, x_key), key=lambda row: row[x_key])
    return bucket_width(first[x_key], max(first[x_key], last[x_key]), points)


def time_bucket_width(path: Path, x_key: str, points: int) -> float:
    """Return the bucket width for samples at regular times.

    Days may pass between two attempts without samples, so the width follows from the number of rows and the
    interval between the first ones instead of the total time.
    """
    times, rows = _head(path, x_key)
    interval = statistics.median([after - before for before, after in pairwise(times)] or [1.0])
    return max(interval, LEAST_SECONDS) * max(0.5, math.ceil(rows / points))


def estimate_rows(path: Path, x_key: str) -> float:
    """Estimate the number of rows from the file's size and its first rows."""
    return _head(path, x_key)[1]


def _head(path: Path, x_key: str) -> tuple[list[float], float]:
    """Return ``x_key`` of the first rows, and an estimate of the number of rows."""
    read = 0.0

    def count(characters: float) -> None:
        nonlocal read
        read += characters

    positions = [row[x_key] for row in islice(rows_with(path, x_key, count), HEAD)]
    return positions, path.stat().st_size / read * len(positions) if positions else 0.0


def rows_with(
    path: Path, x_key: str, advance: Advance = ignore_progress, every: int = 1
) -> Iterator[dict[str, Any]]:
    """Iterate over the rows that have a finite ``x_key``."""
    return (
        row
        for row in read_rows(path, advance, every)
        if is_number(row.get(x_key)) and math.isfinite(row[x_key])
    )


@contextmanager
def batch_progress(advance: Advance) -> Iterator[Advance]:
    """Collect the progress of single lines to megabytes, so that displaying it costs less than reading."""
    pending = 0.0

    def add(amount: float) -> None:
        nonlocal pending
        pending += amount
        if pending >= ADVANCE_BYTES:
            advance(pending)
            pending = 0.0

    yield add
    advance(pending)
