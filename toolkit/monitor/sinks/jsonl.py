"""One file for each kind of row: one JSON object a line, floats in full precision.

JSON has no NaN and no infinity: such a number is written as ``null``, which pandas reads as NaN, and ``toolkit.rows.float_of``
too. Which of them it was stands in the alert and in the run's status.

orjson writes them in a twentieth of the time of Python's own: who writes keeps the interpreter from who trains.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from toolkit.monitor.sink import Kind, NullSink, Row

BUFFER_BYTES = 2**20  # each write lets go of the interpreter, and then waits to get it back from who trains


class JsonlSink(NullSink):
    """``flush`` hands rows to the system: whoever follows the file sees them then, and a killed process loses none of them.

    Args:
        paths: the file of each kind of row; other kinds are passed over.
    """

    def __init__(self, paths: Mapping[Kind, Path]) -> None:
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        self._files = {kind: _opened(path) for kind, path in paths.items()}

    def log(self, kind: Kind, row: Row) -> None:
        if kind in self._files:
            self._files[kind].write(encode_row(row))

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self, exit_code: int) -> None:
        for file in self._files.values():
            file.close()


def _opened(path: Path) -> BinaryIO:
    """To append to. A line that a stopped machine or a killed process tore is ended, or the next row would be lost with it."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("ab", buffering=BUFFER_BYTES)


def encode_row(row: Row) -> bytes:
    """A line. orjson writes null for a number that is not finite; it refuses whole numbers beyond 64 bits, which
    Python's own encoder has."""
    with suppress(orjson.JSONEncodeError):
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    return json.dumps(_without_nonfinite(row), allow_nan=False).encode() + b"\n"


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nonfinite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
