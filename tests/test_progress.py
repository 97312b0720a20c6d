"""One progress display: its arithmetic under a fake clock, plain lines, bars, silence.

pytest tests/test_progress.py
"""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from toolkit.progress import Progress, ThroughputWindow, duration, quantity


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_pace_forgets_a_slow_start() -> None:
    pace = ThroughputWindow(0.0, 0.0, window_seconds=10.0)
    assert pace.per_second() is None
    pace.record(60.0, 1.0)  # the first step compiles for a minute
    assert pace.per_second() == pytest.approx(1 / 60)
    for second in range(1, 21):
        pace.record(60.0 + second, 1.0 + 5 * second)
    assert pace.per_second() == pytest.approx(5.0)


def test_pace_keeps_bounded_memory() -> None:
    pace = ThroughputWindow(0.0, 0.0, window_seconds=10.0)
    for call in range(100_000):
        pace.record(call * 1e-3, float(call))
    assert len(pace._marks) < 60
    assert pace.per_second() == pytest.approx(1000.0)


def test_lines_come_at_a_bounded_rate(clock: FakeClock) -> None:
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
def test_the_last_line_counts_what_this_start_did(done: int, last: str, clock: FakeClock) -> None:
    out = io.StringIO()
    with (
        Progress(out, line_seconds=60.0, clock=clock) as progress,
        progress.task("training", unit="steps", done=done) as task,
    ):
        clock.now += 10
        task.advance(100)
    assert out.getvalue().splitlines()[-1] == last


def test_work_done_before_is_no_throughput(clock: FakeClock) -> None:
    out = io.StringIO()
    with (
        Progress(out, line_seconds=1.0, clock=clock) as progress,
        progress.task("training", total=110, unit="steps", done=100) as task,
    ):
        clock.now += 2.0
        task.advance(4)
    assert out.getvalue().splitlines()[0] == "training: 104 steps/110 steps  2 steps/s  eta 0:03"


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress.silent() as progress, progress.task("reading", total=3) as task:
        task.advance(3)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_bars_show_the_same_measures_and_let_go_of_the_terminal() -> None:
    out = io.StringIO()
    progress = Progress(out, terminal=True)
    first, second = (
        progress.task("saving [1/2]", total=2e6, unit="B"),
        progress.task("training", unit="tokens"),
    )
    first.advance(1e6)
    second.advance(2.5e6, note="loss 3.21")
    progress.close()
    assert progress._display._bars is None  # type: ignore[attr-defined]
    text = out.getvalue()
    assert "saving [1/2]" in text
    assert "1 MB in" in text
    assert "2.5M tokens in" in text
    assert "loss 3.21" in text
    again = progress.task("exporting", total=1)  # the display starts anew
    again.advance()
    again.finish()
    again.finish()
    assert "exporting" in out.getvalue()


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(734, "files", "734 files"), (3_480_828, "tokens", "3.48M tokens"), (12_118_641, "B", "12.1 MB"), (0, "B", "0 B"),
     (0.25, "steps", "0.25 steps"), (1234.5, "steps", "1234 steps"), (123_456, "B", "123 kB"), (5e9, "tokens", "5G tokens")],
)  # fmt: skip
def test_quantity(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.2, "0:08"), (750, "12:30"), (11100, "3:05:00"), (183_900, "2d 3:05:00")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_import_is_light() -> None:
    code = "import sys, toolkit.progress; print([m for m in ('torch', 'rich', 'numpy') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        ).stdout.strip()
        == "[]"
    )
