"""Collect the log messages of a process that pytest's ``caplog`` does not see."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.logs import ROOT


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: dict[str, list[str]] = {"INFO": [], "WARNING": []}

    def emit(self, record: logging.LogRecord) -> None:
        self.messages[record.levelname].append(record.getMessage())


@contextmanager
def captured_logs() -> Iterator[tuple[list[str], list[str]]]:
    """Yield lists of the INFO and WARNING messages that are logged meanwhile, in a spawned rank too."""
    logger, collector = logging.getLogger(ROOT), _Collector()
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    try:
        yield collector.messages["INFO"], collector.messages["WARNING"]
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
