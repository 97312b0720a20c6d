"""Measures what keeps the training thread of this process from running: ``monitor/delays.py``. Linux only,
without privileges."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from toolkit.monitor.recorder import ThreadDelays

BEAT_SECONDS = 0.25  # between two looks of the thread
STOP_SECONDS = 0.5  # a shorter gap between two looks is not called a stop
SHARE_SECONDS = 1.0  # between two looks at how busy the processors are
CROWDED_SHARE = 0.9  # of the processors' time that is used, by any process


class Processor:
    """Belongs to the thread that creates it. ``read`` costs some microseconds, so it may be called in each
    step.

    A thread looks at the clock four times a second. If neither it nor ``read`` looked for longer than that,
    and the process used no processor time in between and was not waiting for a processor either, the process
    was stopped. Native code that sleeps while it holds the interpreter's lock looks the same.

    Args:
        root: of the file system; tests have one of their own.
        clock, used: seconds, and the processor time of all threads of the process.
    """

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        self._root, self._clock, self._used = root, clock, used
        self._waits = _open(root / f"proc/self/task/{threading.get_native_id()}/schedstat")
        self._lock = threading.Lock()
        self._delays = ThreadDelays()
        self._looked, self._used_before, self._rate = clock(), used(), 0.0
        self._starved = self._waited()
        self._starved_at_start = self._starved
        self._share_at, self._times = self._looked, self._processor_times()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="processor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def read(self) -> ThreadDelays:
        """Since the start. From the training thread."""
        with self._lock:
            self._look()
            return self._delays

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._waits is not None:
            os.close(self._waits)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with self._lock:
                self._look()

    def _look(self) -> None:
        now, used, starved = self._clock(), self._used(), self._waited()
        seconds, worked, waited = now - self._looked, used - self._used_before, starved - self._starved
        delays = self._delays
        stopped, crowded = delays.stopped, delays.crowded
        # Until it was stopped the process used its processors as before; only what exceeds that was used in
        # the gap.
        gap = seconds - BEAT_SECONDS - max(0.0, worked - self._rate * BEAT_SECONDS) - waited
        if gap > STOP_SECONDS:
            stopped += gap
        elif seconds >= BEAT_SECONDS / 2:  # over less the rate is noise
            self._rate = worked / seconds
        self._looked, self._used_before, self._starved = now, used, starved
        if now - self._share_at >= SHARE_SECONDS:
            times = self._processor_times()
            busy, whole = (after - before for before, after in zip(self._times, times, strict=True))
            if whole > 0 and busy > CROWDED_SHARE * whole:
                crowded += now - self._share_at
            self._share_at, self._times = now, times
        self._delays = ThreadDelays(starved=starved - self._starved_at_start, stopped=stopped, crowded=crowded)

    def _waited(self) -> float:
        """Seconds in which the training thread waited for a processor (proc(5)); 0 if the kernel does not
        count them."""
        return 0.0 if self._waits is None else int(os.pread(self._waits, 96, 0).split()[1]) / 1e9

    def _processor_times(self) -> tuple[int, int]:
        """Busy and all ticks of the processors that this process may use, other guests' of the machine
        included."""
        try:
            lines = (self._root / "proc/stat").read_text(encoding="ascii").splitlines()
        except OSError:
            return 0, 0
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        busy = whole = 0
        for name, *ticks in (line.split() for line in lines if line.startswith("cpu")):
            if name in mine:
                counts = [int(tick) for tick in ticks[:8]]  # guests' time is in user time already
                whole += sum(counts)
                busy += sum(counts) - counts[3] - counts[4]  # idle, and idle while a disk works
        return busy, whole


def _open(file: Path) -> int | None:
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a kernel without these counts
        return None
