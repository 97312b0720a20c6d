"""What can still be done where the main thread, a disk or a device does not answer: in bounded time, and around everybody's locks."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from toolkit.files import write_whole

T = TypeVar("T")


def run_with_timeout(action: Callable[[], T], seconds: float) -> T | None:
    """What it gives, if that comes in time and does not fail."""
    answers: list[T] = []

    def work() -> None:
        try:
            answers.append(action())
        except Exception as error:  # noqa: BLE001  said; who called goes on
            write_stderr(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name="watchdog-work", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def write_stderr(line: str) -> None:
    """Not through ``sys.stderr``, whose lock another thread may hold."""
    os.write(2, f"{line}\n".encode())


def write_file(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text, durable=False)


def append_row(file: Path, row: Mapping[str, object]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(row) + "\n")
