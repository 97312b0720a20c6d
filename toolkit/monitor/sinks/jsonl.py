"""One file for each kind of row: one JSON object a line, floats in full precision (``NaN`` and ``Infinity`` as Python's ``json`` writes
and reads them)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from toolkit.monitor.sink import Kind, NullSink, Row

TAIL = 1 << 16  # bytes: a hundred rows and more


class JsonlSink(NullSink):
    """Each row is handed to the system at once: whoever follows the file sees it, and a killed process loses none.

    Args:
        paths: the file of each kind of row; other kinds are passed over.
    """

    def __init__(self, paths: Mapping[Kind, Path]) -> None:
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        self._files = {kind: _opened(path) for kind, path in paths.items()}

    def log(self, kind: Kind, row: Row) -> None:
        if kind in self._files:
            _write(self._files[kind], row)

    def close(self, exit_code: int) -> None:
        for file in self._files.values():
            file.close()


def _opened(path: Path) -> TextIO:
    """To append to. A line that a stopped machine or a killed process tore is ended, or the next row would be lost with it."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("a", encoding="utf-8")


def _write(file: TextIO, row: Row) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()


def read_rows(path: Path, advance: Callable[[float], object] = lambda characters: None, every: int = 1) -> Iterator[dict[str, Any]]:
    """The whole rows of a file; none where it is not there. A line that a stopped machine tore is passed over.

    Args:
        advance: is told how many characters (bytes: rows are ASCII) each line has; for a display of progress.
        every: which of the rows are wanted: the first, and each so many after it. The others are not parsed, which is most of the work.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines):
            advance(len(line))
            row = None if number % every else _parsed(line)
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
        whole = lines[:-1] if tail >= size else lines[1:-1]  # what follows the last line end is torn; the first line may be cut
        found = next((row for line in reversed(whole) if (row := _parsed(line)) is not None), None)
        if found is not None or tail >= size:
            return found
        tail *= 2


def _parsed(line: str | bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
