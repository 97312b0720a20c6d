"""Logging for processes of a run: every module logs with ``logging.getLogger(__name__)``.

    configure_logging(rank)

Messages of level INFO are results for the user. Only rank 0 shows them, as plain lines on stdout, where the rows of
training appear too. Warnings and errors of every rank go to stderr with their level in front. Until
``configure_logging`` is called, the library shows warnings only, as Python's ``logging`` does by default.
"""

from __future__ import annotations

import logging
import sys

ROOT = "toolkit"


class _CurrentStream(logging.Handler):
    """Write to what ``sys.stdout`` or ``sys.stderr`` is when the message is logged.

    A launcher's pipe, the copy of the output in the attempt's log (``cluster/output_log.py``) and a live progress bar all
    replace these streams while the process runs.
    """

    def __init__(self, stream: str) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=getattr(sys, self._stream), flush=True)


class _Level(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record)}"


def configure_logging(rank: int = 0) -> None:
    """Show this process's messages; calling it again replaces the handlers of the call before.

    Args:
        rank: the global rank. Ranks other than 0 show warnings and errors only.
    """
    results = _CurrentStream("stdout")
    results.addFilter(lambda record: record.levelno < logging.WARNING)
    troubles = _CurrentStream("stderr")
    troubles.setLevel(logging.WARNING)
    troubles.setFormatter(_Level())
    log = logging.getLogger(ROOT)
    log.handlers = [results, troubles]
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
