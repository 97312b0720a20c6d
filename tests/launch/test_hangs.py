"""Trainings of two ranks that hang: they end with one report within ten seconds of the limit, and can be
restarted.

    pytest tests/launch/test_hangs.py -m full    every fault, and slow runs that are none

The watchdog of ranks without a training: tests/observe/test_watchdog.py.
"""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.processes import RunningCommand, command, read_status, send_signal
from tests.launch.tiny_runs import KEYS, read_losses
from toolkit import checkpoint_folder
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

DRIVER = Path(__file__).with_name("hung_training.py")
LIMIT = 3  # seconds
ENVIRON = {"TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cpu"}
RUN = (*KEYS, "zero=stage1", "monitor.probe=false", "cluster.grace_seconds=1")


@dataclass(frozen=True)
class HangCase:
    """
    Attributes:
        fault: KIND:RANK:STEP of ``hung_training.py``.
        where, cause: of the alert, whose cause starts with ``cause``.
        evidence: a text in the report.
        silent: ranks that cannot report their stacks.
    """

    fault: str
    where: str
    cause: str
    evidence: str = ""
    silent: tuple[int, ...] = ()
    launcher: str = "python"
    resumes: bool = False

    def __str__(self) -> str:
        return f"{self.fault.replace(':', '-')}-{self.launcher}"


STOPPED = "NO RESPONSE; its process is stopped by a signal (T)"
SKIP = HangCase(
    "skip:1:3",
    "rank 1",
    "rank 1 has made 3 calls on axis data, rank 0 waits in the 4th: all_reduce [1024] float32",
)
FAULTS = [
    SKIP,
    HangCase(
        "skip:0:3",
        "rank 0",
        "rank 0 has made 3 calls on axis data, rank 1 waits in the 4th: all_reduce [1024] float32",
        launcher="torchrun",
    ),
    HangCase("stop:0:3", "rank 0", "rank 0 is stopped by a signal", STOPPED, silent=(0,)),
    HangCase("frozen:1:3", "rank 1", "rank 1 is blocked by native code", "in before", silent=(1,)),
    HangCase(
        "loader:1:3",
        "rank 1",
        "rank 1 is waiting for samples, and the others wait for it",
        "its thread data-stream is in ",
        resumes=True,
    ),
    HangCase(
        "dead:1:3",
        "rank 1",
        "rank 1 is waiting for samples, and the others wait for it",
        "no thread that prefetches samples: it has ended",
    ),
]


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_hang_is_reported_with_its_cause_and_the_run_can_be_restarted(
    case: HangCase, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = command(
        case.launcher,
        DRIVER,
        *RUN,
        f"data.path={data}",
        f"run.dir={run_dir}",
        f"monitor.hang_seconds={LIMIT}",
    )
    moment = tmp_path / "moment"
    with RunningCommand(
        argv, run_dir, cwd=tmp_path, environ={**ENVIRON, "FAULT": case.fault, "FAULT_TIME": str(moment)}
    ) as started:
        assert started.wait_for_exit(120) == 1, started.output
        started.wait_until_gone(35 if case.launcher == "torchrun" else 15)
    run = RunDirectory(run_dir)
    file = run.hang_file(1)
    assert file.exists(), started.output
    text = file.read_text()
    late = file.stat().st_mtime - float(moment.read_text()) - LIMIT
    assert -1 < late < 10, f"{late:.1f} s after the limit"

    (row,) = [
        row for row in map(json.loads, run.alerts_file.read_text().splitlines()) if row["name"] == "hang"
    ]
    assert row["where"] == case.where, text
    assert row["cause"].startswith(case.cause), text
    assert case.evidence in text
    assert str(file) in row["evidence"]
    for rank in {0, 1} - set(case.silent):
        stacks = [line for line in text.splitlines() if line.endswith(")") and "thread MainThread" in line]
        assert any(f"rank {rank}," in line or "ranks 0-1," in line for line in stacks), text
    assert "launch/train.py" in text, "stacks reach down to the start"

    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.exit_code, end.attempt) == (RunState.FAILED, 1, 1)
    assert end.reason is not None
    assert end.reason.startswith(f"hang: {row['cause']}")
    assert str(file) in end.reason
    assert end.checkpoint == str(checkpoint_folder.newest_checkpoint(run.checkpoints))
    assert case.cause in started.output
    if case.resumes:
        _check_resumed_run(argv, run_dir, data, tmp_path)


def _check_resumed_run(argv: list[str], run_dir: Path, data: Path, tmp_path: Path) -> None:
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ=ENVIRON) as started:
        assert started.wait_for_exit(120) == 0, started.output
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.attempt, end.step) == (RunState.DONE, 2, 6)
    unbroken = tmp_path / "unbroken"
    other = command("python", DRIVER, *RUN, f"data.path={data}", f"run.dir={unbroken}")
    with RunningCommand(other, unbroken, cwd=tmp_path, environ=ENVIRON) as started:
        assert started.wait_for_exit(120) == 0, started.output
    assert read_losses(run_dir / "metrics.jsonl") == read_losses(unbroken / "metrics.jsonl")


@pytest.mark.full
@pytest.mark.timeout(200)
def test_parent_restarts_the_ranks_after_a_hang(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keys = [key for key in RUN if not key.startswith("cluster.restarts")]
    argv = command(
        "python",
        DRIVER,
        *keys,
        "cluster.restarts=1",
        f"data.path={data}",
        f"run.dir={run_dir}",
        f"monitor.hang_seconds={LIMIT}",
    )
    environ = {**ENVIRON, "FAULT": SKIP.fault, "FAULT_TIME": str(tmp_path / "moment")}
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ=environ) as started:
        assert started.wait_for_exit(150) == 0, started.output
        started.wait_until_gone(5)
    run = RunDirectory(run_dir)
    assert run.hang_file(1).exists()
    assert not run.hang_file(2).exists()
    assert f"attempt 1 failed: hang: {SKIP.cause}" in started.output
    assert "attempt 2 starts now from the checkpoint of step 2\n" in started.output
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.exit_code, end.attempt, end.step) == (RunState.DONE, 0, 2, 6)
    assert end.goodput is not None
    assert end.goodput["lost"]["ending"] > LIMIT, "the hang"
    losses = read_losses(run.metrics_file)
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert read_losses(run.attempt_folder(1) / "metrics.jsonl") == [losses[2]], "step 3 was repeated bitwise"


@pytest.mark.full
@pytest.mark.timeout(120)
def test_different_shapes_in_one_call_are_named(data: Path, tmp_path: Path) -> None:
    """gloo fails on one side or both, or waits; the failure or the hang names both shapes."""
    run_dir = tmp_path / "run"
    argv = command(
        "python", DRIVER, *RUN, f"data.path={data}", f"run.dir={run_dir}", f"monitor.hang_seconds={LIMIT}"
    )
    moment = tmp_path / "moment"
    with RunningCommand(
        argv, run_dir, cwd=tmp_path, environ={**ENVIRON, "FAULT": "shapes:1:3", "FAULT_TIME": str(moment)}
    ) as started:
        assert started.wait_for_exit(60) == 1, started.output
        started.wait_until_gone(15)
        assert time.time() - float(moment.read_text()) < LIMIT + 20
    assert "the ranks make calls with different shapes as number 4 on axis data" in started.output
    assert "rank 0: all_reduce [1024] float32; rank 1: all_reduce [512] float32" in started.output
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.exit_code) == (RunState.FAILED, 1)
    assert end.reason is not None
    assert "different shapes" in end.reason, "not only that gloo ended a rank by SIGABRT"


@pytest.mark.full
@pytest.mark.timeout(120)
def test_slow_run_is_no_hang(data: Path, tmp_path: Path) -> None:
    """Each step, evaluation batch and save takes two thirds of the limit."""
    run_dir = tmp_path / "run"
    keys = [key for key in RUN if not key.startswith(("eval.every", "train.steps", "checkpoint.every"))]
    argv = command(
        "python",
        DRIVER,
        *keys,
        "train.steps=2",
        "eval.every=2",
        "eval.batches=2",
        "checkpoint.every=1",
        f"data.path={data}",
        f"run.dir={run_dir}",
        "monitor.hang_seconds=3",
    )
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ={**ENVIRON, "FAULT": "slow:ALL:2"}) as started:
        assert started.wait_for_exit(100) == 0, started.output
    run = RunDirectory(run_dir)
    assert len(read_losses(run.metrics_file)) == 2
    assert not run.hang_file(1).exists()
    assert not run.hang_folder(1).exists()


@pytest.mark.full
@pytest.mark.timeout(120)
def test_paused_run_is_no_hang(data: Path, tmp_path: Path) -> None:
    """All ranks are stopped, as in a paused container."""
    run_dir = tmp_path / "run"
    keys = [key for key in RUN if not key.startswith("train.steps")]
    argv = command(
        "python",
        DRIVER,
        *keys,
        "train.steps=20",
        f"data.path={data}",
        f"run.dir={run_dir}",
        f"monitor.hang_seconds={LIMIT}",
    )
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ=ENVIRON) as started:
        started.wait_until(
            lambda: (run_dir / "metrics.jsonl").exists() and len(read_losses(run_dir / "metrics.jsonl")) > 1,
            60,
            "training",
        )
        ranks = [process.pid for process in started.ranks().values()]
        for pid in ranks:
            send_signal(signal.SIGSTOP, pid)
        time.sleep(LIMIT + 3.5)
        for pid in ranks:
            send_signal(signal.SIGCONT, pid)
        assert started.wait_for_exit(60) == 0, started.output
    assert not RunDirectory(run_dir).hang_file(1).exists()


@pytest.mark.full
@pytest.mark.timeout(120)
def test_nodes_without_a_shared_disk_exchange_reports_through_the_store(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    environ = {
        **ENVIRON,
        "FAULT": "loader:1:3",
        "FAULT_TIME": str(tmp_path / "moment"),
        "SEPARATE_DISKS": "1",
    }
    (torchrun, port, number, *rest) = command(
        "torchrun",
        DRIVER,
        *RUN,
        f"data.path={data}",
        f"run.dir={run_dir}",
        f"monitor.hang_seconds={LIMIT}",
        ranks=1,
    )
    folders = [tmp_path / f"node-{node}" for node in range(2)]
    for folder in folders:
        folder.mkdir()
    argvs = [
        [
            torchrun,
            port,
            number,
            "--master_addr",
            "127.0.0.1",
            "--nnodes",
            "2",
            "--node_rank",
            str(node),
            *rest,
        ]
        for node in range(2)
    ]
    with (
        RunningCommand(argvs[1], run_dir, cwd=folders[1], environ=environ) as other,
        RunningCommand(argvs[0], run_dir, cwd=folders[0], environ=environ) as first,
    ):
        assert first.wait_for_exit(90) == 1, first.output
        assert other.wait_for_exit(40) == 1, other.output
        first.wait_until_gone(15)
    folder = RunDirectory(run_dir).attempt_folder(1)
    assert sorted(file.name for file in (folder / "hang-1").iterdir()) == ["asked.json", "rank-1.json"]
    assert not (folder / "hang-0" / "rank-1.json").exists()
    text = (folder / "hang.txt").read_text()
    assert "cause:     rank 1 is waiting for samples, and the others wait for it" in text
    assert "rank 1, thread data-stream" in text, "its stacks were received"
