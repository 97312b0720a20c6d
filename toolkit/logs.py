"""Logging for processes of a run: every module logs with ``logging.getLogger(__name__)``.

    configure_logging(rank)

Messages of level INFO are results for the user. Only rank 0 shows them, as plain lines on stdout, where the
rows of training appear too. Warnings and errors of every rank go to stderr with their level in front. Until
``configure_logging`` is called, the library shows warnings only, as Python's ``logging`` does by default.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

ROOT = "toolkit"


class _CurrentStream(logging.Handler):
    """Write to what ``sys.stdout`` or ``sys.stderr`` is when the message is logged.

    A launcher's pipe, the attempt's log (``cluster/attempt/output_log.py``) and a live progress bar all
    replace these streams while the process runs.
    """

    def __init__(self, stream: str) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the reader has gone, or the disk is full: no reason to end the run
            print(self.format(record), file=getattr(sys, self._stream), flush=True)


class _Level(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record)}"


def configure_logging(rank: int = 0) -> None:
    """Print this process's log messages. A second call replaces the handlers of the first.

    Args:
        rank: the global rank. Ranks other than 0 show warnings and errors only.
    """
    results = _CurrentStream("stdout")
    results.addFilter(lambda record: record.levelno < logging.WARNING)
    warnings = _CurrentStream("stderr")
    warnings.setLevel(logging.WARNING)
    warnings.setFormatter(_Level())
    log = logging.getLogger(ROOT)
    log.propagate = False  # a library that configures the root logger must not print our messages twice
    log.handlers = [results, warnings]
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
