"""One file for each kind of row: one JSON object a line, floats in full precision (``NaN`` and ``Infinity`` as Python's ``json`` writes
and reads them)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from toolkit.monitor.sink import Kind, NullSink, Row


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
