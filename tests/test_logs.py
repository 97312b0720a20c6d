"""pytest tests/test_logs.py"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from toolkit.logs import ROOT, configure_logging

log = logging.getLogger(f"{ROOT}.tests")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger = logging.getLogger(ROOT)
    handlers, level = logger.handlers, logger.level
    yield
    logger.handlers = handlers
    logger.setLevel(level)


def test_rank_zero_prints_results_on_stdout_and_warnings_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(0)
    log.info("resuming at step %d", 40)
    log.warning("the disk is slow")
    shown = capsys.readouterr()
    assert shown.out == "resuming at step 40\n"
    assert shown.err == "warning: the disk is slow\n"


def test_other_ranks_print_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(3)
    log.info("resuming at step 40")
    log.error("no connection")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: no connection\n"


def test_configuring_twice_prints_each_message_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(1)
    configure_logging(0)
    log.info("once")
    assert capsys.readouterr().out == "once\n"


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_message_that_cannot_be_written_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging(0)
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    log.info("the terminal has gone")
