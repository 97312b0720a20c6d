"""What of a conversion is done and durable, so that one that was killed goes on where it was.

A line of JSON for each tensor, appended only after its bytes were synced. The first line says of which conversion; a line that a
kill cut short is dropped. Imports no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError, Problem


class Journal:
    """The journal at ``path``, which nobody else may write meanwhile.

    Attributes:
        done: what earlier attempts of the same conversion recorded, by unit; empty where there were none, or of another one.
        resumed: whether ``path`` was of this conversion.

    Raises:
        CheckpointError: another process is at work on the same target.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise CheckpointError(Problem("target", f"another process is writing {path.parent}", "one process writes a target",
                                          "wait for it to end, or name another target=PATH")) from None
        self.done: dict[str, Any] = {}
        lines, end = _whole_lines(path)
        self.resumed = bool(lines) and lines[0] == {"identity": identity}
        if self.resumed:
            self.done = {line["unit"]: line["record"] for line in lines[1:]}
        else:
            end = 0
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)
        if not self.resumed:
            self._append([{"identity": identity}])

    def record(self, units: Mapping[str, Any]) -> None:
        """Their bytes are durable."""
        self._append({"unit": unit, "record": record} for unit, record in units.items())

    def close(self) -> None:
        os.close(self._descriptor)

    def _append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)


def _whole_lines(path: Path) -> tuple[list[Any], int]:
    """The lines that are whole, and the byte after the last of them."""
    lines, end = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                break
            lines.append(json.loads(line))
        except ValueError:
            break
        end += len(line)
    return lines, end
