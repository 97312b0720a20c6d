"""A diverging run ends on all ranks, under every launcher, and is not restarted.

pytest tests/launch/test_diverged.py             supervisor, with a fake training
pytest tests/launch/test_diverged.py -m full     real training under every launcher, and a sweep
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.launch.processes import FAKE, TRAIN, RunningCommand, command, read_status
from toolkit.checkpoint.directory import committed_checkpoints
from toolkit.errors import ExitCode
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

# The learning rate is harmless until step 4 and makes weights overflow from then on.
SMALL = (
    "+exp=quickstart",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=1",
    "train.global_batch=4",
    "train.micro_batch=2",
    "train.sequence_length=32",
    "train.steps=12",
    "optim.clip=0",
    "schedule=constant",
    "eval.every=0",
    "checkpoint.every=2",
    "checkpoint.export=false",
    "monitor=files",
    "monitor.prompt=null",
    "data.vocab_size=264",
    "model.vocab_size=264",
)
WILD = ("optim.lr=1e22",)


@pytest.mark.full
@pytest.mark.timeout(120)
def test_supervisor_does_not_restart_diverged_ranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = command(
        "python", FAKE, "+exp=quickstart", f"run.dir={run_dir}", "train.steps=3", "cluster.restarts=2"
    )
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ={"FAKE_DIVERGES": "1"}) as started:
        assert started.wait_for_exit() == ExitCode.DIVERGED, started.output
        started.wait_until_gone(10)
    status = read_status(run_dir)
    assert status is not None
    assert (status.state, status.exit_code, status.attempt) == (RunState.FAILED, ExitCode.DIVERGED, 1)
    assert RunDirectory(run_dir).attempts() == [1]
    assert "not restarted: the loss, a gradient or a weight is not finite" in started.output


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("launcher", "ranks"), [("python", 1), ("torchrun", 2), ("deepspeed", 2)])
def test_diverged_run_is_not_restarted(launcher: str, ranks: int, data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = command(
        launcher,
        TRAIN,
        *SMALL,
        *WILD,
        f"data.path={data}",
        f"run.dir={run_dir}",
        *(["cluster.restarts=2"] if launcher == "python" else []),
        ranks=ranks,
    )
    if launcher == "torchrun":
        argv.insert(1, "--max-restarts=2")
    with RunningCommand(argv, run_dir, cwd=tmp_path) as started:
        code = started.wait_for_exit(150)
        started.wait_until_gone(10)
    status = read_status(run_dir)
    assert status is not None, started.output
    assert code == ExitCode.DIVERGED if launcher == "python" else code != 0, started.output
    assert (status.state, status.exit_code, status.attempt) == (RunState.FAILED, ExitCode.DIVERGED, 1), (
        started.output
    )
    assert RunDirectory(run_dir).attempts() == [1]
    rows = list(read_rows(RunDirectory(run_dir).metrics_file))
    assert [row["step"] for row in rows] == list(range(1, (status.step or 0) + 1))
    assert "is not finite" in (status.reason or "") or "are not finite" in (status.reason or "")
    assert all(step < (status.step or 0) for step in committed_checkpoints(run_dir / "checkpoints"))
    assert launcher == "torchrun" or "Traceback" not in started.output, (
        "torchrun prints its agent's traceback"
    )


@pytest.mark.full
@pytest.mark.timeout(300)
def test_diverged_sweep_point_is_reported(data: Path, tmp_path: Path) -> None:
    argv = [
        sys.executable,
        str(TRAIN),
        "-m",
        *SMALL,
        "optim.lr=0.001,1e22",
        f"data.path={data}",
        f"sweep.dir={tmp_path / 'sweep'}",
        "cluster.cpu_ranks=1",
    ]
    with RunningCommand(argv, tmp_path, cwd=tmp_path) as started:
        code = started.wait_for_exit(250)
    assert code == ExitCode.DIVERGED, started.output
    sound, wild = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]
    assert (sound["state"], sound["step"], sound["swept"]) == ("done", 12, ["optim.lr=0.001"])
    assert (wild["state"], wild["number"]) == ("diverged", None)
    assert wild["step"] < 12
    assert "best: optim.lr=0.001" in started.output
