"""Concurrent requests with retries after failures and silence, in bounded time and attempts.

A failed attempt is repeated after exponential backoff. If an attempt takes much longer than usual, a second
attempt starts in parallel and the first answer counts (a hedged request). In a store that stalls every
twentieth request a read then takes a fraction of a second longer, not the time limit of a request.

Attempts run in threads, which Python joins at exit. obstore's asynchronous functions would need fewer
threads, but a library thread that calls into Python during interpreter shutdown aborts the process.
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

MAX_ATTEMPTS = 4  # attempts of one request
THREADS = 256  # per process, started as needed
TICK_SECONDS = 0.02  # how often active requests are checked


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds of requests to a store."""

    in_flight: int = 64
    """Concurrent requests of one read; fewer while the store is overloaded. Abandoned attempts are not
    counted; there are at most THREADS in all.
    """
    part_bytes: int = 1 << 20
    """The largest request; longer ranges are split."""
    connect_seconds: float = 5.0
    silence_seconds: float = 5.0
    """An attempt fails if no byte arrives for this time, within a body too."""
    request_seconds: float = 30.0
    """An attempt fails if it is incomplete after this time."""
    first_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0
    """A failed attempt is repeated after the first backoff, doubled up to the maximum, times 0.5 to 1."""
    store_retries: int = 0
    """Retries of a request inside obstore, for uploads. Reads have none there: ``fetch_all`` measures how
    long they take, and may start a second attempt early."""
    opening_seconds: float = 20.0
    """While data are opened, no attempt starts later than this after the first."""
    reading_seconds: float = 300.0
    """The same while training reads: a store may be unavailable for some minutes without ending a run."""
    hedge_after: float = 4.0
    """A parallel attempt starts after this multiple of the usual answer time ..."""
    hedge_min_seconds: float = 0.1
    hedge_max_seconds: float = 1.0
    """... within these bounds, and never before twice the usual answer time."""
    hedge_share: float = 1 / 8
    """At most this share of all requests, and 8 more, are hedged; 0: none."""


class TransientError(Exception):
    """An attempt failed in a way that may not recur. The text describes the failure."""


class RequestTimeout(TransientError):
    """An attempt exceeded a time limit.

    Repeating many of them at once would slow down an overloaded store further.
    """


class RetriesExhausted(Exception):
    """A request failed until its time was over."""

    def __init__(self, attempts: int, seconds: float, last_failure: str) -> None:
        self.attempts, self.seconds, self.last_failure = attempts, seconds, last_failure
        super().__init__(f"{attempts} attempts in {seconds:.0f} s; the last: {last_failure}")


class RequestPacing:
    """A store's usual answer time, request counts, and the concurrent requests that it can serve.

    The concurrency is adapted as in TCP: a timeout halves it, each answer increases it slightly. Otherwise 64
    requests that wait for one another would time out together and be repeated together without end. Shared by
    reading threads.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._usual_seconds: float | None = None
        self._concurrency = float(limits.in_flight)
        self._halved_at = 0.0  # when the concurrency was last halved
        self.requests = 0
        self.hedges = 0  # parallel attempts
        self.retries = 0  # attempts after a failed one

    def count_requests(self, requests: int) -> None:
        with self._lock:
            self.requests += requests

    def record_answer(self, seconds: float) -> None:
        with self._lock:
            self._usual_seconds = (
                seconds if self._usual_seconds is None else 0.9 * self._usual_seconds + 0.1 * seconds
            )
            self._concurrency = min(self._limits.in_flight, self._concurrency + 1 / self._concurrency)

    @property
    def concurrency(self) -> int:
        """Concurrent requests of one read, at least one."""
        return int(self._concurrency)

    def record_timeout(self, started: float) -> None:
        """Count a timeout of an attempt, unless the attempt started before the last halving."""
        with self._lock:
            if started > self._halved_at:
                self._concurrency, self._halved_at = max(1.0, self._concurrency / 2), time.monotonic()

    def count_retry(self) -> None:
        with self._lock:
            self.retries += 1

    def hedge_due(self, waited_seconds: float) -> bool:
        """Return whether a request that has waited this long gets a parallel attempt, and count it."""
        limits = self._limits
        with self._lock:
            expected = (
                limits.hedge_max_seconds
                if self._usual_seconds is None
                else limits.hedge_after * self._usual_seconds
            )
            threshold = max(
                min(max(expected, limits.hedge_min_seconds), limits.hedge_max_seconds),
                2 * (self._usual_seconds or 0.0),
            )
            allowed = limits.hedge_share and self.hedges < 8 + limits.hedge_share * self.requests
            due = bool(allowed) and waited_seconds > threshold
            self.hedges += due
            return due


class ForkedProcess(Exception):
    """The process was forked after it made requests: the threads that serve them exist only in the parent."""


@cache
def _threads() -> tuple[ThreadPoolExecutor, int]:
    """Return the thread pool and the process that created it."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="storage"), os.getpid()


class _Attempt(Generic[T]):
    def __init__(self, request: _Request[T]) -> None:
        self.request = request
        self.started: float | None = None  # when a thread started it


class _Request(Generic[T]):
    """One request. All fields but ``done`` belong to the calling thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.running: list[_Attempt[T]] = []
        self.attempts = 0
        self.failures = 0
        self.retry_at: float | None = None
        self.finished = False  # answered or abandoned
        self.result: T


def fetch_all(
    calls: Sequence[Callable[[], T]], pacing: RequestPacing, limits: RequestLimits, seconds: float
) -> list[T]:
    """Return the results of ``calls`` in their order.

    Args:
        calls: each call is one attempt. It runs in another thread, perhaps several times, also concurrently.
        seconds: no attempt starts later than this after the first.

    Raises:
        RetriesExhausted: a call raised TransientError until then.
        ForkedProcess: the thread pool belongs to the parent process; waiting would never end.
        Exception: any other exception of a call, at once.
    """
    results: SimpleQueue[tuple[_Attempt[T], T | None, Exception | None]] = SimpleQueue()
    (pool, pid), start = _threads(), time.monotonic()
    if pid != os.getpid():
        raise ForkedProcess
    requests = [_Request(call) for call in calls]
    waiting, active_requests = deque(requests), 0  # active: requests with a running attempt
    pacing.count_requests(len(requests))

    def run_attempt(attempt: _Attempt[T]) -> None:
        if attempt.request.finished:
            return
        attempt.started = time.monotonic()
        try:
            results.put((attempt, attempt.request.call(), None))
        except Exception as error:  # noqa: BLE001 - the calling thread handles or raises it
            results.put((attempt, None, error))

    def start_attempt(request: _Request[T]) -> None:
        nonlocal active_requests
        attempt = _Attempt(request)
        active_requests += not request.running
        request.running.append(attempt)
        request.attempts += 1
        request.retry_at = None
        pool.submit(run_attempt, attempt)

    def retry_or_hedge(request: _Request[T], now: float) -> None:
        if request.retry_at is not None and now >= request.retry_at and active_requests < pacing.concurrency:
            pacing.count_retry()
            start_attempt(request)
        elif (
            0 < len(request.running) < MAX_ATTEMPTS
            and (started := request.running[-1].started) is not None
            and pacing.hedge_due(now - started)
        ):
            start_attempt(request)

    try:
        remaining, last_check = len(requests), start
        while remaining:
            while waiting and active_requests < pacing.concurrency:
                start_attempt(waiting.popleft())
            try:
                attempt, result, error = results.get(timeout=TICK_SECONDS)
            except Empty:
                pass
            else:
                request = attempt.request
                request.running.remove(attempt)
                if request.finished:
                    continue
                if error is None:
                    assert attempt.started is not None
                    pacing.record_answer(time.monotonic() - attempt.started)
                    request.result, request.finished = result, True  # type: ignore[assignment]
                    remaining -= 1
                    active_requests -= 1
                elif not isinstance(error, TransientError):
                    raise error
                else:
                    if isinstance(error, RequestTimeout):
                        assert attempt.started is not None
                        pacing.record_timeout(attempt.started)
                    if not request.running:  # no parallel attempt is running
                        active_requests -= 1
                        request.retry_at = time.monotonic() + _backoff_seconds(request.failures, limits)
                        request.failures += 1
                        if request.retry_at - start > seconds:
                            raise RetriesExhausted(request.attempts, time.monotonic() - start, str(error))
            now = time.monotonic()
            if now - last_check >= TICK_SECONDS:
                last_check = now
                for request in requests:
                    if not request.finished:
                        retry_or_hedge(request, now)
    finally:
        for request in requests:
            request.finished = True  # queued attempts will not start
    return [request.result for request in requests]


def _backoff_seconds(failures: int, limits: RequestLimits) -> float:
    """Return a random backoff, so that ranks that failed together do not retry together.

    It affects no result.
    """
    longest = min(limits.max_backoff_seconds, limits.first_backoff_seconds * 2**failures)
    return longest * random.uniform(0.5, 1.0)
