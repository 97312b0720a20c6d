"""Files of rows read into curves, in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.monitor.jsonl import last_row, read_rows
from toolkit.monitor.report.reduce import EMPTY, POINTS, SAMPLE, Curves, bucket_width, reduce

Advance = Callable[[float], object]  # is told how many bytes were read
ADVANCE_BYTES = 1 << 20  # between two updates of the display


def nothing(amount: float) -> None:
    """For what is too small to be shown."""


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def curves_of(path: Path, place: str, figures: Callable[[Mapping[str, Any]], Mapping[str, float]], advance: Advance, *, whole: bool,
              points: int = POINTS, keep: int = SAMPLE) -> Curves:
    """A file's figures over ``place``, the key that orders its rows; empty where there is none."""
    first = next(placed(path, place), None)
    if first is None:
        return EMPTY
    low, high = first[place], (last_row(path) or {}).get(place)
    if not is_number(high):
        high = max(row[place] for row in placed(path, place))
    rows = ((row[place], figures(row)) for row in placed(path, place, advance))
    return reduce(rows, low, bucket_width(low, max(low, high), whole=whole, points=points), keep)


def placed(path: Path, place: str, advance: Advance = nothing) -> Iterator[dict[str, Any]]:
    """The rows that have ``place``."""
    return (row for row in read_rows(path, advance) if is_number(row.get(place)) and math.isfinite(row[place]))


def batched(advance: Advance) -> Advance:
    """Told of each line, tells of each megabyte: a display is not to cost more than reading."""
    held = 0.0

    def add(amount: float) -> None:
        nonlocal held
        held += amount
        if held >= ADVANCE_BYTES:
            advance(held)
            held = 0.0

    return add
