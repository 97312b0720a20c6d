"""Measure how busy other processes keep the machine during a case, because they lengthen its times."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from benchmarks.faults.processes import MARK

IDLE_CORES = 0.2  # others that keep fewer cores busy on average leave the machine idle
SAMPLE_SECONDS = 1.0
TICKS = os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """Counts the CPU time of processes that do not belong to the run with ``mark``, from ``with`` to its end.

    Kernel threads and this process do not count. What a process uses after the last sample before its end is
    not seen.

    Args:
        proc: folder of the kernel's files about processes (proc(5)).
    """

    def __init__(self, mark: str, proc: Path = Path("/proc")) -> None:
        self._proc, self._entry = proc, f"{MARK}={mark}".encode()
        self._seconds: dict[str, float] = {}  # by process, at its last sample
        self._others: dict[str, bool] = {}
        self._used, self._began, self._elapsed = 0.0, time.monotonic(), 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="other-load", daemon=True)

    def __enter__(self) -> OtherLoad:
        self._sample()
        self._used, self._began = 0.0, time.monotonic()  # what was used before does not count
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()
        self._elapsed = time.monotonic() - self._began

    def cores(self) -> float:
        """Return the cores that other processes have kept busy on average until now, or until the end."""
        return self._used / (self._elapsed or time.monotonic() - self._began)

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        for folder in self._proc.iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            try:
                # proc_pid_stat(5): from field 3, because the name of a process may contain anything
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                process = f"{folder.name} {fields[19]}"  # with its start, because numbers are used again
                if process not in self._others:
                    environ = (folder / "environ").read_bytes()
                    self._others[process] = bool(environ) and self._entry not in environ.split(b"\0")
            except OSError:
                continue  # it has ended
            if self._others[process]:
                seconds = (int(fields[11]) + int(fields[12])) / TICKS
                self._used += seconds - self._seconds.get(process, 0.0)
                self._seconds[process] = seconds
