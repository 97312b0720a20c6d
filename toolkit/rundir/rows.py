"""Rows of steps that will be run again leave a run's files, so that a step stands there once."""

from __future__ import annotations

from pathlib import Path

from toolkit.files import write_whole
from toolkit.rows import parse_row


def move_rows(file: Path, target: Path, step: int) -> None:
    """Rows of ``file`` with a step beyond ``step`` are added to ``target``. A torn row (the machine stopped while it was
    written) is dropped: its step will be run again, or its checkpoint would not be complete."""
    kept: list[str] = []
    moved: list[str] = []
    torn = False
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            row_step = _step_of(line)
            torn = torn or row_step is None
            if row_step is not None:
                (kept if row_step <= step else moved).append(line)
    if moved:
        target.parent.mkdir(parents=True, exist_ok=True)
        present = target.read_text(encoding="utf-8").splitlines(keepends=True) if target.exists() else []
        known = set(present)  # where an earlier trim stopped between the two files
        write_whole(target, "".join(present + [line for line in moved if line not in known]))
    if moved or torn:
        write_whole(file, "".join(kept))


def _step_of(line: str) -> int | None:
    """The step of a whole row; None for a torn one."""
    row = parse_row(line) if line.endswith("\n") else None
    step = row.get("step") if row is not None else None
    return step if isinstance(step, int) else None
