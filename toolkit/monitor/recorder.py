"""Record where one rank's time goes: marks during a step, sums afterwards.

A mark states that from now on time belongs to a part, until the next mark. The parts of a step therefore
always add up to the step, and a mark costs one clock reading and one append. On GPUs the clock is the
device's (``engine/clock.py``): a timestamp can be read only after the device has passed it, and nothing waits
for that.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from toolkit.layout.axes import ALL, Axis
from toolkit.step_parts import (
    BUBBLE,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    EVALUATION,
    UNDIVIDED_PARTS,
    UNEXPLAINED,
    Recorder,
    communication,
)

Stamp = Any  # a moment, in the clock's representation
Mark = tuple[str, Stamp]  # from this moment on time belongs to this part

MAX_STEPS = 10_000  # finished steps that are stored, unread and read
# marks that wait for the reading thread; beyond, the training thread reads them, which bounds memory to some
# MB
MAX_UNREAD_MARKS = 20_000
PIPELINE = communication(Axis.PIPELINE)
WAITING_PARTS = (BUBBLE, DATA, CHECKPOINT, EVALUATION)  # and communication


class Clock(Protocol):
    def stamp(self) -> Stamp:
        """Return the current moment in the order of the rank's work."""

    def seconds(self, earlier: Stamp, later: Stamp) -> float:
        """Return the seconds between two stamps that have passed."""

    def passed(self, stamp: Stamp) -> bool:
        """Return whether the stamp, and every earlier one, can be read. Never blocks."""

    def release(self, stamps: Iterable[Stamp]) -> None:
        """Free stamps that are no longer needed."""

    def idle(self) -> bool:
        """Return whether no stamps can be taken now, because a CUDA graph is being captured."""


class HostClock(Clock):
    def stamp(self) -> float:
        return time.perf_counter()

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier

    def passed(self, stamp: float) -> bool:
        return True

    def release(self, stamps: Iterable[float]) -> None:
        pass

    def idle(self) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadDelays:
    """Delays of a rank's training thread, in seconds since the start or within one step.

    Attributes:
        starved: the thread was ready to run but had no processor.
        stopped: no thread of the process ran, because of a signal or because its container or machine was
            paused.
        crowded: nearly all processors of the rank were busy. Neighbours share caches, memory bandwidth and
            hyperthreads, so the thread is slower although it has a processor.
    """

    starved: float = 0.0
    stopped: float = 0.0
    crowded: float = 0.0

    def __sub__(self, earlier: ThreadDelays) -> ThreadDelays:
        return ThreadDelays(
            starved=self.starved - earlier.starved,
            stopped=self.stopped - earlier.stopped,
            crowded=self.crowded - earlier.crowded,
        )


NO_DELAYS = ThreadDelays()
ReadDelays = Callable[[], ThreadDelays]


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one step on one rank.

    Attributes:
        step: the number of completed steps after it.
        parts: seconds by part; they add up to ``wall``.
        wall: seconds.
        busy: ``wall`` without communication, bubble, waiting for samples, saving and evaluation.
        delays: how long the rank was kept from running; these seconds are contained in the parts.
    """

    step: int
    parts: Mapping[str, float]
    wall: float
    busy: float
    delays: ThreadDelays = NO_DELAYS


def attribute_seconds(
    marks: Sequence[Mark],
    end: Stamp,
    seconds: Callable[[Stamp, Stamp], float],
    transfers: Mapping[int, float] | None = None,
) -> dict[str, float]:
    """Sum the seconds of each part, from the first mark to ``end``.

    Args:
        marks: at least one, in order; each holds until the next one.
        transfers: by index of a mark that begins a wait, the seconds that the transfer itself takes. Up to
            that much of the wait is ``communication/pipeline``, the rest belongs to the mark's part.
    """
    totals: defaultdict[str, float] = defaultdict(float)
    stamps = [stamp for _, stamp in marks]
    for (part, begun), until in zip(marks, [*stamps[1:], end], strict=True):
        totals[part] += seconds(begun, until)
    for number, transfer in (transfers or {}).items():
        part, begun = marks[number]
        moved = min(transfer, seconds(begun, marks[number + 1][1] if number + 1 < len(marks) else end))
        totals[part] -= moved
        totals[PIPELINE] += moved
    return dict(totals)


def step_time(step: int, parts: Mapping[str, float], delays: ThreadDelays = NO_DELAYS) -> StepTime:
    wall = sum(parts.values())
    waited = sum(
        seconds for part, seconds in parts.items() if part in WAITING_PARTS or part.startswith(COMMUNICATION)
    )
    return StepTime(step, parts, wall, wall - waited, delays)


class _FinishedStep:
    """A finished step that may not have been read yet."""

    __slots__ = ("delays", "end", "marks", "step", "transfers")

    def __init__(
        self, step: int, marks: list[Mark], transfers: dict[int, float], end: Stamp, delays: ThreadDelays
    ) -> None:
        self.step, self.marks, self.transfers, self.end, self.delays = step, marks, transfers, end, delays


class StepRecorder(Recorder):
    """Records the thread that creates it and autograd's threads, which run hooks while that thread waits for
    backward.

    PyTorch has one autograd thread per GPU; Python did not start them. Parts on other threads, such as
    background saves or samplers, are ignored. Nothing is recorded before the first ``next_step``.
    """

    def __init__(
        self, clock: Clock, *, pipelined: bool = False, delays: ReadDelays = lambda: NO_DELAYS
    ) -> None:
        """Args:
        pipelined: whether the run has pipeline stages; without them a schedule has no bubble.
        delays: reads how long this thread was kept from running so far; called once per step.
        """
        self._read_delays, self._delays = delays, NO_DELAYS
        self.clock, self._stamp, self._idle = clock, clock.stamp, clock.idle
        self._thread = threading.get_ident()
        self._transfer_seconds: Callable[[int], float] = lambda size: 0.0
        self._parts: dict[str, _Part] = {}
        self._stack = [UNEXPLAINED]
        self._step = 0
        self._marks: list[Mark] | None = None
        self._transfers: dict[int, float] = {}
        self._pipelined = pipelined
        self._in_schedule = self._drain_pending = False
        self._finished: deque[_FinishedStep] = deque(maxlen=MAX_STEPS)
        self._read: deque[StepTime] = deque(maxlen=MAX_STEPS)
        self._reading = threading.Lock()
        self._marks_made, self._marks_read = 0, 0  # numbers of marks

    def part(self, name: str) -> AbstractContextManager[None]:
        part = self._parts.get(name)
        if part is None:
            part = self._parts[name] = _Part(self, name)
        return part

    @contextmanager
    def schedule(self) -> Iterator[None]:
        self._in_schedule = self._drain_pending = self._pipelined
        try:
            yield
        finally:
            self._in_schedule = False

    def set_transfer_seconds(self, seconds: Callable[[int], float]) -> None:
        self._transfer_seconds = seconds

    def next_step(self, step: int) -> None:
        now, before, self._delays = self._stamp(), self._delays, self._read_delays()
        if self._marks is not None:
            self._finished.append(
                _FinishedStep(self._step, self._marks, self._transfers, now, self._delays - before)
            )
            self._marks_made += len(self._marks)
        self._step, self._marks, self._transfers = step, [(self._stack[-1], now)], {}
        self._drain_pending = False
        if self._marks_made - self._marks_read > MAX_UNREAD_MARKS:
            self._read_finished()

    def discard_steps(self) -> None:
        with self._reading:
            self._marks_read = self._marks_made
            self._finished.clear()
            self._read.clear()
        self._marks = None

    def take_steps(self) -> list[StepTime]:
        """Return the finished steps that were not returned before, at most the last ``MAX_STEPS``.

        Steps that the device has not passed yet are returned by a later call. Call it from one thread only.
        """
        self._read_finished()
        return [self._read.popleft() for _ in range(len(self._read))]

    @property
    def current(self) -> tuple[int, str]:
        """The current step and its open part. May be read from any thread."""
        return self._step, self._stack[-1]

    def is_recording(self) -> bool:
        """Return whether the calling thread's work belongs to the step and can be timed."""
        here = threading.get_ident() == self._thread or isinstance(
            threading.current_thread(), threading._DummyThread
        )
        return here and not self._idle()

    def collective_part(self, axes: str) -> AbstractContextManager[None]:
        """Return the part of a collective over ``axes`` that starts now, including the wait for it."""
        if self._drain_pending and (axes == ALL or Axis.PIPELINE in axes):
            self._drain_pending = False
            return self.part(BUBBLE)
        return self.part(communication(axes))

    def transfer_start_part(self, axes: str) -> AbstractContextManager[None]:
        """Return the part of starting a send or receive in this direction."""
        return self.part(BUBBLE if self._in_schedule and axes == Axis.PIPELINE else communication(axes))

    def transfer_wait_part(self, axes: str, size: int) -> AbstractContextManager[None]:
        """Return the part of waiting until ``size`` bytes have been sent or received."""
        if not (self._in_schedule and axes == Axis.PIPELINE):
            return self.part(communication(axes))
        transfer = self._transfer_seconds(size)
        return _TransferWait(self, transfer) if transfer > 0 else self.part(BUBBLE)

    def _push(self, name: str) -> None:
        stack = self._stack
        now = stack[-1]
        if now in UNDIVIDED_PARTS:
            name = now
        stack.append(name)
        if name != now and self._marks is not None:
            self._marks.append((name, self._stamp()))

    def _pop(self) -> None:
        stack = self._stack
        name, now = stack.pop(), stack[-1]
        if name != now and self._marks is not None:
            self._marks.append((now, self._stamp()))

    def _push_transfer_wait(self, transfer: float) -> None:
        self._push(BUBBLE)
        if self._marks is not None and self._stack[-1] == BUBBLE:
            self._transfers[len(self._marks) - 1] = transfer

    def _read_finished(self) -> None:
        """Read the steps that can be read, unless another thread is doing so."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            while self._finished and self.clock.passed(self._finished[0].end):
                step = self._finished.popleft()
                self._marks_read += len(step.marks)
                self._read.append(
                    step_time(
                        step.step,
                        attribute_seconds(step.marks, step.end, self.clock.seconds, step.transfers),
                        step.delays,
                    )
                )
                # the end of a step is the first mark of the next one
                self.clock.release(stamp for _, stamp in step.marks)
        finally:
            self._reading.release()


class _Part(AbstractContextManager[None]):
    """The context manager of a part. It is stateless, so it may be entered several times at once."""

    __slots__ = ("_name", "_recorder")

    def __init__(self, recorder: StepRecorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        if self._recorder.is_recording():
            self._recorder._push(self._name)

    def __exit__(self, *_error: object) -> None:
        if self._recorder.is_recording():
            self._recorder._pop()


class _TransferWait(AbstractContextManager[None]):
    """A wait for a neighbouring stage, of which ``transfer`` seconds are the transfer itself."""

    __slots__ = ("_recorder", "_transfer")

    def __init__(self, recorder: StepRecorder, transfer: float) -> None:
        self._recorder, self._transfer = recorder, transfer

    def __enter__(self) -> None:
        if self._recorder.is_recording():
            self._recorder._push_transfer_wait(self._transfer)

    def __exit__(self, *_error: object) -> None:
        if self._recorder.is_recording():
            self._recorder._pop()
