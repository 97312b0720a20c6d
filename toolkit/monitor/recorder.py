"""Where one rank's time goes: marks while a step runs, sums when it is over.

A mark says from when on time belongs to which part; a part's seconds are those from its marks to the marks after them. So the parts of a
step always add up to the step, and a mark costs a reading of the clock and an append. On a GPU the clock is the device's
(``engine/clock.py``): a stamp can be read only when the device has come by, and nobody waits for that.
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
from toolkit.monitor.delays import NO_DELAYS, Delays, ReadDelays
from toolkit.monitor.step_parts import (
    BUBBLE,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    EVALUATION,
    NOT_SPLIT,
    UNEXPLAINED,
    Recorder,
    communication,
)

Stamp = Any  # a moment, as its clock has it
Mark = tuple[str, Stamp]  # from this moment on time belongs to this part

MAX_STEPS = 10_000  # steps that may wait to be taken, and as many to be read
MAX_UNREAD_MARKS = 20_000  # marks that may wait for who takes the steps; beyond, the step's own thread reads them: some megabytes
PIPELINE = communication(Axis.PIPELINE)
WAITING_PARTS = (BUBBLE, DATA, CHECKPOINT, EVALUATION)  # nor is communication


class Clock(Protocol):
    def stamp(self) -> Stamp:
        """Now, in the order of the rank's work."""

    def seconds(self, earlier: Stamp, later: Stamp) -> float:
        """From one stamp to another; both have passed."""

    def passed(self, stamp: Stamp) -> bool:
        """Whether it, and so every one before it, can be read. Returns at once."""

    def release(self, stamps: Iterable[Stamp]) -> None:
        """They are not asked for again."""

    def idle(self) -> bool:
        """No stamps can be made now: the device's queue is being recorded, to be run later."""


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


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of one rank.

    Attributes:
        step: completed steps after it.
        parts: seconds by part; they add up to ``wall``.
        wall: seconds.
        busy: the wall's seconds without communication, bubble, waiting for samples, saving and evaluation: what this rank computed.
        delays: how long something else kept the rank from running; these seconds lie in its parts.
    """

    step: int
    parts: Mapping[str, float]
    wall: float
    busy: float
    delays: Delays = NO_DELAYS


def attribute(
    marks: Sequence[Mark],
    end: Stamp,
    seconds: Callable[[Stamp, Stamp], float],
    transfers: Mapping[int, float] | None = None,
) -> dict[str, float]:
    """Seconds by part, from the first mark to ``end``.

    Args:
        marks: at least one, in order; each holds until the next one.
        transfers: seconds that a transfer takes, by the number of the mark that waits for one: up to so much of the wait is
            ``communication/pipeline``, and the rest the part's own.
    """
    found: defaultdict[str, float] = defaultdict(float)
    stamps = [stamp for _, stamp in marks]
    for (part, begun), until in zip(marks, [*stamps[1:], end], strict=True):
        found[part] += seconds(begun, until)
    for number, transfer in (transfers or {}).items():
        part, begun = marks[number]
        moved = min(transfer, seconds(begun, marks[number + 1][1] if number + 1 < len(marks) else end))
        found[part] -= moved
        found[PIPELINE] += moved
    return dict(found)


def step_time(step: int, parts: Mapping[str, float], delays: Delays = NO_DELAYS) -> StepTime:
    wall = sum(parts.values())
    waited = sum(
        seconds for part, seconds in parts.items() if part in WAITING_PARTS or part.startswith(COMMUNICATION)
    )
    return StepTime(step, parts, wall, wall - waited, delays)


class _Over:
    """A step that is over and perhaps not read yet."""

    __slots__ = ("delays", "end", "marks", "step", "transfers")

    def __init__(
        self, step: int, marks: list[Mark], transfers: dict[int, float], end: Stamp, delays: Delays
    ) -> None:
        self.step, self.marks, self.transfers, self.end, self.delays = step, marks, transfers, end, delays


class StepRecorder(Recorder):
    """Of the thread that makes it, and of autograd's threads, which run hooks while that one waits for backward (PyTorch has one a GPU; to
    Python they are threads that it did not start). Parts on other threads, of background saves or samplers, are not the step's.

    Before the first ``next_step`` nothing is recorded.
    """

    def __init__(
        self, clock: Clock, *, pipelined: bool = False, delays: ReadDelays = lambda: NO_DELAYS
    ) -> None:
        """
        Args:
            pipelined: whether the run has stages; without them a schedule has no bubble.
            delays: what has kept this thread from running so far; called once a step.
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
        self._in_schedule = self._drains = False
        self._over: deque[_Over] = deque(maxlen=MAX_STEPS)
        self._read: deque[StepTime] = deque(maxlen=MAX_STEPS)
        self._reading = threading.Lock()
        self._made, self._seen = 0, 0  # marks

    def part(self, name: str) -> AbstractContextManager[None]:
        found = self._parts.get(name)
        if found is None:
            found = self._parts[name] = _Part(self, name)
        return found

    @contextmanager
    def schedule(self) -> Iterator[None]:
        self._in_schedule = self._drains = self._pipelined
        try:
            yield
        finally:
            self._in_schedule = False

    def set_transfer_seconds(self, seconds: Callable[[int], float]) -> None:
        self._transfer_seconds = seconds

    def next_step(self, step: int) -> None:
        now, before, self._delays = self._stamp(), self._delays, self._read_delays()
        if self._marks is not None:
            self._over.append(_Over(self._step, self._marks, self._transfers, now, self._delays - before))
            self._made += len(self._marks)
        self._step, self._marks, self._transfers = step, [(self._stack[-1], now)], {}
        self._drains = False
        if self._made - self._seen > MAX_UNREAD_MARKS:
            self._look()

    def take_steps(self) -> list[StepTime]:
        """Steps that are over and were not taken before, of the last ``KEPT`` ones; those that the device has not come by yet come another
        time. For any thread, though not for several."""
        self._look()
        return [self._read.popleft() for _ in range(len(self._read))]

    @property
    def doing(self) -> tuple[int, str]:
        """The step under way and its open part, for any thread."""
        return self._step, self._stack[-1]

    def is_recording(self) -> bool:
        """Whether what this thread does is the step's, and can be timed."""
        here = threading.get_ident() == self._thread or isinstance(
            threading.current_thread(), threading._DummyThread
        )
        return here and not self._idle()

    def collective_part(self, axes: str) -> AbstractContextManager[None]:
        """The part of a collective over ``axes`` that begins now, and of waiting for it."""
        if self._drains and (axes == ALL or Axis.PIPELINE in axes):
            self._drains = False
            return self.part(BUBBLE)
        return self.part(communication(axes))

    def transfer_start_part(self, axes: str) -> AbstractContextManager[None]:
        """The part of beginning to send to, or to receive from, a rank that lies in this direction."""
        return self.part(BUBBLE if self._in_schedule and axes == Axis.PIPELINE else communication(axes))

    def passed(self, axes: str, size: int) -> AbstractContextManager[None]:
        """The part of waiting until ``size`` bytes have been sent or received."""
        if not (self._in_schedule and axes == Axis.PIPELINE):
            return self.part(communication(axes))
        transfer = self._transfer_seconds(size)
        return _Stall(self, transfer) if transfer > 0 else self.part(BUBBLE)

    def _push(self, name: str) -> None:
        stack = self._stack
        now = stack[-1]
        if now in NOT_SPLIT:
            name = now
        stack.append(name)
        if name != now and self._marks is not None:
            self._marks.append((name, self._stamp()))

    def _pop(self) -> None:
        stack = self._stack
        name, now = stack.pop(), stack[-1]
        if name != now and self._marks is not None:
            self._marks.append((now, self._stamp()))

    def _push_stall(self, transfer: float) -> None:
        self._push(BUBBLE)
        if self._marks is not None and self._stack[-1] == BUBBLE:
            self._transfers[len(self._marks) - 1] = transfer

    def _look(self) -> None:
        """Read the steps that can be read, unless another thread is at it."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            while self._over and self.clock.passed(self._over[0].end):
                over = self._over.popleft()
                self._seen += len(over.marks)
                self._read.append(
                    step_time(
                        over.step,
                        attribute(over.marks, over.end, self.clock.seconds, over.transfers),
                        over.delays,
                    )
                )
                self.clock.release(stamp for _, stamp in over.marks)  # its end is the next one's first mark
        finally:
            self._reading.release()


class _Part(AbstractContextManager[None]):
    """One a name: it keeps nothing, so it may be open several times."""

    __slots__ = ("_name", "_recorder")

    def __init__(self, recorder: StepRecorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        if self._recorder.is_recording():
            self._recorder._push(self._name)

    def __exit__(self, *_error: object) -> None:
        if self._recorder.is_recording():
            self._recorder._pop()


class _Stall(AbstractContextManager[None]):
    """Waiting for a neighbouring stage; of the wait so many seconds are the transfer's own."""

    __slots__ = ("_recorder", "_transfer")

    def __init__(self, recorder: StepRecorder, transfer: float) -> None:
        self._recorder, self._transfer = recorder, transfer

    def __enter__(self) -> None:
        if self._recorder.is_recording():
            self._recorder._push_stall(self._transfer)

    def __exit__(self, *_error: object) -> None:
        if self._recorder.is_recording():
            self._recorder._pop()
