"""A sink in a thread of its own, behind a bounded queue: whoever logs never waits for it.

A sink that falls behind loses rows, never time of the training: what does not fit is counted, the count stands in the next row that
goes through (``dropped_rows``), and it is told once and at the end.
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

WAITING = 500_000  # values of rows that may wait, some 50 MB
TOGETHER = (
    64  # calls at most that are taken from the queue at once: each look at the queue keeps who logs from it
)
FLUSH_SECONDS = 2.0
CLOSE_SECONDS = 60.0  # after the last step, when nothing else waits
HURRY_SECONDS = 15.0  # after a stop or a failure: who asked for it, or the restart, is waiting
DROPPED = "dropped_rows"
NESTED = frozenset({dict, list, tuple})


class QueuedSink(Sink):
    """
    Args:
        open_sink: makes the sink; called in the thread, like everything of the sink.
        name: of that sink, for people.
        waiting: how many values of rows may wait or be under way.
        lag_seconds: how long a call waits for others to go with it: a sink that is woken for each costs more by that than by the work.
        flush_seconds: how long ``flush`` waits at most.
        close_seconds, hurry_seconds: how long ``close`` waits at most, after the last step and otherwise.
        tell: for rows that are lost; errors are raised by the next call.
    """

    def __init__(
        self,
        open_sink: Callable[[], Sink],
        name: str,
        *,
        waiting: int = WAITING,
        lag_seconds: float = 0.0,
        flush_seconds: float = FLUSH_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
        hurry_seconds: float = HURRY_SECONDS,
        tell: Callable[[str], None] = log.warning,
    ) -> None:
        self._name, self._waiting, self._lag_seconds, self._tell = name, waiting, lag_seconds, tell
        self._flush_seconds, self._close_seconds, self._hurry_seconds = (
            flush_seconds,
            close_seconds,
            hurry_seconds,
        )
        self._changed = threading.Condition()
        self._calls: deque[tuple[int, Call]] = deque()  # values in the row, and what to do with the sink
        self._values = 0  # in all calls that are not done
        self._put = self._done = 0  # calls so far
        self._dropped = self._lost = 0  # rows since the last that went through, and in all
        self._awaited = 0  # the call that a flush waits for
        self._late = False  # a flush was given up, and the queue has not been empty since
        self._exit_code: int | None = None  # set: nothing more comes
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._work, args=(open_sink,), name=f"sink {name}", daemon=True
        )
        self._thread.start()

    @property
    def name(self) -> str:
        return self._name

    def log(self, kind: Kind, row: Row) -> None:
        values = size(row.values())
        with self._changed:
            if self._refuses():
                return
            if self._values and self._values + values > self._waiting:
                self._dropped, self._lost = self._dropped + 1, self._lost + 1
                first = self._lost == 1
            else:
                counted = {**row, DROPPED: self._dropped} if self._dropped else row
                self._dropped, first = 0, False
                self._append(values, lambda sink: sink.log(kind, counted))
        if first:
            self._tell(f"{self._name} does not keep up: rows are left out, and counted in {DROPPED}")

    def log_summary(self, name: str, value: str | float) -> None:
        self._call(lambda sink: sink.log_summary(name, value))

    def log_image(self, name: str, path: Path) -> None:
        self._call(lambda sink: sink.log_image(name, path))

    def flush(self) -> None:
        with self._changed:
            if self._refuses() or self._late:  # late: another wait would cost as much, and gain as little
                return
            self._append(0, lambda sink: sink.flush())
            self._awaited = upto = self._put
            self._changed.notify_all()
            written = self._changed.wait_for(
                lambda: self._done >= upto or self._error is not None, self._flush_seconds
            )
            self._refuses()
            self._late = not written
        if not written:
            self._tell(
                f"{self._name} has not written everything within {self._flush_seconds:g} s: what waits is lost if this process dies"
            )

    def close(self, exit_code: int) -> None:
        with self._changed:
            if self._refuses():
                return
            self._exit_code = exit_code
            self._changed.notify_all()
        seconds = self._close_seconds if exit_code == ExitCode.DONE else self._hurry_seconds
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TimeoutError(
                f"it did not finish within {seconds:g} s, and {self._put - self._done} rows wait"
            )
        if self._lost:
            self._tell(f"{self._name} did not keep up: {self._lost} rows were left out")

    def _call(self, call: Call) -> None:
        with self._changed:
            if not self._refuses():
                self._append(1, call)

    def _refuses(self) -> bool:
        """Whether the sink is closed. Raises what the sink raised."""
        if self._error is not None:
            raise self._error
        return self._exit_code is not None

    def _append(self, values: int, call: Call) -> None:
        self._calls.append((values, call))
        self._values += values
        self._put += 1
        if len(self._calls) == 1:  # else it has been told, and is busy or waits for more
            self._changed.notify_all()

    def _work(self, open_sink: Callable[[], Sink]) -> None:
        try:
            sink = open_sink()
            while calls := self._next():
                for _, call in calls:
                    call(sink)
                if not self._calls:  # a file is handed to the system once for all rows that came together
                    sink.flush()
                with self._changed:
                    self._values -= sum(values for values, _ in calls)
                    self._done += len(calls)
                    self._late = self._late and self._done < self._put
                    self._changed.notify_all()
            assert self._exit_code is not None
            sink.close(self._exit_code)
        except BaseException as error:  # noqa: BLE001  it is raised in the thread that uses this sink
            with self._changed:
                self._error = error
                self._calls.clear()
                self._changed.notify_all()

    def _next(self) -> list[tuple[int, Call]]:
        """Empty: nothing more comes."""
        with self._changed:
            if not self._calls:
                self._changed.wait_for(lambda: self._calls or self._exit_code is not None)
                if self._lag_seconds:
                    self._changed.wait_for(
                        lambda: self._awaited > self._done or self._exit_code is not None, self._lag_seconds
                    )
            return [self._calls.popleft() for _ in range(min(TOGETHER, len(self._calls)))]


def size(values: Collection[Any]) -> int:
    """How many values there are, those in dictionaries and lists too: what decides a row's memory. Who logs a row waits for this."""
    if NESTED.isdisjoint(set(map(type, values))):  # as mostly
        return len(values)
    return sum(
        size(value.values() if isinstance(value, dict) else value) if type(value) in NESTED else 1
        for value in values
    )
