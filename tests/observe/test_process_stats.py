"""What kept a process from running is measured: by files of a fake kernel, and once by a real stop.

pytest tests/observe/test_process_stats.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from toolkit.observe.processor import BEAT_SECONDS, Processor


class Machine:
    """A clock, processor times and Linux's files of them, which a test moves on by hand."""

    def __init__(self, root: Path) -> None:
        self.root, self.now, self.used = root, 100.0, 5.0
        self._waits = root / f"proc/self/task/{threading.get_native_id()}/schedstat"
        self._waits.parent.mkdir(parents=True)
        self._waited, self._busy, self._idle = 0.0, 0, 0
        self.go(0.0)
        self.processor = Processor(root=root, clock=lambda: self.now, used=lambda: self.used)

    def go(self, seconds: float, *, worked: float = 0.0, waited: float = 0.0, busy: float = 0.0) -> None:
        """``busy``: the share of the processors' time that anybody used."""
        self.now, self.used, self._waited = self.now + seconds, self.used + worked, self._waited + waited
        self._busy, self._idle = (
            self._busy + round(100 * seconds * busy),
            self._idle + round(100 * seconds * (1 - busy)),
        )
        self._waits.write_text(f"1 {round(self._waited * 1e9)} 3\n", encoding="ascii")
        cpus = "".join(
            f"cpu{number} {self._busy} 0 0 {self._idle} 0 0 0 0 0 0\n" for number in os.sched_getaffinity(0)
        )
        (self.root / "proc/stat").write_text(f"cpu  1 1 1 1 1 1 1 1 1 1\n{cpus}intr 7\n", encoding="ascii")


def test_waiting_for_a_processor_is_starved(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for _ in range(10):
        machine.go(0.2, worked=0.1, waited=0.1)
        machine.processor.read()
    found = machine.processor.read()
    assert found.starved == pytest.approx(1.0)
    assert (found.stopped, found.crowded) == (0.0, 0.0)
    machine.processor.close()


@pytest.mark.parametrize(
    ("worked", "waited", "stopped"),
    [
        (0.1, 0.0, 3.0 - BEAT_SECONDS),  # nothing ran: a signal or a pause
        (3.0, 0.0, 0.0),  # native code computes and holds the interpreter
        (0.1, 2.9, 0.0),  # other processes had the processors
        (16 * BEAT_SECONDS, 0.0, 3.0 - BEAT_SECONDS),  # sixteen threads computed until it was stopped
    ],
)
def test_a_gap_in_which_nothing_ran_is_a_stop(
    tmp_path: Path, worked: float, waited: float, stopped: float
) -> None:
    machine = Machine(tmp_path)
    for _ in range(4):  # as usual, one or sixteen threads
        machine.go(BEAT_SECONDS, worked=worked if worked > 3 else 0.1)
        machine.processor.read()
    machine.go(3.0, worked=worked, waited=waited)
    assert machine.processor.read().stopped == pytest.approx(stopped, abs=0.15)
    machine.processor.close()


@pytest.mark.parametrize(("busy", "crowded"), [(0.95, 4.0), (0.5, 0.0)])
def test_a_host_whose_processors_are_all_busy_is_crowded(tmp_path: Path, busy: float, crowded: float) -> None:
    machine = Machine(tmp_path)
    for _ in range(16):
        machine.go(0.25, worked=0.25, busy=busy)
        machine.processor.read()
    assert machine.processor.read().crowded == pytest.approx(crowded)
    machine.processor.close()


def test_a_kernel_without_these_files_has_no_delays(tmp_path: Path) -> None:
    processor = Processor(root=tmp_path)
    assert processor.read().starved == processor.read().crowded == 0.0
    processor.close()


CHILD = """
import time
from toolkit.observe.processor import Processor
processor = Processor()
processor.start()
print("ready", flush=True)
input()
end = time.monotonic() + 0.3
while time.monotonic() < end: pass
print(processor.read().stopped)
processor.close()
"""


def test_a_process_that_is_stopped_and_continued_knows_for_how_long() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.6)
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        child.send_signal(signal.SIGCONT)
        child.stdin.write("\n")
        child.stdin.flush()
        assert 1.0 < float(child.stdout.readline()) < 2.5
    finally:
        child.kill()
        child.wait()
