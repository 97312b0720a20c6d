"""Limit how many rows per second a sink receives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from toolkit.monitor.sink import Kind, Row, Sink
from toolkit.monitor.sinks.queued import count_values

log = logging.getLogger(__name__)

VALUES_PER_SECOND = 200.0
BURST = 5000.0  # values; at least the first hundred steps pass unlimited
LIMITED = (Kind.STEP, Kind.LEDGER, Kind.SYSTEM)  # frequent kinds, of which neighbouring rows are alike


class RateLimitedSink(Sink):
    """Forwards at most ``VALUES_PER_SECOND`` of each kind of ``LIMITED`` in the long run. Further rows are
    dropped, which is logged once.

    W&B's processes need 10 us per value and may share processors with training: at this rate, 0.2% of a
    processor per kind.
    """

    def __init__(self, sink: Sink, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._clock = sink, clock
        self._lock = threading.Lock()
        # values; may become negative, which delays the next rows
        self._budget = dict.fromkeys(LIMITED, BURST)
        self._updated = dict.fromkeys(LIMITED, clock())
        self._warned = False

    @property
    def name(self) -> str:
        return self._sink.name

    def log(self, kind: Kind, row: Row) -> None:
        if kind not in LIMITED or self._admit(kind, row):
            self._sink.log(kind, row)
        elif not self._warned:
            self._warned = True
            rate = f"there are more than {VALUES_PER_SECOND:g} values a second"
            log.warning(f"{self.name} receives only some of the rows, the files have all: {rate}")

    def log_summary(self, name: str, value: str | float) -> None:
        self._sink.log_summary(name, value)

    def log_image(self, name: str, path: Path) -> None:
        self._sink.log_image(name, path)

    def flush(self) -> None:
        self._sink.flush()

    def close(self, exit_code: int) -> None:
        self._sink.close(exit_code)

    def _admit(self, kind: Kind, row: Row) -> bool:
        with self._lock:
            now = self._clock()
            self._budget[kind] = min(
                BURST, self._budget[kind] + (now - self._updated[kind]) * VALUES_PER_SECOND
            )
            self._updated[kind] = now
            if self._budget[kind] <= 0:
                return False
            self._budget[kind] -= count_values(row.values())
            return True
