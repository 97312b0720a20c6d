"""One JSONL file for each kind of row, with floats in full precision.

JSON has no NaN and infinity: such a number is written as ``null``, which pandas and
``toolkit.rows.float_or_nan`` read as NaN. The alert and the run's status contain the original value. orjson
takes a twentieth of the time of Python's encoder, during which training cannot hold the interpreter.
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

from toolkit.files import write_whole
from toolkit.monitor.sink import Kind, Row, Sink

BUFFER_BYTES = 2**20  # few writes, because each one releases the interpreter and has to reacquire it


class JsonlSink(Sink):
    """Appends rows to files. ``flush`` hands them to the operating system, so that readers see them and a
    killed process loses none.

    Args:
        paths: the file of each kind of row; other kinds are ignored.
    """

    def __init__(self, paths: Mapping[Kind, Path]) -> None:
        for path in paths.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        self._files = {kind: _open_for_append(path) for kind, path in paths.items()}

    def log(self, kind: Kind, row: Row) -> None:
        if kind in self._files:
            self._files[kind].write(encode_row(row))

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self, exit_code: int) -> None:
        for file in self._files.values():
            file.close()


def _open_for_append(path: Path) -> BinaryIO:
    """Open a file for appending, and end an incomplete last line that a killed process left."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return path.open("ab", buffering=BUFFER_BYTES)


def append_durable_row(file: Path, row: Row) -> None:
    """Append a row to a short file; it is durable when this returns. An incomplete last line is removed."""
    content = file.read_bytes() if file.exists() else b""
    write_whole(file, content[: content.rfind(b"\n") + 1] + encode_row(row))


def encode_row(row: Row) -> bytes:
    """Encode a row as a line. orjson writes null for numbers that are not finite, but refuses integers beyond
    64 bits, which Python's encoder supports.
    """
    with suppress(orjson.JSONEncodeError):
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    return json.dumps(_without_nonfinite(row), allow_nan=False).encode() + b"\n"


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nonfinite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
