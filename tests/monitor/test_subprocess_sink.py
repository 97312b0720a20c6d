"""A sink in a process of its own: its rows arrive in order, its errors come back, and it outlives nobody for long.

pytest tests/monitor/test_subprocess_sink.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from toolkit.monitor.sink import CompositeSink, Kind, Row, Sink
from toolkit.monitor.sinks.jsonl import JsonlSink
from toolkit.monitor.sinks.queued import QueuedSink
from toolkit.monitor.sinks.subprocess_sink import NICE, ProcessEnded, SubprocessSink
from toolkit.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]


class There(JsonlSink):
    """Writes who it is; sleeps where a row says so, and raises. Leaves a temporary file."""

    def __init__(self, file: Path) -> None:
        tempfile.mkstemp()
        super().__init__({Kind.STEP: file})
        self._file = file

    def log(self, kind: Kind, row: Row) -> None:
        time.sleep(row.get("sleep", 0.0))
        if "raise" in row:
            raise ConnectionError(row["raise"])
        super().log(kind, {**row, "process": os.getpid()})

    def close(self, exit_code: int) -> None:
        super().log(Kind.STEP, {"closed": exit_code})


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files are. Whatever ends the sink's process, nothing of it is left there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def refuse(file: Path) -> Sink:
    raise PermissionError("not here")


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # which is the init process' to collect
    except psutil.NoSuchProcess:
        return True


def test_its_process_is_no_descendant_of_the_one_that_trains(tmp_path: Path) -> None:
    """DeepSpeed's launcher ends every descendant of a rank on Ctrl-C, while the rank still saves and logs."""
    sink = SubprocessSink(There, {"file": tmp_path / "rows.jsonl"}, "there")
    assert sink._process.pid not in {child.pid for child in psutil.Process().children(recursive=True)}
    sink.close(0)
    assert gone(sink._process.pid)


def test_rows_arrive_in_order_in_another_process(temporary: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    sink = SubprocessSink(There, {"file": file}, "there")
    for step in range(100):
        sink.log(Kind.STEP, {"step": step})
    pid = sink._process.pid
    until(lambda: len(list(read_rows(file))) == 100)
    assert len(list(temporary.glob("sink-*/*"))) == 1
    assert psutil.Process(pid).nice() == NICE
    sink.close(75)
    rows = list(read_rows(file))
    assert [row["step"] for row in rows[:-1]] == list(range(100))
    assert {row["process"] for row in rows[:-1]} == {pid} != {os.getpid()}
    assert rows[-1] == {"closed": 75}
    assert gone(pid)


def test_a_sink_that_raises_there_is_told_once_here(tmp_path: Path) -> None:
    told: list[str] = []
    sink = CompositeSink(
        [QueuedSink(lambda: SubprocessSink(There, {"file": tmp_path / "rows.jsonl"}, "there"), "there")],
        told.append,
    )
    sink.log(Kind.STEP, {"step": 1, "raise": "the server is gone"})
    deadline = time.monotonic() + 20
    while not told and time.monotonic() < deadline:
        sink.log(Kind.STEP, {"step": 2})
        time.sleep(0.02)
    sink.close(0)
    assert told == ["there failed and gets nothing more: ProcessEnded: ConnectionError: the server is gone"]


@pytest.mark.parametrize("died", [False, True])
def test_a_sink_that_cannot_be_made_or_is_killed_is_told_at_the_close(died: bool, tmp_path: Path) -> None:
    sink = SubprocessSink(There if died else refuse, {"file": tmp_path / "rows.jsonl"}, "there")
    if died:
        sink._process.kill()
        until(lambda: gone(sink._process.pid))
    with pytest.raises(ProcessEnded, match="its process was killed" if died else "PermissionError: not here"):
        sink.close(0)


def test_a_sink_that_does_not_finish_is_killed(tmp_path: Path) -> None:
    sink = SubprocessSink(There, {"file": tmp_path / "rows.jsonl"}, "there", close_seconds=1.0)
    sink.log(Kind.STEP, {"step": 1, "sleep": 60.0})
    began = time.monotonic()
    with pytest.raises((TimeoutError, ProcessEnded), match="did not finish within 1 s"):
        sink.close(0)
    assert time.monotonic() - began < 5.0
    assert gone(sink._process.pid)


def test_a_slow_sink_keeps_nobody_from_handing_over(tmp_path: Path) -> None:
    """Its process reads, whatever its sink does: 6 MB are far more than a pipe holds."""
    sink = SubprocessSink(There, {"file": tmp_path / "rows.jsonl"}, "there", close_seconds=1.0)
    sink.log(Kind.STEP, {"step": 0, "sleep": 60.0})
    began = time.monotonic()
    for step in range(100):
        sink.log(Kind.STEP, {"step": step, "text": "x" * 60_000})
    assert time.monotonic() - began < 10.0
    with pytest.raises((TimeoutError, ProcessEnded)):
        sink.close(0)


SERVED = """
import sys, time
from pathlib import Path
from tests.monitor.test_subprocess_sink import There
from toolkit.monitor.sinks.subprocess_sink import SubprocessSink
from toolkit.monitor.sink import Kind

sink = SubprocessSink(There, {"file": Path(sys.argv[1])}, "there", close_seconds=float(sys.argv[2]))
sink.log(Kind.STEP, {"step": 1, "sleep": float(sys.argv[3])})
print(sink._process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("sleep", "rows"), [(0.5, [1, None]), (60.0, [])])
def test_it_ends_with_the_process_that_it_serves(
    sleep: float, rows: list[int | None], tmp_path: Path
) -> None:
    """Killed, that one leaves rows behind that are still written; one that hangs is ended after its time."""
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, "-c", SERVED, str(file), "2.0", str(sleep)]
    served = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    process = psutil.Process(int(served.stdout.readline()))
    until(file.exists)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)  # these are for the training
    served.kill()
    served.wait()
    served.stdout.close()
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    found = list(read_rows(file))
    assert [row.get("step") for row in found] == rows
    if rows:
        assert found[-1] == {"closed": 1}
