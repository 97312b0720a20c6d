"""Failing ranks: which commands restart them, from which checkpoint, and how often.

pytest tests/launch/test_restarts.py -m full
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cluster.metadata_server import Metadata
from tests.launch.processes import FAKE, RunningCommand, command, read_status, send_signal
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]
STEPS = 6


def argv(
    run_dir: Path, *keys: str, launcher: str = "python", options: tuple[str, ...] = (), ranks: int | None = 2
) -> list[str]:
    typed = command(
        launcher, FAKE, "+exp=quickstart", f"run.dir={run_dir}", f"train.steps={STEPS}", *keys, ranks=ranks
    )
    return [typed[0], *options, *typed[1:]]


def log(run_dir: Path, attempt: int) -> str:
    return RunDirectory(run_dir).log_file(attempt).read_text()


def test_run_killed_twice_is_restarted_to_its_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    environ = {"FAKE_SAVE_EVERY": "2", "FAKE_KILLS": "1:1:3,2:0:5"}
    with RunningCommand(
        argv(run_dir, "cluster.restarts=1"), run_dir, cwd=tmp_path, environ=environ
    ) as started:
        assert started.wait_for_exit(90) == 0, started.output
        started.wait_until_gone(5)
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.attempt, end.step, end.exit_code) == (RunState.DONE, 3, STEPS, 0)
    logs = [log(run_dir, attempt) for attempt in (1, 2, 3)]
    assert "attempt 1 failed: rank 1 was killed by signal 9 (SIGKILL)" in logs[0]
    assert "attempt 2 starts in 2 s from the checkpoint of step 2" in logs[0]
    assert "attempt 2 begins with step 2" in logs[1]
    assert "attempt 2 failed: rank 0 was killed by signal 9 (SIGKILL)" in logs[1]
    assert "attempt 3 begins with step 4" in logs[2]
    assert "failed" not in logs[2], "each attempt's log is its own"
    assert end.goodput is not None
    assert end.goodput["attempts"] == 3
    ends = [
        json.loads((run_dir / "attempts" / f"{attempt:03d}" / "times.json").read_text())
        for attempt in (1, 2, 3)
    ]
    assert [item["state"] for item in ends] == ["failed", "failed", "done"]
    assert ends[0]["began"] < ends[0]["ended"] <= ends[1]["began"] < ends[1]["ended"] <= ends[2]["began"]


def test_single_rank_is_restarted(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    environ = {"FAKE_SAVE_EVERY": "2", "FAKE_KILLS": "1:0:3"}
    with RunningCommand(argv(run_dir, ranks=None), run_dir, cwd=tmp_path, environ=environ) as started:
        assert started.wait_for_exit(60) == 0, started.output
        started.wait_until_gone(5)
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.attempt, end.step, end.exit_code) == (RunState.DONE, 2, STEPS, 0)
    assert "attempt 2 begins with step 2" in log(run_dir, 2)


def test_single_rank_without_restarts_has_no_supervisor(tmp_path: Path) -> None:
    """So that a debugger works; also the control of the test above."""
    run_dir = tmp_path / "run"
    environ = {"FAKE_SAVE_EVERY": "2", "FAKE_KILLS": "1:0:3"}
    with RunningCommand(
        argv(run_dir, "cluster.restarts=0", ranks=None), run_dir, cwd=tmp_path, environ=environ
    ) as started:
        assert started.wait_for_exit(60) == -signal.SIGKILL, started.output
    assert RunDirectory(run_dir).attempts() == [1]


def test_restarts_end_without_a_newer_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    environ = {"FAKE_SAVE_EVERY": "2", "FAKE_KILLS": "1:1:3,2:1:3,3:0:3,4:1:3"}
    with RunningCommand(
        argv(run_dir, "cluster.restarts=1"), run_dir, cwd=tmp_path, environ=environ
    ) as started:
        assert started.wait_for_exit(90) == 1
        started.wait_until_gone(5)
        # The first failure left the checkpoint of step 2, the next ones none.
        assert "not restarted: it failed 2 times in a row without a newer checkpoint" in started.output
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.attempt) == (RunState.FAILED, 3)
    assert end.reason == "rank 0 was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("what", "code", "text"),
    [("FAKE_REFUSES", 2, "the fake training refuses"), ("FAKE_FAILS", 1, "it failed before its first step")],
)
def test_mistake_is_not_restarted(what: str, code: int, text: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with RunningCommand(argv(run_dir), run_dir, cwd=tmp_path, environ={what: "0"}) as started:
        assert started.wait_for_exit(60) == code
        assert text in started.output
    assert RunDirectory(run_dir).attempts() == [1]


def test_stop_during_restart_delay(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with RunningCommand(argv(run_dir), run_dir, cwd=tmp_path, environ={"FAKE_KILLS": "1:1:3"}) as started:
        started.wait_until(lambda: "attempt 2 starts in" in started.output, 60, "failed")
        send_signal(signal.SIGTERM, started.process.pid)
        assert started.wait_for_exit(20) == 75
        started.wait_until_gone(5)
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.attempt, end.reason) == (RunState.STOPPED, 2, "SIGTERM before training began")


def test_torchrun_restart_is_a_new_attempt(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    environ = {"FAKE_SAVE_EVERY": "2", "FAKE_KILLS": "1:1:3,2:0:5"}
    typed = argv(run_dir, launcher="torchrun", options=("--max_restarts", "2", "--monitor_interval", "0.2"))
    with RunningCommand(typed, run_dir, cwd=tmp_path, environ=environ) as started:
        assert started.wait_for_exit(150) == 0, started.output
        started.wait_until_gone(10)
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.attempt, end.step) == (RunState.DONE, 3, STEPS)
    assert "attempt 3 begins with step 4" in log(run_dir, 3)


def test_torchrun_does_not_restart_a_stopped_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    typed = argv(
        run_dir,
        "train.steps=100000",
        launcher="torchrun",
        options=("--max_restarts", "2", "--monitor_interval", "0.2"),
    )
    with RunningCommand(typed, run_dir, cwd=tmp_path, environ={"FAKE_STEP_SECONDS": "0.05"}) as started:
        started.wait_until(
            lambda: (status := read_status(run_dir)) is not None and (status.step or 0) >= 2, 60, "running"
        )
        send_signal(signal.SIGTERM, started.ranks()[1].pid)
        started.wait_for_exit(60)
        started.wait_until_gone(15)
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.attempt, end.exit_code) == (RunState.STOPPED, 1, 75)
    assert RunDirectory(run_dir).attempts() == [1]


def test_deepspeed_does_not_restart_and_says_how_to_resume(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with RunningCommand(
        argv(run_dir, launcher="deepspeed"), run_dir, cwd=tmp_path, environ={"FAKE_FAILS": "0"}
    ) as started:
        assert started.wait_for_exit(90) != 0
        started.wait_until_gone(15)
        assert "deepspeed does not restart ranks" in started.output
    assert RunDirectory(run_dir).attempts() == [1]


def test_preempted_run_saves_and_is_not_restarted(tmp_path: Path, metadata: Metadata) -> None:
    run_dir = tmp_path / "run"
    environ = {"FAKE_STEP_SECONDS": "0.05", "TOOLKIT_METADATA_URL": metadata.url}
    with RunningCommand(
        argv(run_dir, "train.steps=100000", "cluster.notice=gce"), run_dir, cwd=tmp_path, environ=environ
    ) as started:
        started.wait_until(
            lambda: (status := read_status(run_dir)) is not None and (status.step or 0) >= 2, 60, "running"
        )
        metadata.answers["/computeMetadata/v1/instance/preempted"] = ("TRUE", {"Metadata-Flavor": "Google"})
        assert started.wait_for_exit(30) == 75
        started.wait_until_gone(5)
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.attempt, end.checkpoint) == (RunState.STOPPED, 1, "saved")
    assert end.reason == "Google Cloud preempts this machine"
    assert RunDirectory(run_dir).attempts() == [1]
