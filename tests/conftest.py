"""Fixtures of every test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from toolkit.logs import ROOT


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Undo ``configure_logging``, which a command under test may have called."""
    logger = logging.getLogger(ROOT)
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    logger.setLevel(logging.INFO)  # so that caplog sees what a run prints
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)
