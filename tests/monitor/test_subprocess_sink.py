"""A sink in a separate process: order of rows, errors, and the end of the process.

pytest tests/monitor/test_subprocess_sink.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until
from toolkit.monitor.sink import CompositeSink, Kind, Row, Sink
from toolkit.monitor.sinks.jsonl import JsonlSink
from toolkit.monitor.sinks.queued import QueuedSink
from toolkit.monitor.sinks.subprocess_sink import NICE, ProcessEnded, SubprocessSink
from toolkit.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]


class RemoteSink(JsonlSink):
    """Adds its process id; sleeps and raises on request. Leaves a temporary file behind."""

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
    """The folder of temporary files, which must be empty after the sink's process has ended."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def refuse(file: Path) -> Sink:
    raise PermissionError("not here")


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # collected by init
    except psutil.NoSuchProcess:
        return True


def test_process_is_not_a_descendant_of_the_rank(tmp_path: Path) -> None:
    """DeepSpeed's launcher ends every descendant of a rank on Ctrl-C, while the rank still saves and logs."""
    sink = SubprocessSink(RemoteSink, {"file": tmp_path / "rows.jsonl"}, "there")
    assert sink._process.pid not in {child.pid for child in psutil.Process().children(recursive=True)}
    sink.close(0)
    assert has_ended(sink._process.pid)


def test_rows_arrive_in_order_in_another_process(temporary: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    sink = SubprocessSink(RemoteSink, {"file": file}, "there")
    for step in range(100):
        sink.log(Kind.STEP, {"step": step})
    pid = sink._process.pid
    wait_until(lambda: len(list(read_rows(file))) == 100)
    assert len(list(temporary.glob("sink-*/*"))) == 1
    assert psutil.Process(pid).nice() == NICE
    sink.close(75)
    rows = list(read_rows(file))
    assert [row["step"] for row in rows[:-1]] == list(range(100))
    assert {row["process"] for row in rows[:-1]} == {pid} != {os.getpid()}
    assert rows[-1] == {"closed": 75}
    assert has_ended(pid)


def test_error_in_the_process_is_reported_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    sink = CompositeSink(
        [QueuedSink(lambda: SubprocessSink(RemoteSink, {"file": tmp_path / "rows.jsonl"}, "there"), "there")]
    )
    sink.log(Kind.STEP, {"step": 1, "raise": "the server is gone"})
    deadline = time.monotonic() + 20
    while not caplog.messages and time.monotonic() < deadline:
        sink.log(Kind.STEP, {"step": 2})
        time.sleep(0.02)
    sink.close(0)
    assert caplog.messages == [
        "there failed and receives no more rows: ProcessEnded: ConnectionError: the server is gone"
    ]


@pytest.mark.parametrize("died", [False, True])
def test_close_raises_if_the_sink_could_not_be_opened_or_was_killed(died: bool, tmp_path: Path) -> None:
    sink = SubprocessSink(RemoteSink if died else refuse, {"file": tmp_path / "rows.jsonl"}, "there")
    if died:
        sink._process.kill()
        wait_until(lambda: has_ended(sink._process.pid))
    with pytest.raises(ProcessEnded, match="its process was killed" if died else "PermissionError: not here"):
        sink.close(0)


def test_hanging_sink_is_killed_at_close(tmp_path: Path) -> None:
    sink = SubprocessSink(RemoteSink, {"file": tmp_path / "rows.jsonl"}, "there", close_seconds=1.0)
    sink.log(Kind.STEP, {"step": 1, "sleep": 60.0})
    began = time.monotonic()
    with pytest.raises((TimeoutError, ProcessEnded), match="did not finish within 1 s"):
        sink.close(0)
    assert time.monotonic() - began < 5.0
    assert has_ended(sink._process.pid)


def test_logging_does_not_wait_for_a_hanging_sink(tmp_path: Path) -> None:
    """The process reads independently of its sink: 6 MB are far more than the capacity of a pipe."""
    sink = SubprocessSink(RemoteSink, {"file": tmp_path / "rows.jsonl"}, "there", close_seconds=1.0)
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
from tests.monitor.test_subprocess_sink import RemoteSink
from toolkit.monitor.sinks.subprocess_sink import SubprocessSink
from toolkit.monitor.sink import Kind

sink = SubprocessSink(RemoteSink, {"file": Path(sys.argv[1])}, "there", close_seconds=float(sys.argv[2]))
sink.log(Kind.STEP, {"step": 1, "sleep": float(sys.argv[3])})
print(sink._process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sleep", "rows"), [(0.5, [1, None]), pytest.param(60.0, [], marks=pytest.mark.full)]
)
def test_process_ends_with_the_training_process(sleep: float, rows: list[int | None], tmp_path: Path) -> None:
    """After a kill, pending rows are still written; a hanging sink is ended after its time limit."""
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, "-c", SERVED, str(file), "2.0", str(sleep)]
    served = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    process = psutil.Process(int(served.stdout.readline()))
    wait_until(file.exists)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)  # intended for the training process
    served.kill()
    served.wait()
    served.stdout.close()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    found = list(read_rows(file))
    assert [row.get("step") for row in found] == rows
    if rows:
        assert found[-1] == {"closed": 1}
