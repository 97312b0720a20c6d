"""The journal of a conversion: which tensors are written and durable, so that a killed conversion continues.

It has one line of JSON per tensor, appended after its bytes were synced. The first line identifies the
conversion; an incomplete last line is dropped. Imports no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError, Problem


class ConversionJournal:
    """The journal at ``path``, locked against other processes.

    Attributes:
        done: Records of earlier attempts of the same conversion by unit. If it is empty, call ``start``
            before recording.

    Raises:
        CheckpointError: Another process writes the same target.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._identity = identity
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._descriptor), path.stat()):
                raise BlockingIOError  # the locked file was removed and another process created a new one
        except (BlockingIOError, FileNotFoundError):
            os.close(self._descriptor)
            raise CheckpointError(
                Problem(
                    "target",
                    f"another process is writing {path.parent}",
                    "only one process may write a target",
                    "wait until it ends, or choose another target=PATH",
                )
            ) from None
        self.done: dict[str, Any] = {}
        lines, end = _whole_lines(path)
        resumed = _begins(lines, identity)
        if resumed:
            self.done = {line["unit"]: line["record"] for line in lines[1:]}
        self._cut(end if resumed else 0)

    def start(self) -> None:
        """Begin a new journal, with no finished units."""
        self.done = {}
        self._cut(0)
        self._append([{"identity": self._identity}])

    def record(self, units: Mapping[str, Any]) -> None:
        """Append units whose bytes are durable."""
        self._append({"unit": unit, "record": record} for unit, record in units.items())

    def close(self) -> None:
        os.close(self._descriptor)

    def _cut(self, end: int) -> None:
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)

    def _append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)


def is_journal_for(path: Path, identity: str) -> bool:
    """Return whether ``path`` is the journal of this conversion."""
    return path.is_file() and _begins(_whole_lines(path)[0], identity)


def _begins(lines: list[Any], identity: str) -> bool:
    return bool(lines) and lines[0] == {"identity": identity}


def _whole_lines(path: Path) -> tuple[list[Any], int]:
    """Return the complete lines, and the offset after the last one."""
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
