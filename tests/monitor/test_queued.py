"""A queue in front of a sink that is slow, full, broken or hanging: logging never waits for it.

pytest tests/monitor/test_queued.py
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from toolkit.errors import ExitCode
from toolkit.monitor.sink import CompositeSink, Kind, Row, Sink
from toolkit.monitor.sinks.jsonl import JsonlSink
from toolkit.monitor.sinks.queued import DROPPED, QueuedSink, count_values
from toolkit.rows import read_rows


class Slow(Sink):
    """Each row takes ``seconds``, and none is taken while ``gate`` is closed."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.rows: list[Row] = []
        self.codes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self._seconds = seconds

    def log(self, kind: Kind, row: Row) -> None:
        self.gate.wait()
        time.sleep(self._seconds)
        self.rows.append(row)

    def close(self, exit_code: int) -> None:
        self.gate.wait()
        self.codes.append(exit_code)


class Broken(Sink):
    def log(self, kind: Kind, row: Row) -> None:
        raise ConnectionError("the server is gone")


def queued(sink: Sink, **options: Any) -> QueuedSink:
    return QueuedSink(lambda: sink, "slow", **options)


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def steps(sink: Sink, count: int, first: int = 1) -> list[float]:
    """Log so many rows; how long each took."""
    took = []
    for step in range(first, first + count):
        began = time.perf_counter()
        sink.log(Kind.STEP, {"step": step, "loss": 1.0})
        took.append(time.perf_counter() - began)
    return took


def test_logging_does_not_wait_for_a_slow_sink(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(0.02)
    assert statistics.median(steps(slow, 5)) >= 0.02, (
        "the control: without the queue each row takes that long"
    )
    sink = queued(slow)
    assert statistics.median(steps(sink, 50, first=6)) < 0.002
    sink.close(0)
    assert [row["step"] for row in slow.rows] == list(range(1, 56))
    assert slow.codes == [0]
    assert caplog.messages == []


@pytest.mark.parametrize("hurry", ["flush", "close"])
def test_lag_batches_rows_until_flush_or_close(caplog: pytest.LogCaptureFixture, hurry: str) -> None:
    slow = Slow()
    prompt = queued(Slow())
    sink = queued(slow, lag_seconds=60.0)
    for one in (prompt, sink):
        steps(one, 3)
    wait_until(lambda: len(prompt._calls) == 0)  # the control: without a lag they go through by themselves
    time.sleep(0.05)
    assert (slow.rows, len(sink._calls)) == ([], 3)
    assert seconds_of(sink.flush if hurry == "flush" else lambda: sink.close(0)) < 5.0
    assert [row["step"] for row in slow.rows] == [1, 2, 3]
    if hurry == "flush":
        steps(sink, 1, first=4)
        time.sleep(0.05)
        assert len(slow.rows) == 3, "it lags again"
    for one in (prompt, sink):
        one.close(0)
    assert (len(slow.rows), caplog.messages) == (4 if hurry == "flush" else 3, [])


def test_rows_are_written_after_the_lag() -> None:
    slow = Slow()
    sink = queued(slow, lag_seconds=0.2)
    began = time.monotonic()
    steps(sink, 20)
    wait_until(lambda: len(slow.rows) == 20)
    assert time.monotonic() - began > 0.19
    sink.close(0)


def test_dropped_rows_are_counted_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    slow.gate.clear()
    sink = queued(slow, max_values=10)  # rows of two values: one that is being written, four that wait
    steps(sink, 1)
    wait_until(lambda: not sink._calls)
    steps(sink, 9, first=2)
    assert caplog.messages == [f"slow cannot keep up: rows are dropped, and counted in {DROPPED}"]
    slow.gate.set()
    wait_until(lambda: sink._values == 0)
    steps(sink, 2, first=11)
    sink.close(0)
    assert [row["step"] for row in slow.rows] == [1, 2, 3, 4, 5, 11, 12]
    assert [row.get(DROPPED) for row in slow.rows] == [None] * 5 + [5, None]
    assert caplog.messages[1:] == ["slow could not keep up: 5 rows were dropped"]


def test_nested_rows_count_by_their_values() -> None:
    row = {
        "step": 1,
        "parts": {"forward": 0.1, "backward": {"least": 1, "most": 2}},
        "gpus": [{"watts": 1}, {"watts": 2}],
    }
    assert count_values(row.values()) == 6
    slow = Slow()
    slow.gate.clear()
    sink = queued(slow, max_values=1000)
    steps(sink, 1)
    wait_until(lambda: not sink._calls)
    for _ in range(100):
        sink.log(Kind.SYSTEM, {"step": 1, "gpus": [{str(name): 0.5 for name in range(99)}]})
    assert (len(sink._calls), sink._values) == (9, 902), "the first is being written"
    slow.gate.set()
    sink.close(0)


def test_row_larger_than_the_bound_is_accepted_alone() -> None:
    slow = Slow()
    sink = queued(slow, max_values=3)
    sink.log(Kind.STEP, {str(name): name for name in range(10)})
    sink.close(0)
    assert len(slow.rows) == 1


def test_error_in_the_thread_is_reported_once_and_other_sinks_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = Slow()
    sink = CompositeSink([QueuedSink(Broken, "slow"), whole])
    for step in range(1, 21):
        steps(sink, 1, first=step)
        time.sleep(0.005)
    sink.flush()
    sink.close(0)
    assert caplog.messages == ["slow failed and receives no more rows: ConnectionError: the server is gone"]
    assert len(whole.rows) == 20


@pytest.mark.parametrize("last", ["log", "flush", "close"])
def test_next_call_raises_the_error_of_the_sink(last: str) -> None:
    def refuse() -> Sink:
        raise PermissionError("read-only")

    sink = QueuedSink(refuse, "slow")
    sink._thread.join()
    call = {
        "log": lambda: sink.log(Kind.STEP, {"step": 1}),
        "flush": sink.flush,
        "close": lambda: sink.close(0),
    }[last]
    with pytest.raises(PermissionError, match="read-only"):
        call()


def test_file_is_flushed_when_the_queue_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    sink = QueuedSink(lambda: JsonlSink({Kind.STEP: file}), "files")
    for last in (3, 5):
        steps(sink, last - len(list(read_rows(file))))
        wait_until(lambda last=last: len(list(read_rows(file))) == last)
    sink.close(0)


def test_flush_writes_all_rows(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"

    class SlowFile(JsonlSink):
        def log(self, kind: Kind, row: Row) -> None:
            time.sleep(0.005)
            super().log(kind, row)

    sink = queued(SlowFile({Kind.STEP: file}))
    steps(sink, 20)
    assert len(list(read_rows(file))) < 20, "the control: without the flush rows still wait"
    sink.flush()
    assert [row["step"] for row in read_rows(file)] == list(range(1, 21))
    sink.close(0)
    assert caplog.messages == []


def test_flush_times_out_and_waits_again_only_after_the_sink_caught_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = Slow()
    slow.gate.clear()
    sink = queued(slow, flush_seconds=0.2)
    steps(sink, 3)
    assert 0.2 <= seconds_of(sink.flush) < 1.0
    assert [seconds_of(sink.flush) < 0.1 for _ in range(5)] == [True] * 5
    assert caplog.messages == [
        "slow has not written everything within 0.2 s: queued rows are lost if this process dies"
    ]
    slow.gate.set()
    wait_until(lambda: not sink._flush_timed_out)
    steps(sink, 3, first=4)
    sink.flush()
    assert len(slow.rows) == 6
    sink.close(0)


@pytest.mark.parametrize(
    ("code", "bound"), [(ExitCode.DONE, 0.4), (ExitCode.STOPPED, 0.1), (ExitCode.FAILURE, 0.1)]
)
def test_close_is_bounded_and_shorter_after_a_stop_or_failure(code: ExitCode, bound: float) -> None:
    slow = Slow()
    slow.gate.clear()
    sink = queued(slow, close_seconds=0.4, stop_close_seconds=0.1)
    steps(sink, 3)
    began = time.perf_counter()
    with pytest.raises(TimeoutError, match=f"it did not finish within {bound:g} s"):
        sink.close(code)
    assert bound <= time.perf_counter() - began < bound + 0.5
    slow.gate.set()


def test_calls_after_close_are_ignored() -> None:
    slow = Slow()
    sink = queued(slow)
    sink.close(0)
    steps(sink, 2)
    sink.flush()
    sink.close(1)
    assert (slow.rows, slow.codes) == ([], [0])


def test_concurrent_logging_keeps_the_order_of_each_thread() -> None:
    slow = Slow()
    sink = queued(slow)

    def log(number: int) -> None:
        for step in range(500):
            sink.log(Kind.SYSTEM, {"step": step, "thread": number})

    threads = [threading.Thread(target=log, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close(0)
    for number in range(8):
        assert [row["step"] for row in slow.rows if row["thread"] == number] == list(range(500))


def test_row_of_2000_metrics_is_enqueued_within_a_millisecond() -> None:
    """And so do those of 16 nodes, each with a sink of its own, at one step."""
    sinks = [queued(Slow()) for _ in range(16)]
    whole = {"step": 0, **{f"ledger/part-{number}/median": number / 7 for number in range(2000)}}
    of_a_node = {name: whole[name] for name in list(whole)[:126]}
    large: list[float] = []
    small: list[float] = []
    for step in range(1, 31):
        whole["step"] = of_a_node["step"] = step
        large.append(seconds_of(lambda: sinks[0].log(Kind.LEDGER, dict(whole))))
        small.append(seconds_of(lambda: [sink.log(Kind.SYSTEM, dict(of_a_node)) for sink in sinks]))
        time.sleep(0.005)
    for sink in sinks:
        sink.close(0)
    print(
        f"one row of 2,000: {statistics.median(large) * 1e6:.0f} us; 16 rows of 125: "
        f"{statistics.median(small) * 1e6:.0f} us"
    )
    assert statistics.median(large) < 1e-3
    assert statistics.median(small) < 2e-3
