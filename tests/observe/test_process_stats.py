"""Delays of the training thread, garbage collection and memory of a process.

pytest tests/observe/test_process_stats.py
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.observe.process_stats import BEAT_SECONDS, DelayTracker, ProcessStats


class Machine:
    """A fake clock and Linux's files of processor times, advanced by a test."""

    def __init__(self, root: Path) -> None:
        self.root, self.now, self.used = root, 100.0, 5.0
        self._waits = root / f"proc/self/task/{threading.get_native_id()}/schedstat"
        self._waits.parent.mkdir(parents=True)
        self._waited, self._busy, self._idle = 0.0, 0, 0
        self.advance(0.0)
        self.tracker = DelayTracker(root=root, clock=lambda: self.now, cpu_time=lambda: self.used)

    def advance(self, seconds: float, *, worked: float = 0.0, waited: float = 0.0, busy: float = 0.0) -> None:
        """Advance the clock; ``busy`` is the share of the processors' time that any process used."""
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


def test_waiting_for_a_processor_counts_as_starved(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for _ in range(10):
        machine.advance(0.2, worked=0.1, waited=0.1)
        machine.tracker.read()
    found = machine.tracker.read()
    assert found.starved == pytest.approx(1.0)
    assert (found.stopped, found.crowded) == (0.0, 0.0)
    machine.tracker.close()


@pytest.mark.parametrize(
    ("worked", "waited", "stopped"),
    [
        (0.1, 0.0, 3.0 - BEAT_SECONDS),  # nothing ran: a signal or a pause
        (3.0, 0.0, 0.0),  # native code computes and holds the interpreter
        (0.1, 2.9, 0.0),  # other processes had the processors
        (16 * BEAT_SECONDS, 0.0, 3.0 - BEAT_SECONDS),  # sixteen threads computed until it was stopped
    ],
)
def test_gap_without_processor_time_counts_as_stopped(
    tmp_path: Path, worked: float, waited: float, stopped: float
) -> None:
    machine = Machine(tmp_path)
    for _ in range(4):  # the usual rate of one or sixteen threads
        machine.advance(BEAT_SECONDS, worked=worked if worked > 3 else 0.1)
        machine.tracker.read()
    machine.advance(3.0, worked=worked, waited=waited)
    assert machine.tracker.read().stopped == pytest.approx(stopped, abs=0.15)
    machine.tracker.close()


@pytest.mark.parametrize(("busy", "crowded"), [(0.95, 4.0), (0.5, 0.0)])
def test_busy_processors_count_as_crowded(tmp_path: Path, busy: float, crowded: float) -> None:
    machine = Machine(tmp_path)
    for _ in range(16):
        machine.advance(0.25, worked=0.25, busy=busy)
        machine.tracker.read()
    assert machine.tracker.read().crowded == pytest.approx(crowded)
    machine.tracker.close()


def test_kernel_without_statistics_has_no_delays(tmp_path: Path) -> None:
    tracker = DelayTracker(root=tmp_path)
    assert tracker.read().starved == tracker.read().crowded == 0.0
    tracker.close()


def measure_stop(pipe: Connection) -> None:
    """Send whether it runs, wait for an answer, and send the seconds of the stop."""
    tracker = DelayTracker()
    tracker.start()
    pipe.send("ready")
    pipe.recv()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    pipe.send(tracker.read().stopped)
    tracker.close()


def test_stopped_process_measures_the_stop() -> None:
    fork = multiprocessing.get_context("fork")  # the imports would take longer than the test
    ours, theirs = fork.Pipe()
    child = fork.Process(target=measure_stop, args=(theirs,))
    child.start()
    try:
        assert child.pid is not None
        assert ours.recv() == "ready"
        time.sleep(0.4)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(child.pid, signal.SIGCONT)
        ours.send("go on")
        assert 0.6 < ours.recv() < 2.0
    finally:
        child.kill()
        child.join()


# ---- garbage collection and memory

CPU = torch.device("cpu")


def test_garbage_collection_is_timed() -> None:
    process_stats = ProcessStats()
    objects = [[number] for number in range(100_000)]
    process_stats.sample(CPU)
    gc.collect()
    assert process_stats.sample(CPU).gc_seconds > 1e-3
    gc.disable()
    assert process_stats.sample(CPU).gc_seconds == 0
    gc.enable()
    process_stats.close()
    assert not any(getattr(callback, "__self__", None) is process_stats for callback in gc.callbacks)
    assert len(objects) == 100_000


def test_process_memory_excludes_files(tmp_path: Path) -> None:
    process_stats, size = ProcessStats(), 64 * 2**20
    before = process_stats.sample(CPU).host_bytes
    # Not by malloc, which may reuse freed memory.
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(b"x" * size)
    with_block = process_stats.sample(CPU).host_bytes
    assert with_block - before == pytest.approx(size, rel=0.1)
    (tmp_path / "data").touch()
    os.truncate(tmp_path / "data", size)
    mapped: Any = np.memmap(tmp_path / "data", dtype=np.uint8, mode="r")
    assert int(mapped.sum()) == 0  # loads all pages
    assert process_stats.sample(CPU).host_bytes - with_block < size / 4
    assert len(block)
    process_stats.close()
