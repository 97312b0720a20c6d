"""Watching a run for progress: several ranks' watches in this process, which end nobody.

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

from tests.train.fakes import step_done
from toolkit.errors import ConfigError, ExitCode, Problem
from toolkit.monitor.alert import Alert
from toolkit.monitor.collective_calls import CollectiveCall
from toolkit.monitor.hangs.stacks import ProcessId, process_state, this_process
from toolkit.monitor.sink import NullSink
from toolkit.observe import watchdog as module
from toolkit.observe.rank_messages import RankMessages
from toolkit.observe.watchdog import Watchdog
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

LIMIT = 0.5


def call(number: int, tensors: str = "[1024] float32", *, finished: bool = True) -> CollectiveCall:
    return CollectiveCall(
        group="0",
        ranks=(0, 1, 2),
        axis="data",
        number=number,
        operation="all_reduce",
        tensors=tensors,
        begun=time.monotonic() + 100,
        finished=finished,
    )


class Ranks:
    """Watches of some ranks of a run. ``ended``: who was ended, with which code."""

    def __init__(
        self, folder: Path, processes: list[ProcessId], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.directory = RunDirectory(folder)
        self.directory.path.mkdir(exist_ok=True)
        self.directory.write_status(Status(state=RunState.RUNNING, attempt=1, step=16, checkpoint="step-14"))
        self.ended: dict[int, int] = {}
        self.alerts: list[Alert] = []
        self._processes, self._clock = processes, clock
        self.watches: dict[int, Watchdog] = {}

    def watch(self, rank: int, *calls: CollectiveCall, limit: float = LIMIT) -> Watchdog:
        self.watches[rank] = watch = Watchdog(
            limit,
            rank=rank,
            processes=self._processes,
            messages=RankMessages(self.directory.hang_folder(1), None),
            directory=self.directory,
            attempt=1,
            alert=self.alerts.append,
            sink=NullSink(),
            part=lambda: "backward",
            calls=lambda: list(calls),
            end=lambda code: self.ended.setdefault(rank, code),
            clock=self._clock,
        )
        watch.start()
        return watch

    def until_ended(self, count: int, seconds: float = 10.0) -> float:
        began = time.monotonic()
        while len(self.ended) < count:
            assert time.monotonic() - began < seconds, f"ended: {self.ended}"
            time.sleep(0.01)
        return time.monotonic() - began


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.0)
    monkeypatch.setattr(module, "COLLECT_SECONDS", 1.0)
    monkeypatch.setattr(module, "VERDICT_SECONDS", 1.0)
    monkeypatch.setattr(module, "FAILURE_SECONDS", 0.7)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.1)


@pytest.fixture
def own() -> Iterator[ProcessId]:
    notes = os.memfd_create("stacks")
    yield this_process("here", notes, 0)
    os.close(notes)


@pytest.fixture
def ranks(tmp_path: Path, own: ProcessId) -> Iterator[Ranks]:
    made = Ranks(tmp_path / "run", [own] * 3)
    yield made
    for watch in made.watches.values():
        watch.stop()


def test_without_progress_one_report_names_the_rank_and_all_end(
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
    assert "ranks 0-2, thread MainThread" in text, "all of them are this process here"
    assert "in the step's part backward" in text
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


def test_where_rank_0_is_stopped_the_next_one_tells(tmp_path: Path, own: ProcessId) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        stopped = ProcessId("here", child.pid, started, 0, 0, own.space)
        child.send_signal(signal.SIGSTOP)
        while process_state(stopped) != "T":
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
        assert ranks.alerts == [], "rank 0's sinks are the ones for that"
        assert child.wait(5) == -signal.SIGKILL, "it is not left behind"
    finally:
        child.kill()
        child.wait()


def test_progress_of_any_kind_keeps_a_slow_run(ranks: Ranks, tmp_path: Path) -> None:
    """The control: each piece of progress takes two thirds of the limit, for four limits."""
    for rank in range(3):
        ranks.watch(rank, call(17, finished=False))
    began = time.monotonic()
    while time.monotonic() - began < 4 * LIMIT:
        time.sleep(LIMIT * 2 / 3)
        for watch in ranks.watches.values():
            watch.beat("a batch")
    for watch in ranks.watches.values():
        watch.stop()
    assert ranks.ended == {}
    assert not ranks.directory.attempt_folder(1).exists()


def test_a_start_has_more_time_than_a_step(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 60.0)
    watch = ranks.watch(0)
    time.sleep(2 * LIMIT)
    assert ranks.ended == {}
    watch.on_step(step_done(17))
    assert ranks.until_ended(1) < LIMIT + 3
    assert "after step 17 (" in ranks.directory.hang_file(1).read_text()


def test_after_stop_nothing_is_expected(ranks: Ranks) -> None:
    ranks.watch(0).stop()
    time.sleep(2 * LIMIT)
    assert ranks.ended == {}


def test_what_did_not_run_did_not_hang(tmp_path: Path, own: ProcessId) -> None:
    """The clock leaps while a process is stopped; from then on it has its whole limit again."""
    leap = [0.0]
    ranks = Ranks(tmp_path / "run", [own], lambda: time.monotonic() + leap[0])
    watch = ranks.watch(0)
    time.sleep(LIMIT / 2)
    leap[0] = 1000.0
    time.sleep(LIMIT / 3)
    assert ranks.ended == {}
    ranks.until_ended(1)
    watch.stop()


def test_a_failure_in_a_call_says_where_the_ranks_part(ranks: Ranks) -> None:
    """Rank 0 still waits; rank 1's call has failed."""
    ranks.watch(0, call(17, finished=False), limit=60)
    failing = ranks.watch(1, call(17, "[512] float32", finished=False), limit=60)
    error = RuntimeError("op.preamble.length <= op.nbytes. 4096 vs 2048")
    failing.failed(error)
    assert error.__notes__ == [
        "the ranks make calls with different shapes as number 17 on axis data (rank 0: all_reduce [1024] float32; "
        "rank 1: all_reduce [512] float32)"
    ]
    assert ranks.ended == {}
    report = json.loads((ranks.directory.hang_folder(1) / "failure-1.json").read_text())
    assert "op.preamble.length" in report["failure"]


def test_other_failures_wait_for_nobody(ranks: Ranks) -> None:
    failing = ranks.watch(1, call(17), limit=60)
    error = RuntimeError("out of memory")
    began = time.monotonic()
    failing.failed(error)
    mistake = ConfigError(Problem("a", "a=1", "a is 2", "write a=2"))
    ranks.watch(2, call(17, finished=False), limit=60).failed(mistake)
    assert time.monotonic() - began < 0.3
    assert not hasattr(error, "__notes__")
    assert not hasattr(mistake, "__notes__")


def test_a_rank_that_failed_is_the_cause_of_the_others_wait(ranks: Ranks) -> None:
    failing = ranks.watch(1, call(16), limit=60)
    failing.failed(RuntimeError("out of memory"))
    for rank in (0, 2):
        ranks.watch(rank, call(17, finished=False))
    ranks.until_ended(2)
    assert "rank 1 failed: RuntimeError: out of memory" in ranks.directory.hang_file(1).read_text()


def test_what_cannot_be_written_keeps_nobody_from_ending(ranks: Ranks) -> None:
    ranks.directory.attempt_folder(1).parent.write_text("a file where a folder should be")
    ranks.watch(0, call(17))
    ranks.until_ended(1)
    assert [alert.name for alert in ranks.alerts] == ["hang"]


def test_gpus_calls_take_the_place_of_the_process_own(ranks: Ranks) -> None:
    """NCCL's calls return when they are in the queue: only its own record knows that one has not ended."""
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
    watch = ranks.watch(0, call(17))
    watch._trace = lambda: trace
    for rank in (1, 2):
        ranks.watch(rank, call(16))
    ranks.until_ended(3)
    assert "rank 0: waits in call 17" in ranks.directory.hang_file(1).read_text()
    assert (ranks.directory.hang_folder(1) / "rank-0.nccl.json").read_text() == trace
