"""Files of rows, one JSON object a line, as monitor/sinks/jsonl.py writes them: read while a run goes on, or after it was torn off."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TAIL = 1 << 16  # bytes: a hundred rows and more


def read_rows(
    path: Path, advance: Callable[[float], object] = lambda characters: None, every: int = 1
) -> Iterator[dict[str, Any]]:
    """The whole rows of a file; none where it is not there. A line that a stopped machine tore is passed over.

    Args:
        advance: is told how many characters (bytes, where texts are ASCII) each line has; for a display of progress.
        every: which of the rows are wanted: the first, and each so many after it. The others are not parsed, which is most of the work.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines):
            advance(len(line))
            row = None if number % every else parse_row(line)
            if line.endswith("\n") and row is not None:
                yield row


def last_row(path: Path) -> dict[str, Any] | None:
    """The last whole row of a file, without reading the others; None where there is none."""
    if not path.exists():
        return None
    size, tail = path.stat().st_size, TAIL
    while True:
        with path.open("rb") as file:
            file.seek(max(0, size - tail))
            lines = file.read().split(b"\n")
        whole = (
            lines[:-1] if tail >= size else lines[1:-1]
        )  # what follows the last line end is torn; the first line may be cut
        found = next((row for line in reversed(whole) if (row := parse_row(line)) is not None), None)
        if found is not None or tail >= size:
            return found
        tail *= 2


def float_of(value: float | None) -> float:
    """A row's figure. One that is not finite stands as ``null`` in the file, and is NaN here."""
    return math.nan if value is None else float(value)


def parse_row(line: str | bytes) -> dict[str, Any] | None:
    """None for a line that is torn, or no object."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
