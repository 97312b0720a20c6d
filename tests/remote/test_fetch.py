"""Requests through failures and silence, in bounded time and number. Attempts are functions; no network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from toolkit.remote.fetch import (
    RequestLimits,
    RequestPacing,
    RequestTimeout,
    RetriesExhausted,
    TransientError,
    fetch_all,
)

QUICK = RequestLimits(first_backoff_seconds=0.001, max_backoff_seconds=0.005)
UNHEDGED = replace(QUICK, hedge_share=0)  # on a busy machine a slow attempt would be hedged, not retried


def failing(times: int, answer: int) -> Callable[[], int]:
    left = [times]

    def call() -> int:
        if left[0]:
            left[0] -= 1
            raise TransientError("status 503")
        return answer

    return call


def silent_once(released: threading.Event, answer: int) -> Callable[[], int]:
    """The first attempt waits until the test ends; later attempts answer."""
    first = threading.Lock()

    def call() -> int:
        if first.acquire(blocking=False):
            released.wait(10)
            raise TransientError("silent for too long")
        return answer

    return call


def test_results_keep_their_order_despite_failures() -> None:
    calls = [failing(number % 4, number) for number in range(200)]
    pace = RequestPacing(UNHEDGED)
    assert fetch_all(calls, pace, UNHEDGED, seconds=30) == list(range(200))
    assert pace.retries == sum(number % 4 for number in range(200))


def test_one_failure_without_retry_time_raises() -> None:
    """Control: without retries, one failure fails the read."""
    with pytest.raises(RetriesExhausted, match=r"1 attempts .*status 503"):
        fetch_all([failing(0, 1), failing(1, 2)], RequestPacing(QUICK), QUICK, seconds=0)


def test_endless_failures_exhaust_retries() -> None:
    begin = time.monotonic()
    with pytest.raises(RetriesExhausted) as caught:
        fetch_all([failing(1 << 30, 1)], RequestPacing(QUICK), QUICK, seconds=0.3)
    assert time.monotonic() - begin < 5
    assert 2 < caught.value.attempts < 300


def test_permanent_error_is_raised_at_once() -> None:
    def refused() -> int:
        raise KeyError("forbidden")

    started: list[int] = []
    calls = [
        refused,
        *(
            lambda number=number: started.append(number) or time.sleep(0.05) or number
            for number in range(500)
        ),
    ]
    with pytest.raises(KeyError):
        fetch_all(calls, RequestPacing(QUICK), QUICK, seconds=30)
    time.sleep(0.2)
    assert len(started) <= QUICK.in_flight  # the other attempts are abandoned


def test_concurrent_requests_are_bounded() -> None:
    under_way, most = [0], [0]
    lock = threading.Lock()

    def call() -> int:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        time.sleep(0.01)
        with lock:
            under_way[0] -= 1
        return 1

    limits = RequestLimits(in_flight=7, hedge_share=0)
    assert sum(fetch_all([call] * 100, RequestPacing(limits), limits, seconds=30)) == 100
    assert most[0] == 7


def test_silent_attempt_is_hedged() -> None:
    released, pace = threading.Event(), RequestPacing(QUICK)
    begin = time.monotonic()
    try:
        assert fetch_all(
            [silent_once(released, 1), *(failing(0, n) for n in range(2, 20))], pace, QUICK, seconds=30
        ) == list(range(1, 20))
        assert time.monotonic() - begin < 2
        assert pace.hedges == 1
        alone = RequestLimits(hedge_share=0)
        begin = time.monotonic()
        threading.Timer(0.7, released.set).start()
        assert fetch_all([silent_once(released, 1)], RequestPacing(alone), alone, seconds=30) == [1]
        assert (
            time.monotonic() - begin > 0.6
        )  # the control: without a hedged request the read waits for the silent one
    finally:
        released.set()


def test_hedged_attempts_are_bounded() -> None:
    """A store that suddenly becomes slow does not get twice the load."""
    limits = RequestLimits(hedge_share=1 / 16)
    pace = RequestPacing(limits)
    pace.record_answer(0.01)
    pace.count_requests(1600)
    assert sum(pace.hedge_due(60.0) for _ in range(1600)) == 8 + 100
    assert not RequestPacing(limits).hedge_due(0.09)  # no answer time is known yet, so no request is hedged
    pace.count_requests(160)
    assert not pace.hedge_due(0.099)
    assert pace.hedge_due(0.11)


class OneAtATime:
    """A store that serves requests one after another, 5 ms each; clients give up after 60 ms."""

    def __init__(self) -> None:
        self.serving = threading.Lock()
        self.served = 0

    def call(self, number: int) -> int:
        began = time.monotonic()
        with self.serving:
            time.sleep(0.005)
            self.served += 1
        if time.monotonic() - began > 0.06:
            raise RequestTimeout("silent for too long")
        return number


def test_overloaded_store_gets_fewer_concurrent_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = RequestLimits(first_backoff_seconds=0.01, max_backoff_seconds=0.05, hedge_share=0)
    store = OneAtATime()
    calls = [lambda number=number: store.call(number) for number in range(100)]
    assert fetch_all(calls, RequestPacing(limits), limits, seconds=60) == list(range(100))
    assert store.served < 400
    # The control: the concurrency does not adapt.
    monkeypatch.setattr(RequestPacing, "record_timeout", lambda self, began: None)
    with pytest.raises(RetriesExhausted, match="silent for too long"):
        fetch_all(calls, RequestPacing(limits), limits, seconds=1.5)
