"""Measure the time of GPU work with events, without synchronizing the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from toolkit.monitor.recorder import Clock, HostClock, StepRecorder
from toolkit.plan.types import Device


class CudaClock(Clock):
    """A clock whose stamps are CUDA events on the stream that is current at construction.

    Work on other streams counts only while that compute stream waits for it. The resolution is half a
    microsecond (``cudaEventElapsedTime``).
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.current_stream()
        self._device = torch.cuda.current_device()
        self._free: deque[torch.cuda.Event] = deque()

    def stamp(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        return float(earlier.elapsed_time(later)) / 1e3

    def passed(self, stamp: torch.cuda.Event) -> bool:
        # A new thread starts on GPU 0; a query from there would allocate memory on it.
        if torch.cuda.current_device() != self._device:
            torch.cuda.set_device(self._device)
        return bool(stamp.query())

    def release(self, stamps: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(stamps)

    def idle(self) -> bool:
        """True while a CUDA graph is captured, because an event would become part of the graph."""
        return torch.cuda.is_current_stream_capturing()


def make_clock(device: Device) -> Clock:
    """Return a clock for the current GPU, or a host clock for a CPU run."""
    return CudaClock() if device is Device.CUDA else HostClock()


class SideStreams:
    """Attribute waiting for a communication stream to the collective that runs on it.

    Engines start some collectives on streams other than the compute stream (ZeRO with ``overlap_comm``,
    parameter gathering under ZeRO 3, Megatron-core with several distributed-optimizer instances). Such a
    collective is exposed while the compute stream or the host waits for its stream; that time is attributed
    to the last collective started there. On CPUs, which have no streams, this does nothing.
    """

    def __init__(self, recorder: StepRecorder | None) -> None:
        self._recorder = recorder
        clock = recorder.clock if recorder is not None else None
        self._main = clock.stream if isinstance(clock, CudaClock) else None
        self._carried: dict[int, AbstractContextManager[None]] = {}  # by the stream's handle
        if self._main is not None:
            self._wait_stream, self._synchronize = (
                torch.cuda.Stream.wait_stream,
                torch.cuda.Stream.synchronize,
            )
            side = self

            def wait_stream(stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
                with side._waiting_for(other, stream == side._main):
                    side._wait_stream(stream, other)

            def synchronize(stream: torch.cuda.Stream) -> None:
                with side._waiting_for(stream, True):
                    side._synchronize(stream)

            torch.cuda.Stream.wait_stream, torch.cuda.Stream.synchronize = wait_stream, synchronize  # type: ignore[method-assign, assignment]

    def carry(self, part: AbstractContextManager[None]) -> None:
        """Register ``part`` as the time of waiting for the collective that starts on the current stream."""
        if self._main is not None and (stream := torch.cuda.current_stream()) != self._main:
            self._carried[stream.cuda_stream] = part

    def close(self) -> None:
        if self._main is not None:
            torch.cuda.Stream.wait_stream = self._wait_stream  # type: ignore[method-assign]
            torch.cuda.Stream.synchronize = self._synchronize  # type: ignore[method-assign]

    def _waiting_for(self, other: torch.cuda.Stream, matters: bool) -> AbstractContextManager[None]:
        part = self._carried.get(getattr(other, "cuda_stream", -1)) if matters else None
        return (
            part
            if part is not None and self._recorder is not None and self._recorder.mine()
            else nullcontext()
        )
