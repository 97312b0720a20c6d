"""How much a sink gets of a run that has more to tell than it can take without cost."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from toolkit.monitor.sink import Kind, Row, Sink
from toolkit.monitor.sinks.queued import size

log = logging.getLogger(__name__)

VALUES_PER_SECOND = 200.0
BURST = 5000.0  # values: the first hundred steps and more of any run go through whole
RATIONED = (Kind.STEP, Kind.LEDGER, Kind.SYSTEM)  # come all the time, and the next is much like this one


class RateLimitedSink(Sink):
    """Passes rows on to ``sink``, of each kind of ``RATIONED`` at most ``VALUES_PER_SECOND`` in the long run; rows beyond are left out,
    which is told once.

    W&B's processes work 10 us for each value, and share processors with the training where those are few: at this rate, 0.2% of one for
    each kind.
    """

    def __init__(
        self,
        sink: Sink,
        tell: Callable[[str], None] = log.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink, self._tell, self._clock = sink, tell, clock
        self._lock = threading.Lock()
        self._left = dict.fromkeys(
            RATIONED, BURST
        )  # values; a row may take more than there is, and then the next ones wait longer
        self._at = dict.fromkeys(RATIONED, clock())
        self._told = False

    @property
    def name(self) -> str:
        return self._sink.name

    def log(self, kind: Kind, row: Row) -> None:
        if kind not in RATIONED or self._admits(kind, row):
            self._sink.log(kind, row)
        elif not self._told:
            self._told = True
            rate = f"there are more than {VALUES_PER_SECOND:g} values a second"
            self._tell(f"{self.name} gets some of the rows only, the files have all: {rate}")

    def log_summary(self, name: str, value: str | float) -> None:
        self._sink.log_summary(name, value)

    def log_image(self, name: str, path: Path) -> None:
        self._sink.log_image(name, path)

    def flush(self) -> None:
        self._sink.flush()

    def close(self, exit_code: int) -> None:
        self._sink.close(exit_code)

    def _admits(self, kind: Kind, row: Row) -> bool:
        with self._lock:
            now = self._clock()
            self._left[kind] = min(BURST, self._left[kind] + (now - self._at[kind]) * VALUES_PER_SECOND)
            self._at[kind] = now
            if self._left[kind] <= 0:
                return False
            self._left[kind] -= size(row.values())
            return True
