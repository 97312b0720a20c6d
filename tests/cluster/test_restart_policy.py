"""Restart decisions, and the kernel's OOM counters. Pure."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.cluster.attempt.oom_kills import count_oom_kills, describe_oom_kills
from toolkit.cluster.standbys.standby_pool import count_standbys
from toolkit.cluster.supervisor import (
    MAX_DELAY_SECONDS,
    NewestState,
    NoRestart,
    Restart,
    decide_restart,
    describe_restart,
    has_progressed,
)
from toolkit.config.cluster import ClusterConfig
from toolkit.errors import ExitCode
from toolkit.goodput import Attempt, AttemptTimes
from toolkit.plan.types import Device, World

FAILED = {
    "stop_requested": False,
    "failed_early": False,
    "progressed": False,
    "before": 4,
    "saved": 4,
    "failures": 0,
    "limit": 3,
}


def test_failures_without_progress_are_limited_with_growing_delays() -> None:
    failures, pauses = 0, []
    while isinstance(found := decide_restart(ExitCode.FAILURE, **{**FAILED, "failures": failures}), Restart):  # type: ignore[arg-type]
        assert found.failures == failures + 1
        failures = found.failures
        pauses.append(found.seconds)
    assert pauses == [2, 4, 8]
    assert found == NoRestart("it failed 4 times in a row without a newer checkpoint (cluster.restarts=3)")


@pytest.mark.parametrize(
    ("before", "saved"), [(None, 2), (4, 6), (400, 40)], ids=["first", "newer", "went back and saved"]
)
def test_newer_checkpoint_resets_failure_count(before: int | None, saved: int) -> None:
    found = decide_restart(ExitCode.FAILURE, **{**FAILED, "before": before, "saved": saved, "failures": 3})  # type: ignore[arg-type]
    assert found == Restart(0, 2)
    assert isinstance(decide_restart(ExitCode.FAILURE, **{**FAILED, "failures": 3}), NoRestart), "control"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        (ExitCode.DONE, {}),
        (ExitCode.USER, {}),
        (ExitCode.STOPPED, {}),
        (ExitCode.FAILURE, {"stop_requested": True}),
        (ExitCode.FAILURE, {"limit": 0}),
    ],
    ids=["done", "a mistake", "stopped", "failed while stopping", "not wanted"],
)
def test_ends_that_are_never_restarted(code: ExitCode, changes: dict[str, object]) -> None:
    assert decide_restart(code, **{**FAILED, "saved": 6, **changes}) == NoRestart()  # type: ignore[arg-type]


def test_diverged_run_is_not_restarted() -> None:
    found = decide_restart(ExitCode.DIVERGED, **{**FAILED, "saved": 6})  # type: ignore[arg-type]
    assert isinstance(found, NoRestart)
    assert "not finite" in found.why


def test_error_before_first_step_is_not_restarted() -> None:
    assert decide_restart(ExitCode.FAILURE, **{**FAILED, "failed_early": True}) != decide_restart(
        ExitCode.FAILURE, **FAILED
    )  # type: ignore[arg-type]
    assert isinstance(decide_restart(ExitCode.FAILURE, **{**FAILED, "failed_early": True}), NoRestart)  # type: ignore[arg-type]


def test_restart_delay_is_bounded() -> None:
    found = decide_restart(ExitCode.FAILURE, **{**FAILED, "failures": 50, "limit": 100})  # type: ignore[arg-type]
    assert isinstance(found, Restart)
    assert found.seconds == MAX_DELAY_SECONDS


@pytest.mark.parametrize(("saved", "failures"), [(4, 1), (6, 0)], ids=["no checkpoint", "newer checkpoint"])
def test_restart_after_progress_has_no_delay(saved: int, failures: int) -> None:
    found = decide_restart(ExitCode.FAILURE, **{**FAILED, "progressed": True, "saved": saved})  # type: ignore[arg-type]
    assert found == Restart(failures, 0)


@pytest.mark.parametrize(
    ("steps", "answer"),
    [([8], True), ([None], False), ([8, 9], True), ([8, 8], False), ([8, None], False), ([None, 3], True)],
)
def test_progress_is_a_step_that_no_attempt_had_reached(steps: list[int | None], answer: bool) -> None:
    """A run that fails at the same step each time waits longer each time."""
    attempts = [
        Attempt(AttemptTimes(began=0, seen=9, step=step, first_step=None if step is None else 5.0))
        for step in steps
    ]
    assert has_progressed(attempts) is answer


@pytest.mark.parametrize(
    ("config", "device", "count"),
    [
        (ClusterConfig(), Device.CUDA, 4),
        (ClusterConfig(), Device.CPU, 0),
        (ClusterConfig(standbys=0), Device.CUDA, 0),
        (ClusterConfig(standbys=2), Device.CPU, 2),
        (ClusterConfig(standbys=9), Device.CPU, 4),
        (ClusterConfig(restarts=0), Device.CUDA, 0),
    ],
)
def test_number_of_standbys(config: ClusterConfig, device: Device, count: int) -> None:
    world = World(ranks=8, ranks_per_node=4, device=device)
    assert count_standbys(config, world, restarts=config.restarts) == count, "for the ranks of one node"


def test_describe_restart() -> None:
    message = describe_restart(
        Restart(2, 4), failed=3, why="rank 1 was killed by signal 9 (SIGKILL)", newest=NewestState(4), limit=3
    )
    assert message == (
        "attempt 3 failed: rank 1 was killed by signal 9 (SIGKILL)\n"
        "attempt 4 starts in 4 s from the checkpoint of step 4 (restart 2 of 3 without a newer checkpoint)"
    )
    assert describe_restart(Restart(0, 2), failed=1, why="x", newest=NewestState(None), limit=3).endswith(
        "starts in 2 s from the beginning"
    )
    in_memory = NewestState(7, in_memory=True)
    assert describe_restart(Restart(0, 0), failed=1, why="x", newest=in_memory, limit=3).endswith(
        "starts now from the snapshot in memory of step 7"
    )


# ---- out of memory


def machine(
    root: Path,
    group: int | None,
    vmstat: int,
    cgroup: str = "0::/job\n",
    file: str = "sys/fs/cgroup/job/memory.events",
) -> Path:
    for path, text in (("proc/self/cgroup", cgroup), ("proc/vmstat", f"pgfault 7\noom_kill {vmstat}\n")):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    if group is not None:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(f"low 0\noom 3\noom_kill {group}\n")
    return root


def test_oom_kill_is_described(tmp_path: Path) -> None:
    before = count_oom_kills(machine(tmp_path, 1, 5))
    assert describe_oom_kills(before, count_oom_kills(tmp_path)) == "", "control"
    message = describe_oom_kills(before, count_oom_kills(machine(tmp_path, 2, 6)))
    assert message.startswith(
        "out of host memory: the kernel killed 1 process in its container or job (oom_kill of "
    )
    assert message.endswith("job/memory.events)")
    elsewhere = describe_oom_kills(count_oom_kills(tmp_path), count_oom_kills(machine(tmp_path, 2, 8)))
    assert "2 processes on this machine" in elsewhere


def test_oom_kills_of_cgroup_v1_and_without_cgroups(tmp_path: Path) -> None:
    old = {"cgroup": "4:memory:/job\n1:cpu:/\n", "file": "sys/fs/cgroup/memory/job/memory.oom_control"}
    before = count_oom_kills(machine(tmp_path, 0, 0, **old))
    assert "memory.oom_control" in describe_oom_kills(before, count_oom_kills(machine(tmp_path, 1, 1, **old)))
    assert count_oom_kills(tmp_path / "nothing") == {}
    assert count_oom_kills()["/proc/vmstat"] >= 0  # this kernel's
