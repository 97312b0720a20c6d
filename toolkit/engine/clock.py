"""The time of a GPU's own work, without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from toolkit.monitor.recorder import Clock, HostClock


class CudaClock(Clock):
    """Stamps are events in the queue of the stream that was current at the start: the one that computes. Work on other streams shows
    where that one waits for them. Two events are read to half a microsecond (``cudaEventElapsedTime``)."""

    def __init__(self) -> None:
        self.stream = torch.cuda.current_stream()
        self._free: deque[torch.cuda.Event] = deque()

    def stamp(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        return float(earlier.elapsed_time(later)) / 1e3

    def passed(self, stamp: torch.cuda.Event) -> bool:
        return bool(stamp.query())

    def release(self, stamps: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(stamps)


def clock_of(device: torch.device) -> Clock:
    """Of the current device, where ``device`` is a GPU."""
    return CudaClock() if device.type == "cuda" else HostClock()
