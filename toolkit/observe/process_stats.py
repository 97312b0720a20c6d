"""Statistics of this process: garbage collection, memory, and delays of its training thread. Linux only."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from toolkit.monitor.recorder import ThreadDelays

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
BEAT_SECONDS = 0.25  # between two samples of the clock
STOP_SECONDS = 0.5  # a shorter gap between two samples does not count as a stop
SHARE_SECONDS = 1.0  # between two samples of how busy the processors are
CROWDED_SHARE = 0.9  # of the processors' time that any process uses


class ProcessSample(NamedTuple):
    """
    Attributes:
        gc_seconds: time in garbage collection since the previous sample.
        host_bytes: resident memory that is not backed by a file. File pages come and go with the page cache.
        device_bytes: allocated to tensors on the device; 0 on CPU.
        device_peak_bytes: the most that was allocated to tensors at any moment so far; 0 on CPU.
    """

    gc_seconds: float
    host_bytes: int
    device_bytes: int
    device_peak_bytes: int


class ProcessStats:
    """Sample garbage collection and memory of this process. ``close`` removes its callback from the
    collector.
    """

    def __init__(self) -> None:
        self._gc_seconds = 0.0
        self._gc_start = 0.0
        # An open descriptor gives current values whenever it is read at offset 0.
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        gc.callbacks.append(self._on_collection)

    def sample(self, device: torch.device) -> ProcessSample:
        gc_seconds, self._gc_seconds = self._gc_seconds, 0.0
        # proc(5): counts of pages; ``shared`` are those of files and shared memory.
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        allocated = {"current": 0, "peak": 0}
        if device.type == "cuda":
            allocated = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
        host_bytes = (int(resident) - int(shared)) * PAGE_BYTES
        return ProcessSample(gc_seconds, host_bytes, allocated["current"], allocated["peak"])

    def close(self) -> None:
        gc.callbacks.remove(self._on_collection)
        os.close(self._statm)

    def _on_collection(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._gc_start = time.perf_counter()
        else:
            self._gc_seconds += time.perf_counter() - self._gc_start


class DelayTracker:
    """Measure what keeps the thread that creates this object from running (``monitor/recorder.py``).

    A background thread samples the clock four times a second. If neither it nor ``read`` ran for longer than
    that, and the process neither used nor waited for a processor in between, the process was stopped. Native
    code that sleeps while it holds the interpreter's lock looks the same. ``read`` costs a few microseconds.

    Args:
        root: of the file system; tests use their own.
        clock: seconds.
        cpu_time: processor time of all threads of the process, in seconds.
    """

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        cpu_time: Callable[[], float] = time.process_time,
    ) -> None:
        self._root, self._clock, self._cpu_time = root, clock, cpu_time
        self._schedstat = _open(root / f"proc/self/task/{threading.get_native_id()}/schedstat")
        self._lock = threading.Lock()
        self._delays = ThreadDelays()
        self._sampled_at, self._used_before, self._rate = clock(), cpu_time(), 0.0
        self._starved = self._starved_seconds()
        self._starved_at_start = self._starved
        self._share_at, self._ticks = self._sampled_at, self._processor_ticks()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="delays", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def read(self) -> ThreadDelays:
        """Return the delays since the start. Called by the training thread."""
        with self._lock:
            self._sample()
            return self._delays

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._schedstat is not None:
            os.close(self._schedstat)

    def _run(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with self._lock:
                self._sample()

    def _sample(self) -> None:
        now, used, starved = self._clock(), self._cpu_time(), self._starved_seconds()
        seconds, worked, waited = now - self._sampled_at, used - self._used_before, starved - self._starved
        stopped, crowded = self._delays.stopped, self._delays.crowded
        # Assume that the process used the processors at its usual rate until it was stopped; only the excess
        # was used in the gap.
        gap = seconds - BEAT_SECONDS - max(0.0, worked - self._rate * BEAT_SECONDS) - waited
        if gap > STOP_SECONDS:
            stopped += gap
        elif seconds >= BEAT_SECONDS / 2:  # a rate over a shorter time is noise
            self._rate = worked / seconds
        self._sampled_at, self._used_before, self._starved = now, used, starved
        if now - self._share_at >= SHARE_SECONDS:
            ticks = self._processor_ticks()
            busy, total = (after - before for before, after in zip(self._ticks, ticks, strict=True))
            if total > 0 and busy > CROWDED_SHARE * total:
                crowded += now - self._share_at
            self._share_at, self._ticks = now, ticks
        self._delays = ThreadDelays(
            starved=starved - self._starved_at_start, stopped=stopped, crowded=crowded
        )

    def _starved_seconds(self) -> float:
        """Time that the training thread waited for a processor; 0 if the kernel does not count it."""
        return 0.0 if self._schedstat is None else int(os.pread(self._schedstat, 96, 0).split()[1]) / 1e9

    def _processor_ticks(self) -> tuple[int, int]:
        """Busy and total ticks, of any process, on the processors that this process may use."""
        try:
            lines = (self._root / "proc/stat").read_text(encoding="ascii").splitlines()
        except OSError:
            return 0, 0
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        busy = total = 0
        for name, *ticks in (line.split() for line in lines if line.startswith("cpu")):
            if name in mine:
                counts = [int(tick) for tick in ticks[:8]]  # user time includes the time of guests
                total += sum(counts)
                busy += sum(counts) - counts[3] - counts[4]  # idle, and idle while waiting for a disk
        return busy, total


def _open(file: Path) -> int | None:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a kernel without these counts
        return None
