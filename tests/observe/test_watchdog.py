"""The watchdogs of several ranks, run in this process without ending it.

pytest tests/observe/test_watchdog.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.train.fakes import completed_step, context_of
from tests.waiting import wait_until
from toolkit.errors import ConfigError, ExitCode, Problem
from toolkit.monitor.alert import Alert
from toolkit.monitor.collective_calls import CollectiveCall
from toolkit.monitor.hangs.stacks import ProcessId, read_process_state, this_process
from toolkit.monitor.sink import Sink
from toolkit.observe import hang_reporter, watchdog
from toolkit.observe.hang_reporter import HangReporter, HangSources
from toolkit.observe.rank_messages import RankMessages
from toolkit.observe.watchdog import HangMonitor, Watchdog, watch_for_hangs
from toolkit.progress import report_progress
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status
from toolkit.testing.tiny import tiny_plan

LIMIT = 0.3


def call(
    number: int, tensors: str = "[1024] float32", *, finished: bool = True, begins_in: float = 100
) -> CollectiveCall:
    return CollectiveCall(
        group="0",
        ranks=(0, 1, 2),
        axis="data",
        number=number,
        operation="all_reduce",
        tensors=tensors,
        begun=time.monotonic() + begins_in,
        finished=finished,
    )


class Ranks:
    """Watchdogs of some ranks of a run. ``ended`` has the exit codes of ranks that would have ended."""

    def __init__(
        self, folder: Path, processes: list[ProcessId], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.directory = RunDirectory(folder)
        self.directory.path.mkdir(exist_ok=True)
        self.directory.write_status(Status(state=RunState.RUNNING, attempt=1, step=16, checkpoint="step-14"))
        self.ended: dict[int, int] = {}
        self.alerts: list[Alert] = []
        self._processes, self._clock = processes, clock
        self.watchdogs: dict[int, Watchdog] = {}

    def watch(
        self,
        rank: int,
        *calls: CollectiveCall,
        limit: float = LIMIT,
        nccl_trace: Callable[[], str] | None = None,
    ) -> Watchdog:
        sources = HangSources(
            processes=self._processes,
            part=lambda: "backward",
            calls=lambda: list(calls),
            nccl_trace=nccl_trace,
        )
        reporter = HangReporter(
            context_of(tiny_plan(), self.directory.path, rank),
            sources,
            RankMessages(self.directory.hang_folder(1), None),
            alert=self.alerts.append,
            sink=Sink(),
        )
        self.watchdogs[rank] = watchdog = Watchdog(
            limit,
            reporter,
            stacks_fd=self._processes[rank].stacks_fd,
            exit_process=lambda code: self.ended.setdefault(rank, code),
            clock=self._clock,
        )
        watchdog.start()
        return watchdog

    def until_ended(self, count: int, seconds: float = 10.0) -> float:
        return wait_until(
            lambda: len(self.ended) >= count, seconds, f"{count} ended", output=lambda: f"ended: {self.ended}"
        )


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "START_SECONDS", 0.0)
    monkeypatch.setattr(hang_reporter, "COLLECT_SECONDS", 0.5)
    monkeypatch.setattr(hang_reporter, "VERDICT_SECONDS", 0.5)
    monkeypatch.setattr(hang_reporter, "FAILURE_SECONDS", 0.4)
    monkeypatch.setattr(hang_reporter, "POLL_ONE_NODE", 0.02)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.1)


@pytest.fixture
def own() -> Iterator[ProcessId]:
    stacks_fd = os.memfd_create("stacks")
    yield this_process("here", stacks_fd, 0)
    os.close(stacks_fd)


@pytest.fixture
def ranks(tmp_path: Path, own: ProcessId) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path / "run", [own] * 3)
    yield ranks
    for one in ranks.watchdogs.values():
        one.stop()


def test_hang_is_reported_with_its_cause_and_ends_all_ranks(
    ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        ranks.watch(rank, call(16), call(17, finished=False))
    ranks.watch(2, call(16))
    assert ranks.until_ended(3) < LIMIT + 3
    assert set(ranks.ended.values()) == {ExitCode.FAILURE}
    file = ranks.directory.hang_file(1)
    text = file.read_text()
    assert (
        "rank 2 has made 16 calls on axis data, ranks 0-1 wait in the 17th: all_reduce [1024] float32" in text
    )
    assert "ranks 0-2, thread MainThread" in text, "all ranks are this process"
    assert "in part backward of the step" in text
    end = ranks.directory.status()
    assert end is not None
    assert (end.state, end.exit_code, end.step, end.checkpoint) == (RunState.FAILED, 1, 16, "step-14")
    assert end.reason is not None
    assert end.reason.startswith("hang: rank 2 ")
    assert str(file) in end.reason
    (alert,) = ranks.alerts
    assert (alert.name, alert.where) == ("hang", "rank 2")
    assert str(file) in alert.evidence
    assert "the run hangs after the start" in capfd.readouterr().err


def test_rank_1_reports_if_rank_0_is_stopped(tmp_path: Path, own: ProcessId) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        stopped = ProcessId("here", child.pid, started, 0, 0, own.pid_namespace)
        child.send_signal(signal.SIGSTOP)
        while read_process_state(stopped) != "T":
            time.sleep(0.01)
        ranks = Ranks(tmp_path / "run", [stopped, own, own])
        for rank in (1, 2):
            ranks.watch(rank, call(17, finished=False))
        assert ranks.until_ended(2) < LIMIT + 5
        (row,) = [json.loads(line) for line in ranks.directory.alerts_file.read_text().splitlines()]
        assert (row["name"], row["level"], row["cause"], row["where"]) == (
            "hang",
            "error",
            "rank 0 is stopped by a signal",
            "rank 0",
        )
        assert f"process {child.pid} on here" in row["evidence"]
        end = ranks.directory.status()
        assert end is not None
        assert end.state is RunState.FAILED
        assert ranks.alerts == [], "alerts go through rank 0's sinks"
        assert child.wait(5) == -signal.SIGKILL, "it is killed"
    finally:
        child.kill()
        child.wait()


def test_progress_of_any_kind_prevents_a_hang(ranks: Ranks, tmp_path: Path) -> None:
    """Progress every two thirds of the limit, for three limits."""
    for rank in range(3):
        ranks.watch(rank, call(17, finished=False))
    began = time.monotonic()
    while time.monotonic() - began < 3 * LIMIT:
        time.sleep(LIMIT * 2 / 3)
        for one in ranks.watchdogs.values():
            one.beat("a batch")
    for one in ranks.watchdogs.values():
        one.stop()
    assert ranks.ended == {}
    assert not ranks.directory.attempt_folder(1).exists()


def test_first_step_has_a_longer_limit(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "START_SECONDS", 60.0)
    watch = ranks.watch(0)
    time.sleep(2 * LIMIT)
    assert ranks.ended == {}
    watch.on_step(completed_step(17))
    assert ranks.until_ended(1) < LIMIT + 3
    assert "after step 17 (" in ranks.directory.hang_file(1).read_text()


def test_stopped_watchdog_expects_no_progress(ranks: Ranks) -> None:
    ranks.watch(0).stop()
    time.sleep(2 * LIMIT)
    assert ranks.ended == {}


def test_paused_process_is_not_a_hang(tmp_path: Path, own: ProcessId) -> None:
    """After the clock leaps, the process has its full limit again."""
    leap = [0.0]
    ranks = Ranks(tmp_path / "run", [own], lambda: time.monotonic() + leap[0])
    watch = ranks.watch(0)
    time.sleep(LIMIT / 2)
    leap[0] = 1000.0
    time.sleep(LIMIT / 3)
    assert ranks.ended == {}
    ranks.until_ended(1)
    watch.stop()


def test_failure_in_a_call_names_the_mismatch(ranks: Ranks) -> None:
    """Rank 0 waits in a call that failed on rank 1."""
    ranks.watch(0, call(17, finished=False), limit=60)
    failing = ranks.watch(1, call(17, "[512] float32", finished=False), limit=60)
    error = RuntimeError("op.preamble.length <= op.nbytes. 4096 vs 2048")
    failing.failed(error)
    assert error.__notes__ == [
        "the ranks make calls with different shapes as number 17 on axis data (rank 0: all_reduce [1024] "
        "float32; rank 1: all_reduce [512] float32)"
    ]
    assert ranks.ended == {}
    report = json.loads((ranks.directory.hang_folder(1) / "failure-1.json").read_text())
    assert "op.preamble.length" in report["failure"]


def test_failure_in_a_call_right_after_a_step_names_the_mismatch(ranks: Ranks) -> None:
    """The time that it takes to format the error does not count."""

    class SlowError(RuntimeError):
        def __str__(self) -> str:
            time.sleep(0.2)
            return "connection reset"

    failing = ranks.watch(0, call(17, finished=False, begins_in=0.1), limit=60)
    for rank in (1, 2):
        ranks.watch(rank, call(17, "[512] float32", finished=False), limit=60)
    error = SlowError()
    failing.failed(error)
    assert "rank 0: all_reduce [1024] float32; ranks 1-2: all_reduce [512] float32" in error.__notes__[0]


def test_other_failures_do_not_wait_for_reports(ranks: Ranks) -> None:
    failing = ranks.watch(1, call(17), limit=60)
    error = RuntimeError("out of memory")
    began = time.monotonic()
    failing.failed(error)
    mistake = ConfigError(Problem("a", "a=1", "a is 2", "write a=2"))
    ranks.watch(2, call(17, finished=False), limit=60).failed(mistake)
    assert time.monotonic() - began < 3  # the limit is 60
    assert not hasattr(error, "__notes__")
    assert not hasattr(mistake, "__notes__")


def test_failed_rank_is_the_cause_of_the_others_hang(ranks: Ranks) -> None:
    failing = ranks.watch(1, call(16), limit=60)
    failing.failed(RuntimeError("out of memory"))
    for rank in (0, 2):
        ranks.watch(rank, call(17, finished=False))
    ranks.until_ended(2)
    assert "rank 1 failed: RuntimeError: out of memory" in ranks.directory.hang_file(1).read_text()


def test_unwritable_report_does_not_prevent_the_end(ranks: Ranks) -> None:
    ranks.directory.attempt_folder(1).parent.write_text("a file where a folder should be")
    ranks.watch(0, call(17))
    ranks.until_ended(1)
    assert [alert.name for alert in ranks.alerts] == ["hang"]


def test_nccl_recording_replaces_the_calls_of_the_process(ranks: Ranks) -> None:
    """NCCL's calls return when they are queued, so only its recording shows an unfinished one."""
    trace = json.dumps(
        {
            "entries": [
                {
                    "process_group": ["0", ""],
                    "is_p2p": False,
                    "collective_seq_id": 17,
                    "p2p_seq_id": 0,
                    "profiling_name": "nccl:all_reduce",
                    "input_sizes": [[1024]],
                    "input_dtypes": ["Float"],
                    "time_created_ns": time.time_ns() + 10**9,
                    "retired": False,
                    "state": "started",
                }
            ]
        }
    )
    ranks.watch(0, call(17), nccl_trace=lambda: trace)
    for rank in (1, 2):
        ranks.watch(rank, call(16))
    ranks.until_ended(3)
    assert "rank 0: waits in call 17" in ranks.directory.hang_file(1).read_text()
    assert (ranks.directory.hang_folder(1) / "rank-0.nccl.json").read_text() == trace


def test_parts_of_a_long_start_count_as_progress(tmp_path: Path) -> None:
    """Drawing or reading the state may take longer than the limit, as long as its parts do not."""
    context = context_of(tiny_plan(monitor__hang_seconds=60), tmp_path / "run")
    context.directory.path.mkdir()
    with watch_for_hangs(context, Sink(), lambda alert: None, None) as monitor:
        assert isinstance(monitor, Watchdog)
        before = monitor._heartbeat()
        time.sleep(0.05)
        report_progress("initializing model.embed_tokens")
        after = monitor._heartbeat()
        assert before.what != after.what
        assert after.what == "initializing model.embed_tokens"
    report_progress("a later part")
    assert monitor._heartbeat().what == "initializing model.embed_tokens", "the control: after the run"
    assert isinstance(monitor, HangMonitor)
