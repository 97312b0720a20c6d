"""The interface of sinks, which receive all measurements, and sinks that combine or filter others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

Row = Mapping[str, Any]  # plain JSON types; ``step`` is the number of completed optimizer steps

NOTICE_SECONDS = 5.0  # after which a slow close is reported
REASON_LENGTH = 300  # characters of a sink's error message


class Kind(StrEnum):
    """Kinds of rows. Each has a file in the run's directory (``sinks/jsonl.py``) and a prefix in W&B."""

    STEP = "step"  # one training step, over all ranks
    EVAL = "eval"  # one evaluation of one set
    LEDGER = "ledger"  # where one step's time went, over all ranks: ``monitor/ledger_rows.py``
    SYSTEM = "system"  # one sample of the GPUs and host of a node: ``monitor/system/sampler.py``
    ALERT = "alert"  # ``monitor/alert.py``
    HOOK = "hook"  # what a user's hook measured: ``step``, ``hook`` and numbers


@dataclass(frozen=True, slots=True)
class SinkRun:
    """The run whose rows a sink of the configuration receives.

    Attributes:
        folder: the run's directory. Its name is the name of the run.
        first_step: steps completed before this start. A resumed run may log steps that an earlier start has
            logged: those after ``first_step``. So may a run that goes back to a checkpoint.
        config: the configuration in JSON types.
    """

    folder: Path
    first_step: int
    config: Mapping[str, Any]


class Sink:
    """Base class of destinations of rows; every method does nothing by default.

    Methods may be called from several threads, except those of a sink of the configuration
    (``+monitor.sinks.NAME.target``): rank 0 builds it in a thread of its own that makes all calls, so that
    training never waits for it. If it raises, that is logged and it receives no more rows.
    """

    @property
    def name(self) -> str:
        """The name used in messages."""
        return type(self).__name__

    def open(self, run: SinkRun) -> None:
        """Receive the run, before the first row. Only for sinks of the configuration."""

    def log(self, kind: Kind, row: Row) -> None:
        """Log one row. The caller must not change it afterwards, because it may be written later."""

    def log_summary(self, name: str, value: str | float) -> None:
        """Log a figure or text about the whole run, such as its goodput or a generated continuation."""

    def log_image(self, name: str, path: Path) -> None:
        """Log a complete image file."""

    def flush(self) -> None:
        """Make earlier rows visible to readers. Returns in bounded time even if the sink is slow."""

    def close(self, exit_code: int) -> None:
        """End the run with an exit code of ``toolkit.errors.ExitCode``."""


class CompositeSink(Sink):
    """Forwards everything to several sinks.

    A sink that raises is reported once and dropped, because monitoring must never end a training run.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def log(self, kind: Kind, row: Row) -> None:
        self._for_each(lambda sink: sink.log(kind, row))

    def log_summary(self, name: str, value: str | float) -> None:
        self._for_each(lambda sink: sink.log_summary(name, value))

    def log_image(self, name: str, path: Path) -> None:
        self._for_each(lambda sink: sink.log_image(name, path))

    def flush(self) -> None:
        self._for_each(lambda sink: sink.flush())

    def close(self, exit_code: int) -> None:
        self._for_each(lambda sink: self._close(sink, exit_code))

    def _close(self, sink: Sink, exit_code: int) -> None:
        notice = threading.Timer(NOTICE_SECONDS, log.warning, [f"waiting for {sink.name} to finish"])
        notice.daemon = True
        notice.start()
        try:
            sink.close(exit_code)
        finally:
            notice.cancel()

    def _for_each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001  training continues without the sink
                if sink in self._sinks:  # another thread may have dropped it meanwhile
                    self._sinks.remove(sink)
                    reason = " ".join(str(error).split())[:REASON_LENGTH]  # a server may send a whole page
                    log.warning(
                        f"{sink.name} failed and receives no more rows: {type(error).__name__}: {reason}"
                    )


class FilteredSink(Sink):
    """Forwards the rows for which ``wanted`` is true, and nothing else."""

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
