"""Run a sink in its own thread behind a bounded queue, so that logging never waits for it.

A sink that falls behind loses rows instead of slowing down training. Dropped rows are counted in the next row
that is accepted (``dropped_rows``), and reported once and at the end.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from toolkit.errors import ExitCode
from toolkit.monitor.sink import Kind, Row, Sink

log = logging.getLogger(__name__)

Call = Callable[[Sink], None]

MAX_VALUES = 500_000  # values of waiting rows, some 50 MB
BATCH = 64  # calls taken from the queue at once, because each access to the queue blocks the logging thread
FLUSH_SECONDS = 2.0
CLOSE_SECONDS = 60.0  # after the last step, when nothing else waits
STOP_CLOSE_SECONDS = 15.0  # after a stop or a failure, when the user or the restart is waiting
DROPPED = "dropped_rows"
NESTED = frozenset({dict, list, tuple})


class QueuedSink(Sink):
    """Errors of the sink are raised by the next call.

    Args:
        open_sink: creates the sink. It and all calls of the sink run in the thread.
        name: the sink's name in messages.
        max_values: how many values of rows may be queued or being written.
        lag_seconds: how long a call waits for others to be processed with it, because waking the thread for
            each row costs more than the work.
        flush_seconds: how long ``flush`` waits at most.
        close_seconds, stop_close_seconds: how long ``close`` waits, after the last step and otherwise.
    """

    def __init__(
        self,
        open_sink: Callable[[], Sink],
        name: str,
        *,
        max_values: int = MAX_VALUES,
        lag_seconds: float = 0.0,
        flush_seconds: float = FLUSH_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
        stop_close_seconds: float = STOP_CLOSE_SECONDS,
    ) -> None:
        self._name, self._max_values, self._lag_seconds = name, max_values, lag_seconds
        self._flush_seconds, self._close_seconds, self._stop_close_seconds = (
            flush_seconds,
            close_seconds,
            stop_close_seconds,
        )
        self._changed = threading.Condition()
        self._calls: deque[tuple[int, Call]] = deque()  # number of values in the row, and the call
        self._values = 0  # in all calls that are not processed
        self._enqueued = self._processed = 0  # numbers of calls
        self._dropped = self._lost = 0  # rows since the last accepted one, and in total
        self._flush_target = 0  # the call that a flush waits for
        self._flush_timed_out = False  # and the queue has not been empty since
        self._exit_code: int | None = None  # set when closed
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(open_sink,), name=f"sink {name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._name

    def log(self, kind: Kind, row: Row) -> None:
        values = count_values(row.values())
        with self._changed:
            if self._is_closed():
                return
            if self._values and self._values + values > self._max_values:
                self._dropped, self._lost = self._dropped + 1, self._lost + 1
                first = self._lost == 1
            else:
                counted = {**row, DROPPED: self._dropped} if self._dropped else row
                self._dropped, first = 0, False
                self._append(values, lambda sink: sink.log(kind, counted))
        if first:
            log.warning(f"{self._name} cannot keep up: rows are dropped, and counted in {DROPPED}")

    def log_summary(self, name: str, value: str | float) -> None:
        self._enqueue_call(lambda sink: sink.log_summary(name, value))

    def log_image(self, name: str, path: Path) -> None:
        self._enqueue_call(lambda sink: sink.log_image(name, path))

    def flush(self) -> None:
        with self._changed:
            # after a timeout another wait would cost as much and gain as little
            if self._is_closed() or self._flush_timed_out:
                return
            self._append(0, lambda sink: sink.flush())
            self._flush_target = upto = self._enqueued
            self._changed.notify_all()
            written = self._changed.wait_for(
                lambda: self._processed >= upto or self._error is not None, self._flush_seconds
            )
            self._raise_error()
            self._flush_timed_out = not written
        if not written:
            log.warning(
                f"{self._name} has not written everything within {self._flush_seconds:g} s: queued rows "
                "are lost if this process dies"
            )

    def close(self, exit_code: int) -> None:
        with self._changed:
            if self._is_closed():
                return
            self._exit_code = exit_code
            self._changed.notify_all()
        seconds = self._close_seconds if exit_code == ExitCode.DONE else self._stop_close_seconds
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(
                f"it did not finish within {seconds:g} s, and {self._enqueued - self._processed} rows wait"
            )
        if self._lost:
            log.warning(f"{self._name} could not keep up: {self._lost} rows were dropped")

    def _enqueue_call(self, call: Call) -> None:
        with self._changed:
            if not self._is_closed():
                self._append(1, call)

    def _is_closed(self) -> bool:
        """Return whether the sink is closed. Raises the sink's error."""
        self._raise_error()
        return self._exit_code is not None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _append(self, values: int, call: Call) -> None:
        self._calls.append((values, call))
        self._values += values
        self._enqueued += 1
        if len(self._calls) == 1:  # otherwise the thread was notified already
            self._changed.notify_all()

    def _run(self, open_sink: Callable[[], Sink]) -> None:
        try:
            sink = open_sink()
            while calls := self._take_batch():
                for _, call in calls:
                    call(sink)
                if not self._calls:  # one flush for all rows that arrived together
                    sink.flush()
                with self._changed:
                    self._values -= sum(values for values, _ in calls)
                    self._processed += len(calls)
                    self._flush_timed_out = self._flush_timed_out and self._processed < self._enqueued
                    self._changed.notify_all()
            assert self._exit_code is not None
            sink.close(self._exit_code)
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that uses this sink
            with self._changed:
                self._error = error
                self._calls.clear()
                self._changed.notify_all()

    def _take_batch(self) -> list[tuple[int, Call]]:
        """Return the next calls; empty if the sink was closed."""
        with self._changed:
            if not self._calls:
                self._changed.wait_for(lambda: self._calls or self._exit_code is not None)
                if self._lag_seconds:
                    self._changed.wait_for(
                        lambda: self._flush_target > self._processed or self._exit_code is not None,
                        self._lag_seconds,
                    )
            return [self._calls.popleft() for _ in range(min(BATCH, len(self._calls)))]


def count_values(values: Collection[Any]) -> int:
    """Count the values, including those in dictionaries and lists, as a measure of memory. Runs in the
    logging thread.
    """
    if NESTED.isdisjoint(set(map(type, values))):  # the common case
        return len(values)
    return sum(
        count_values(value.values() if isinstance(value, dict) else value) if type(value) in NESTED else 1
        for value in values
    )
