"""Many requests at once, each carried through failures and silence, in bounded time and with a bounded number of repetitions.

An attempt that fails is repeated after a pause that doubles. One that takes much longer than answers usually do is not waited for:
another attempt starts beside it, and the first answer counts. A store in which every twentieth request stalls so costs a fraction
of a second now and then, not its time limit.

Attempts block threads, which are joined when Python ends. The asynchronous functions of a library whose own threads call back into
Python would need fewer, but such a thread that finds Python ending aborts the process.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

AT_ONCE = 4  # attempts of one request
THREADS = 256  # of a process, made as they are needed
TICK_SECONDS = 0.02  # how often the requests under way are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What requests to a store may cost."""

    in_flight: int = 64
    """Requests of one reading at once, fewer while the store does not keep up. Attempts that are no longer waited for come on top,
    THREADS in all."""
    part_bytes: int = 1 << 20
    """The largest request; more is cut into several."""
    connect_seconds: float = 5.0
    silence_seconds: float = 5.0
    """An attempt has failed when no byte came for so long: a stalled body too."""
    request_seconds: float = 30.0
    """An attempt has failed when it is not whole after so long."""
    first_pause_seconds: float = 0.1
    longest_pause_seconds: float = 5.0
    """Before a failed attempt is repeated: the first pause, doubled each time up to the longest, times 0.5 to 1 at random."""
    opening_seconds: float = 20.0
    """No attempt starts later than this after the first while data are opened: a wrong address is told soon."""
    reading_seconds: float = 300.0
    """The same while training reads: a store that is away for some minutes does not end a run."""
    another_after: float = 4.0
    """Another attempt starts beside one that takes so many times as long as answers usually do ..."""
    another_least_seconds: float = 0.1
    another_most_seconds: float = 1.0
    """... but no sooner and no later than these; never before twice as long as answers usually take."""
    another_share: float = 1 / 8
    """At most this share of all requests, and 8 more, get another attempt so: a slow store is not loaded twice. 0: none."""


class Transient(Exception):
    """An attempt failed in a way that another may not. The text says how."""


class TooSlow(Transient):
    """An attempt ran into a time limit. Repeating many of them at once makes an overloaded store slower still."""


class Unanswered(Exception):
    """A request failed until its time was over."""

    def __init__(self, attempts: int, seconds: float, last: str) -> None:
        self.attempts, self.seconds, self.last = attempts, seconds, last
        super().__init__(f"{attempts} attempts in {seconds:.0f} s; the last: {last}")


class Pace:
    """How long answers of a store usually take, what was asked of it, and how many requests at once it keeps up with.

    The last is found as TCP finds it: an attempt that runs into a time limit halves it, each answer lets it grow a little. Else 64 requests
    that wait for one another time out together, and are repeated together without an end. Shared by the threads that read from the store.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._usual: float | None = None
        self._at_once = float(limits.in_flight)
        self._halved = 0.0  # when
        self.requests = 0
        self.others = 0  # attempts beside one under way
        self.repeated = 0  # attempts after a failed one

    def begin(self, requests: int) -> None:
        with self._lock:
            self.requests += requests

    def answered(self, seconds: float) -> None:
        with self._lock:
            self._usual = seconds if self._usual is None else 0.9 * self._usual + 0.1 * seconds
            self._at_once = min(self._limits.in_flight, self._at_once + 1 / self._at_once)

    @property
    def at_once(self) -> int:
        """Requests of one reading, at least one."""
        return int(self._at_once)

    def too_slow(self, began: float) -> None:
        """An attempt that began then ran into a time limit. Those that began before the last halving say nothing new."""
        with self._lock:
            if began > self._halved:
                self._at_once, self._halved = max(1.0, self._at_once / 2), time.monotonic()

    def repeat(self) -> None:
        with self._lock:
            self.repeated += 1

    def another_due(self, waited_seconds: float) -> bool:
        """Whether a request that waits so long gets another attempt, which is then counted."""
        limits = self._limits
        with self._lock:
            often = limits.another_most_seconds if self._usual is None else limits.another_after * self._usual
            patience = max(
                min(max(often, limits.another_least_seconds), limits.another_most_seconds),
                2 * (self._usual or 0.0),
            )
            allowed = limits.another_share and self.others < 8 + limits.another_share * self.requests
            due = bool(allowed) and waited_seconds > patience
            self.others += due
            return due


class Forked(Exception):
    """Requests were made by the process that this one was forked from: the threads that carry them out, ours and a library's, are there."""


@cache
def _threads() -> tuple[ThreadPoolExecutor, int]:
    """And the process that they are in."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="storage"), os.getpid()


class _Attempt(Generic[T]):
    def __init__(self, job: _Job[T]) -> None:
        self.job = job
        self.began: float | None = None  # when a thread took it up


class _Job(Generic[T]):
    """One request. All fields but ``done`` belong to the thread that asked."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.running: list[_Attempt[T]] = []
        self.attempts = 0
        self.failures = 0
        self.retry_at: float | None = None
        self.done = False  # answered, or nobody waits any more
        self.answer: T


def fetch_all(calls: Sequence[Callable[[], T]], pace: Pace, limits: Limits, seconds: float) -> list[T]:
    """The answers of ``calls``, in their order. Each call is one attempt; it may run in another thread, more than once, also at once.

    Args:
        seconds: no attempt starts later than so long after the first.

    Raises:
        Unanswered: a call raised Transient until then.
        Forked: waiting would have no end.
        Exception: whatever else a call raised, at once.
    """
    answers: SimpleQueue[tuple[_Attempt[T], T | None, Exception | None]] = SimpleQueue()
    (pool, process), start = _threads(), time.monotonic()
    if process != os.getpid():
        raise Forked
    jobs = [_Job(call) for call in calls]
    waiting, active = deque(jobs), 0  # requests with an attempt under way
    pace.begin(len(jobs))

    def carry_out(attempt: _Attempt[T]) -> None:
        if attempt.job.done:
            return
        attempt.began = time.monotonic()
        try:
            answers.put((attempt, attempt.job.call(), None))
        except Exception as error:  # noqa: BLE001 - it is judged, and raised, by the thread that asked
            answers.put((attempt, None, error))

    def begin(job: _Job[T]) -> None:
        nonlocal active
        attempt = _Attempt(job)
        active += not job.running
        job.running.append(attempt)
        job.attempts += 1
        job.retry_at = None
        pool.submit(carry_out, attempt)

    def look_after(job: _Job[T], now: float) -> None:
        if job.retry_at is not None and now >= job.retry_at and active < pace.at_once:
            pace.repeat()
            begin(job)
        elif (
            0 < len(job.running) < AT_ONCE
            and (began := job.running[-1].began) is not None
            and pace.another_due(now - began)
        ):
            begin(job)

    try:
        left, looked = len(jobs), start
        while left:
            while waiting and active < pace.at_once:
                begin(waiting.popleft())
            try:
                attempt, answer, error = answers.get(timeout=TICK_SECONDS)
            except Empty:
                pass
            else:
                job = attempt.job
                job.running.remove(attempt)
                if job.done:
                    continue
                if error is None:
                    assert attempt.began is not None
                    pace.answered(time.monotonic() - attempt.began)
                    job.answer, job.done = answer, True  # type: ignore[assignment]
                    left -= 1
                    active -= 1
                elif not isinstance(error, Transient):
                    raise error
                else:
                    if isinstance(error, TooSlow):
                        assert attempt.began is not None
                        pace.too_slow(attempt.began)
                    if not job.running:  # no other attempt of it is under way
                        active -= 1
                        job.retry_at = time.monotonic() + _pause(job.failures, limits)
                        job.failures += 1
                        if job.retry_at - start > seconds:
                            raise Unanswered(job.attempts, time.monotonic() - start, str(error))
            now = time.monotonic()
            if now - looked >= TICK_SECONDS:
                looked = now
                for job in jobs:
                    if not job.done:
                        look_after(job, now)
    finally:
        for job in jobs:
            job.done = True  # what no thread has taken up yet is left
    return [job.answer for job in jobs]


def _pause(failures: int, limits: Limits) -> float:
    """Random, so that ranks that failed together do not come back together. No result depends on it."""
    longest = min(limits.longest_pause_seconds, limits.first_pause_seconds * 2**failures)
    return longest * random.uniform(0.5, 1.0)
