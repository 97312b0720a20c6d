"""torchrun with a range of nodes: a run loses a node, continues without it, and continues with it when it
returns.

    pytest tests/launch/test_elastic.py -m full
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.processes import BIN, ROOT, RunningCommand, read_status, send_signal
from tests.launch.tiny_runs import read_losses
from toolkit.cluster.rank_processes import find_free_port
from toolkit.config.compose import compose
from toolkit.estimate.present import to_json
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState
from toolkit.train.run import run

STEPS = 100
SAVE_EVERY = 10
KEYS = (
    "model=gpt2",
    "model.vocab_size=264",
    "model.max_position_embeddings=32",
    "data=prepared",
    "train.sequence_length=32",
    "train.global_batch=16",
    f"train.steps={STEPS}",
    "optim.lr=1e-3",
    "optim.eps=1e-4",
    "schedule=constant",
    "schedule.warmup=0",
    "eval.every=0",
    f"checkpoint.every={SAVE_EVERY}",
    "monitor=files",
    "debug.threads=1",
)


def agent(run_dir: Path, data: Path, port: int, number: int, launches: Path) -> RunningCommand:
    """Return one node's torchrun command, as in docs/clusters.md."""
    argv = [
        str(BIN / "torchrun"),
        "--nnodes=1:2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        "--rdzv-id=elastic",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        f"--rdzv-conf=is_host={int(number == 0)},last_call_timeout=3",
        "--local-addr=127.0.0.1",
        "--max-restarts=3",
        "--monitor-interval=0.2",
        str(ROOT / "launch/train.py"),
        *KEYS,
        "+hooks.pace.target=tests.launch.paced_steps.PacedSteps",  # nodes start in fewer steps
        f"data.path={data}",
        f"run.dir={run_dir}",
        "zero=stage1",
    ]
    launches.mkdir()
    return RunningCommand(
        argv,
        run_dir,
        cwd=launches,
        environ={
            "PYTHONPATH": str(ROOT),
            "TORCHDYNAMO_DISABLE": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )


def worlds(run_dir: Path) -> list[int]:
    """Return the number of ranks of each attempt."""
    plans = (run_dir / "attempts").glob("*/plan.json")
    return [json.loads(plan.read_text())["world"]["ranks"] for plan in sorted(plans)]


def step(run_dir: Path, attempt: int) -> int:
    """Return the newest step of a running attempt; 0 if another attempt runs or none."""
    status = read_status(run_dir)
    running = status is not None and status.state is RunState.RUNNING and status.attempt == attempt
    return (status.step or 0) if status is not None and running else 0


@pytest.fixture
def uninterrupted(data: Path, tmp_path: Path) -> Iterator[dict[int, float]]:
    config = compose([*KEYS, f"data.path={data}", f"run.dir={tmp_path / 'alone'}", "engine=local"])
    plan = make_plan(config, World(ranks=1, ranks_per_node=1, device=Device.CPU))
    directory = RunDirectory(tmp_path / "alone")
    run(plan, rank=0, local_rank=0, stop=lambda: None, attempt=directory.begin(config, to_json(plan)))
    directory.release()
    return dict(read_losses(directory.metrics_file))


@pytest.mark.full
@pytest.mark.timeout(400)
def test_elastic_run_survives_loss_and_return_of_a_node(
    data: Path, uninterrupted: dict[int, float], tmp_path: Path
) -> None:
    run_dir, port = tmp_path / "run", find_free_port()
    with agent(run_dir, data, port, 0, tmp_path / "first") as first:
        second = agent(
            run_dir, data, port, 1, tmp_path / "second"
        )  # of the same run: ``first`` ends all its processes
        first.wait_until(lambda: step(run_dir, 1) > SAVE_EVERY, 120, "training on two nodes")
        rank = next(item for item in second.ranks().values() if item.ppid() == second.process.pid)
        send_signal(signal.SIGKILL, second.process.pid)
        send_signal(signal.SIGKILL, rank.pid)
        first.wait_until(lambda: step(run_dir, 2) > SAVE_EVERY + 1, 90, "training on one node")
        assert worlds(run_dir) == [2, 1]
        third = agent(run_dir, data, port, 1, tmp_path / "third")
        first.wait_until(lambda: step(run_dir, 3) > SAVE_EVERY, 90, "training on two nodes again")
        assert (first.wait_for_exit(120), third.wait_for_exit(30)) == (0, 0), (
            f"{first.output}\n{third.output}"
        )
    assert worlds(run_dir) == [2, 1, 2]
    losses = dict(read_losses(run_dir / "metrics.jsonl"))
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(uninterrupted, abs=1e-5)
    assert abs(losses[STEPS] - losses[STEPS - 1]) > 1e-5, "control: one step late is outside of the tolerance"
