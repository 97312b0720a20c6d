"""Fixtures of every test."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from toolkit.logs import ROOT
from toolkit.plan.devices import HIDE_GPUS


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that expect CPU ranks, and from the processes that they start."""
    if config.option.markexpr != "gpu":
        os.environ.update(HIDE_GPUS)


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Undo ``configure_logging``, which a command under test may have called."""
    logger = logging.getLogger(ROOT)
    handlers, level, propagate = logger.handlers, logger.level, logger.propagate
    logger.setLevel(logging.INFO)  # so that caplog sees what a run prints
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)
