"""Read JSONL files, as ``monitor/sinks/jsonl.py`` writes them, also during a run or after an interrupted
write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TAIL = 1 << 16  # bytes: more than a hundred rows


def read_rows(
    path: Path, advance: Callable[[float], object] = lambda characters: None, every: int = 1
) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a file; nothing if it does not exist. Incomplete lines are skipped.

    Args:
        path: The file.
        advance: Called with the number of characters of each line, for progress.
        every: Yield the first row and every n-th after it. The others are not parsed, which saves most of the
            time.
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
    """Return the last complete row of a file without reading the others; None if there is none."""
    if not path.exists():
        return None
    size, tail = path.stat().st_size, TAIL
    while True:
        with path.open("rb") as file:
            file.seek(max(0, size - tail))
            lines = file.read().split(b"\n")
        whole = (
            lines[:-1] if tail >= size else lines[1:-1]
        )  # text after the last newline is incomplete; the first line may be cut
        found = next((row for line in reversed(whole) if (row := parse_row(line)) is not None), None)
        if found is not None or tail >= size:
            return found
        tail *= 2


def float_or_nan(value: float | None) -> float:
    """Return a row's value; ``null`` in the file, which stands for a value that is not finite, becomes
    NaN."""
    return math.nan if value is None else float(value)


def parse_row(line: str | bytes) -> dict[str, Any] | None:
    """Return None for an incomplete line or one that is not an object."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
