"""The CPU time that other processes use during a case.

pytest tests/campaign/test_other_load.py
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.faults import other_load
from benchmarks.faults.other_load import TICKS, OtherLoad
from benchmarks.faults.processes import MARK


def write_process(proc: Path, number: int, environ: str, seconds: float, start: int = 5) -> None:
    """Write what the kernel says about a process that has used ``seconds`` of CPU time."""
    folder = proc / str(number)
    folder.mkdir(exist_ok=True)
    (folder / "environ").write_bytes(environ.replace(" ", "\0").encode())
    used = int(seconds * TICKS)
    fields = ["S", *["0"] * 10, str(used // 2), str(used - used // 2), *["0"] * 6, str(start), "0"]
    (folder / "stat").write_text(f"{number} (a (strange) name) {' '.join(fields)}\n")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc with a process of the run, two of others, one of the kernel and this one."""
    monkeypatch.setattr(other_load, "SAMPLE_SECONDS", 60.0)
    write_process(tmp_path, 100, f"A=1 {MARK}=mine B=2", 1)
    write_process(tmp_path, 200, f"{MARK}=another", 50)
    write_process(tmp_path, 300, "HOME=/", 60)
    write_process(tmp_path, 400, "", 70)
    write_process(tmp_path, os.getpid(), "HOME=/", 80)
    (tmp_path / "meminfo").touch()
    return tmp_path


def measured_cores(
    proc: Path, monkeypatch: pytest.MonkeyPatch, change: dict[int, tuple[str, float, int]]
) -> float:
    """Return the measured cores if processes change during 10 seconds."""
    with OtherLoad("mine", proc) as load:
        for number, (environ, seconds, start) in change.items():
            write_process(proc, number, environ, seconds, start)
        began = time.monotonic()
        monkeypatch.setattr(other_load.time, "monotonic", lambda: began + 10)
    monkeypatch.undo()
    return load.cores()


def test_only_other_processes_count(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = {100: (f"A=1 {MARK}=mine", 9, 5), 400: ("", 90, 5), os.getpid(): ("HOME=/", 90, 5)}
    assert measured_cores(proc, monkeypatch, change) == 0
    others = {200: (f"{MARK}=another", 53, 5), 300: ("HOME=/", 61, 5)}
    assert measured_cores(proc, monkeypatch, others) == pytest.approx(0.4, rel=0.05)


def test_processes_that_begin_during_the_case_count_from_their_start(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = {500: ("HOME=/", 2, 7), 300: ("HOME=/", 1, 8), 600: (f"{MARK}=mine", 4, 9)}
    assert measured_cores(proc, monkeypatch, began) == pytest.approx(0.3, rel=0.05), "300 is a new process"
