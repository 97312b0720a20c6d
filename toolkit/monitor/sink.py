"""Where measurements go. One small interface; several sinks act as one, and one that breaks is told and dropped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger(__name__)

Row = Mapping[str, Any]  # plain JSON types; ``step`` is the number of completed optimizer steps

NOTICE_SECONDS = 5.0  # until a person is told why nothing happens
REASON_LENGTH = 300  # characters of what a broken sink says


class Kind(StrEnum):
    """What a row is of. Each has its file in the run's directory (``jsonl.py``) and its prefix in W&B."""

    STEP = "step"  # one training step, as all ranks together see it
    EVAL = "eval"  # one evaluation of one set
    LEDGER = "ledger"  # where one step's time went, over all ranks: ``monitor/ledger.py``
    SYSTEM = "system"  # GPUs and host of one node, one sample: ``monitor/system/sampler.py``
    ALERT = "alert"  # ``monitor/alert.py``


class Sink(Protocol):
    """Rows may come from several threads."""

    @property
    def name(self) -> str:
        """For people."""
        return type(self).__name__

    def log(self, kind: Kind, row: Row) -> None:
        """One row, which belongs to the sink from now on: it may be written later."""

    def log_summary(self, name: str, value: str | float) -> None:
        """A figure or words of the whole run: its goodput, a generated continuation."""

    def log_image(self, name: str, path: Path) -> None:
        """A picture, whole at ``path``."""

    def flush(self) -> None:
        """What was logged before is where others can read it, unless the sink is slow: then this returns in bounded time all the same."""

    def close(self, exit_code: int) -> None:
        """The run is over; ``exit_code`` as in ``toolkit.errors.ExitCode``."""


class NullSink(Sink):
    """Takes everything, keeps nothing: for ranks that write nothing, and the base of sinks that want only some of it."""

    def log(self, kind: Kind, row: Row) -> None:
        pass

    def log_summary(self, name: str, value: str | float) -> None:
        pass

    def log_image(self, name: str, path: Path) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self, exit_code: int) -> None:
        pass


class CompositeSink(Sink):
    """All of ``sinks``. Training must not end for want of a disk or a service that only watches it: a sink that raises is told
    once and left out from then on."""

    def __init__(self, sinks: Sequence[Sink], tell: Callable[[str], None] = log.warning) -> None:
        self._sinks = list(sinks)
        self._tell = tell

    def log(self, kind: Kind, row: Row) -> None:
        self._each(lambda sink: sink.log(kind, row))

    def log_summary(self, name: str, value: str | float) -> None:
        self._each(lambda sink: sink.log_summary(name, value))

    def log_image(self, name: str, path: Path) -> None:
        self._each(lambda sink: sink.log_image(name, path))

    def flush(self) -> None:
        self._each(lambda sink: sink.flush())

    def close(self, exit_code: int) -> None:
        self._each(lambda sink: self._close(sink, exit_code))

    def _close(self, sink: Sink, exit_code: int) -> None:
        notice = threading.Timer(
            NOTICE_SECONDS, self._tell, [f"{sink.name} has not finished yet, and is waited for a while"]
        )
        notice.daemon = True
        notice.start()
        try:
            sink.close(exit_code)
        finally:
            notice.cancel()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001  whatever a sink raises, training goes on without it
                if sink in self._sinks:  # another thread may have dropped it meanwhile
                    self._sinks.remove(sink)
                    words = " ".join(str(error).split())  # of a server, a page
                    self._tell(
                        f"{sink.name} failed and gets nothing more: {type(error).__name__}: {words[:REASON_LENGTH]}"
                    )


class Only(NullSink):
    """Rows that are ``wanted``, and nothing else, to ``sink``."""

    def __init__(self, sink: Sink, wanted: Callable[[Kind, Row], bool]) -> None:
        self._sink, self._wanted = sink, wanted

    @property
    def name(self) -> str:
        return self._sink.name

    def log(self, kind: Kind, row: Row) -> None:
        if self._wanted(kind, row):
            self._sink.log(kind, row)

    def flush(self) -> None:
        self._sink.flush()

    def close(self, exit_code: int) -> None:
        self._sink.close(exit_code)
