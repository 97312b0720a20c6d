"""Output is copied to the log, except for what a terminal overwrites."""

from __future__ import annotations

import io
from pathlib import Path
from threading import Thread

import pytest

from toolkit.cluster.attempt.output_log import Tee, tee_output
from toolkit.progress import Progress


def test_log_omits_overwritten_text() -> None:
    stream, log = io.StringIO(), io.StringIO()
    tee = Tee(stream, log)
    for text in ("step 1\n", "\x1b[1A\x1b[2K 10% ", "\r20%", "\x1b[32mdone\x1b[0m\n"):
        tee.write(text)
        tee.flush()
    assert stream.getvalue() == "step 1\n\x1b[1A\x1b[2K 10% \r20%\x1b[32mdone\x1b[0m\n"
    assert log.getvalue() == "step 1\ndone\n"
    assert tee.isatty() is False


class Calls(io.StringIO):
    """Records each write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def write(self, text: str) -> int:
        self.calls.append(text)
        return len(text)


def test_line_is_written_in_one_call() -> None:
    """Otherwise output of another thread or rank could end up between a text and its newline."""
    stream = Calls()
    tee = Tee(stream, io.StringIO())
    print("a line", 1, file=tee)
    print("a part", end="", file=tee)
    Thread(target=lambda: print("of another thread", file=tee)).start()
    print(" of a line", file=tee, flush=True)
    assert sorted(stream.calls) == ["a line 1\n", "a part of a line\n", "of another thread\n"]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_live_display_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    screen, log = Screen(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", Tee(screen, log))
    monkeypatch.setattr(sys, "stderr", Tee(screen, log))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with Progress() as progress, progress.task("training", total=10, unit="steps") as task:
        for step in range(10):
            task.advance()
            print(f"a row of step {step}")
    print("afterwards")
    rows = [f"a row of step {step}" for step in range(10)]
    assert log.getvalue().splitlines() == [*rows, "afterwards"]
    shown = screen.getvalue()
    assert all(row in shown for row in rows)
    assert "training" in shown
    assert "━" in shown.splitlines()[-2], "the last state of the bar stays"


def test_stdout_and_stderr_are_appended_to_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    file = tmp_path / "log.txt"
    file.write_text("before\n")
    tee_output(file)
    print("out")
    print("err", file=sys.stderr)
    assert file.read_text() == "before\nout\nerr\n"
    assert capsys.readouterr() == ("out\n", "err\n")


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


def test_output_goes_to_the_log_although_its_reader_has_gone() -> None:
    log = io.StringIO()
    print("a line", file=Tee(ClosedPipe(), log), flush=True)
    assert log.getvalue() == "a line\n"


def test_output_is_shown_although_the_disk_of_the_log_is_full() -> None:
    stream = io.StringIO()
    tee = Tee(stream, Path("/dev/full").open("w", buffering=1))  # noqa: SIM115  the Tee closes it
    print("a line", file=tee, flush=True)
    tee.close_log()
    assert stream.getvalue() == "a line\n"
