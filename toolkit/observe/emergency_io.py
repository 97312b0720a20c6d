"""Output that works while the main thread, a disk or a device hangs: bounded in time, and without locks."""

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
    """Return the result of ``action``; None if it fails or takes longer."""
    results: list[T] = []

    def work() -> None:
        try:
            results.append(action())
        except Exception as error:  # noqa: BLE001  reported; the caller continues
            write_stderr(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name="watchdog-work", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def write_stderr(line: str) -> None:
    """Write to the descriptor, because another thread may hold the lock of ``sys.stderr``."""
    os.write(2, f"{line}\n".encode())


def write_file(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text, durable=False)


def append_row(file: Path, row: Mapping[str, object]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(row) + "\n")
