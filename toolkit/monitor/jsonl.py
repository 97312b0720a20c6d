"""One file for each kind of row: one JSON object a line, floats in full precision (``NaN`` and ``Infinity`` as Python's ``json`` writes
and reads them)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from toolkit.monitor.sink import Kind, NullSink, Row


class JsonlSink(NullSink):
    """Each row is handed to the system at once: whoever follows the file sees it, and a killed process loses none.

    Args:
        paths: the file of each kind of row; other kinds are passed over.
    """

    def __init__(self, paths: Mapping[Kind, Path]) -> None:
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        self._files = {kind: path.open("a", encoding="utf-8") for kind, path in paths.items()}

    def log(self, kind: Kind, row: Row) -> None:
        if kind in self._files:
            _write(self._files[kind], row)

    def close(self, exit_code: int) -> None:
        for file in self._files.values():
            file.close()


def _write(file: TextIO, row: Row) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()


def read_rows(path: Path, advance: Callable[[float], object] = lambda characters: None) -> Iterator[dict[str, Any]]:
    """The whole rows of a file; none where it is not there. A line that a stopped machine tore is passed over.

    Args:
        advance: is told how many characters (bytes: rows are ASCII) each line has; for a display of progress.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            advance(len(line))
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if line.endswith("\n") and isinstance(row, dict):
                yield row
