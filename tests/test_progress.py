"""The progress display: its arithmetic under a fake clock, plain lines, bars, silence.

pytest tests/test_progress.py
"""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from toolkit.progress import Progress, duration, quantity


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_throughput_forgets_a_slow_start(clock: FakeClock) -> None:
    out = io.StringIO()
    with (
        Progress(out, line_seconds=1.0, clock=clock) as progress,
        progress.task("training", unit="steps") as task,
    ):
        clock.now += 60
        task.advance(1)  # the first step compiles for a minute
        for _ in range(40):
            clock.now += 1
            task.advance(5)
    lines = out.getvalue().splitlines()
    assert lines[0] == "training: 1 steps  0.0167 steps/s"
    assert lines[40] == "training: 201 steps  5 steps/s"


def test_lines_are_printed_at_a_bounded_rate(clock: FakeClock) -> None:
    out = io.StringIO()
    with (
        Progress(out, line_seconds=5.0, clock=clock) as progress,
        progress.task("reading", total=1000, unit="files") as task,
    ):
        for _ in range(1000):
            clock.now += 0.011  # 11 seconds
            task.advance(note="last.py")
    lines = out.getvalue().splitlines()
    assert len(lines) == 3, lines  # after 5 and 10 seconds, and the end
    assert lines[0].startswith("reading: 455 files/1000 files  90.9 files/s  eta 0:06  last.py")
    assert lines[-1] == "reading: 1000 files in 0:11 (90.9 files/s)  last.py"


@pytest.mark.parametrize(
    ("done", "last"),
    [
        (0, "training: 100 steps in 0:10 (10 steps/s)"),
        (100, "training: 100 steps in 0:10 (10 steps/s), 200 steps in all"),
    ],
)
def test_summary_counts_the_work_of_this_process(done: int, last: str, clock: FakeClock) -> None:
    out = io.StringIO()
    with (
        Progress(out, line_seconds=60.0, clock=clock) as progress,
        progress.task("training", unit="steps", done=done) as task,
    ):
        clock.now += 10
        task.advance(100)
    assert out.getvalue().splitlines()[-1] == last


def test_initial_work_is_not_throughput(clock: FakeClock) -> None:
    out = io.StringIO()
    with (
        Progress(out, line_seconds=1.0, clock=clock) as progress,
        progress.task("training", total=110, unit="steps", done=100) as task,
    ):
        clock.now += 2.0
        task.advance(4)
    assert out.getvalue().splitlines()[0] == "training: 104 steps/110 steps  2 steps/s  eta 0:03"


def test_silent_display_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress.silent() as progress, progress.task("reading", total=3) as task:
        task.advance(3)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_bars_show_measures_and_release_the_terminal() -> None:
    out = io.StringIO()
    progress = Progress(out, terminal=True)
    first, second = (
        progress.task("saving [1/2]", total=2e6, unit="B"),
        progress.task("training", unit="tokens"),
    )
    first.advance(1e6)
    second.advance(2.5e6, note="loss 3.21")
    progress.close()
    assert progress._rich is None
    text = out.getvalue()
    assert "saving [1/2]" in text
    assert "1 MB in" in text
    assert "2.5M tokens in" in text
    assert "loss 3.21" in text
    again = progress.task("exporting", total=1)  # the display starts again
    again.advance()
    again.finish()
    again.finish()
    assert "exporting" in out.getvalue()


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (734, "files", "734 files"),
        (3_480_828, "tokens", "3.48M tokens"),
        (12_118_641, "B", "12.1 MB"),
        (0, "B", "0 B"),
        (0.25, "steps", "0.25 steps"),
        (1234.5, "steps", "1234 steps"),
        (123_456, "B", "123 kB"),
        (5e9, "tokens", "5G tokens"),
    ],
)
def test_quantity(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.2, "0:08"), (750, "12:30"), (11100, "3:05:00"), (183_900, "2d 3:05:00")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_import_does_not_load_rich_or_torch() -> None:
    code = "import sys, toolkit.progress; print([m for m in ('torch', 'rich', 'numpy') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
        == "[]"
    )
