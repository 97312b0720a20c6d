"""Move rows of repeated steps out of a run's files, so that each step is recorded once."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.files import write_whole
from toolkit.rows import parse_row


def move_rows(file: Path, target: Path, step: int) -> None:
    """Move rows of ``file`` after ``step`` to ``target``. An incomplete row is dropped, because its step
    will be repeated.
    """
    remaining: list[str] = []
    moved: list[str] = []
    torn = False
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            row_step = _step_of(line)
            torn = torn or row_step is None
            if row_step is not None:
                (remaining if row_step <= step else moved).append(line)
    _add_lines(target, moved)
    if moved or torn:
        write_whole(file, "".join(remaining))


def cut_rows(file: Path, target: Path, step: int) -> None:
    """As :func:`move_rows`, for a file that this process has open for appending: it stays the same file."""
    remaining: list[bytes] = []  # from the first row that moves on
    moved: list[str] = []
    with file.open("r+b") as opened:
        end = 0
        for line in opened:
            text = line.decode("utf-8", errors="replace")
            row_step = _step_of(text)
            if row_step is not None and row_step > step:
                moved.append(text)
            elif moved:
                remaining.append(line)
            else:
                end += len(line)
        if not moved:
            return
        _add_lines(target, moved)
        opened.seek(end)
        opened.write(b"".join(remaining))
        opened.truncate()
        opened.flush()
        os.fsync(opened.fileno())


def _add_lines(file: Path, lines: list[str]) -> None:
    if not lines:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    present = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    known = set(present)  # from a move that was interrupted between the two files
    write_whole(file, "".join(present + [line for line in lines if line not in known]))


def _step_of(line: str) -> int | None:
    """Return the step of a complete row, otherwise None."""
    row = parse_row(line) if line.endswith("\n") else None
    step = row.get("step") if row is not None else None
    return step if isinstance(step, int) else None
