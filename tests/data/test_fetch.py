"""Requests are carried through failures and silence, in bounded time and number. No network: attempts are functions.

pytest tests/data/test_fetch.py
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from toolkit.data.remote.fetch import Limits, Pace, TooSlow, Transient, Unanswered, fetch_all

QUICK = Limits(first_pause_seconds=0.001, longest_pause_seconds=0.005)


def failing(times: int, answer: int) -> Callable[[], int]:
    left = [times]

    def call() -> int:
        if left[0]:
            left[0] -= 1
            raise Transient("status 503")
        return answer

    return call


def silent_once(released: threading.Event, answer: int) -> Callable[[], int]:
    """The first attempt waits until the test is over; others answer."""
    first = threading.Lock()

    def call() -> int:
        if first.acquire(blocking=False):
            released.wait(10)
            raise Transient("silent for too long")
        return answer

    return call


def test_answers_stand_in_their_order_whatever_failed() -> None:
    calls = [failing(number % 4, number) for number in range(200)]
    pace = Pace(QUICK)
    assert fetch_all(calls, pace, QUICK, seconds=30) == list(range(200))
    assert pace.repeated == sum(number % 4 for number in range(200))


def test_without_time_to_repeat_one_failure_is_the_end() -> None:
    """The control: what carries requests through is the repetition."""
    with pytest.raises(Unanswered, match=r"1 attempts .*status 503"):
        fetch_all([failing(0, 1), failing(1, 2)], Pace(QUICK), QUICK, seconds=0)


def test_failures_without_end_end() -> None:
    begin = time.monotonic()
    with pytest.raises(Unanswered) as caught:
        fetch_all([failing(1 << 30, 1)], Pace(QUICK), QUICK, seconds=0.3)
    assert time.monotonic() - begin < 5
    assert 2 < caught.value.attempts < 300


def test_a_definite_answer_ends_the_rest() -> None:
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
        fetch_all(calls, Pace(QUICK), QUICK, seconds=30)
    time.sleep(0.2)
    assert len(started) <= QUICK.in_flight  # the others are left


def test_so_many_and_no_more_at_once() -> None:
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

    limits = Limits(in_flight=7, another_share=0)
    assert sum(fetch_all([call] * 100, Pace(limits), limits, seconds=30)) == 100
    assert most[0] == 7


def test_silence_is_passed_by_another_attempt() -> None:
    released, pace = threading.Event(), Pace(QUICK)
    begin = time.monotonic()
    try:
        assert fetch_all(
            [silent_once(released, 1), *(failing(0, n) for n in range(2, 20))], pace, QUICK, seconds=30
        ) == list(range(1, 20))
        assert time.monotonic() - begin < 2
        assert pace.others == 1
        alone = Limits(another_share=0)
        begin = time.monotonic()
        threading.Timer(1.5, released.set).start()
        assert fetch_all([silent_once(released, 1)], Pace(alone), alone, seconds=30) == [1]
        assert time.monotonic() - begin > 1.4  # the control: without it the silence is waited for
    finally:
        released.set()


def test_other_attempts_are_few() -> None:
    """A store that became slow all at once is not loaded twice."""
    limits = Limits(another_share=1 / 16)
    pace = Pace(limits)
    pace.answered(0.01)
    pace.begin(1600)
    assert sum(pace.another_due(60.0) for _ in range(1600)) == 8 + 100
    assert not Pace(limits).another_due(0.09)  # nothing is known of the store: it gets its time
    pace.begin(160)
    assert not pace.another_due(0.099)
    assert pace.another_due(0.11)


class OneAtATime:
    """A store that serves one request after the other, 5 ms each; whoever has waited for 60 ms gives up, and is served all the same."""

    def __init__(self) -> None:
        self.serving = threading.Lock()
        self.served = 0

    def call(self, number: int) -> int:
        began = time.monotonic()
        with self.serving:
            time.sleep(0.005)
            self.served += 1
        if time.monotonic() - began > 0.06:
            raise TooSlow("silent for too long")
        return number


def test_a_store_that_does_not_keep_up_is_asked_for_less_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(first_pause_seconds=0.01, longest_pause_seconds=0.05, another_share=0)
    store = OneAtATime()
    calls = [lambda number=number: store.call(number) for number in range(200)]
    assert fetch_all(calls, Pace(limits), limits, seconds=60) == list(range(200))
    assert store.served < 500
    monkeypatch.setattr(Pace, "too_slow", lambda self, began: None)  # the control: always as many at once
    with pytest.raises(Unanswered, match="silent for too long"):
        fetch_all(calls, Pace(limits), limits, seconds=3)
