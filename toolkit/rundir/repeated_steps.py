"""Move rows of repeated steps out of a run's files, so that each step is recorded once."""

from __future__ import annotations

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
    if moved:
        target.parent.mkdir(parents=True, exist_ok=True)
        present = target.read_text(encoding="utf-8").splitlines(keepends=True) if target.exists() else []
        known = set(present)  # from a move that was interrupted between the two files
        write_whole(target, "".join(present + [line for line in moved if line not in known]))
    if moved or torn:
        write_whole(file, "".join(remaining))


def _step_of(line: str) -> int | None:
    """Return the step of a complete row, otherwise None."""
    row = parse_row(line) if line.endswith("\n") else None
    step = row.get("step") if row is not None else None
    return step if isinstance(step, int) else None
