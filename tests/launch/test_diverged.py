"""A run that diverges ends by itself, on all ranks and under every launcher, and is not started again.

pytest tests/launch/test_diverged.py             our own parent
pytest tests/launch/test_diverged.py -m full     torchrun and deepspeed, and a sweep
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.launch.processes import TRAIN, Started, command, status_of
from tests.train.conftest import data, texts
from toolkit.checkpoint.directory import committed
from toolkit.errors import ExitCode
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

__all__ = ["data", "texts"]  # fixtures

# The learning rate lies within floats until step 4, and far beyond what weights can take from then on.
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


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "launcher",
    ["python", *(pytest.param(name, marks=pytest.mark.full) for name in ("torchrun", "deepspeed"))],
)
def test_a_run_that_diverges_ends_once_with_its_reason(launcher: str, data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = command(
        launcher,
        TRAIN,
        *SMALL,
        *WILD,
        f"data.path={data}",
        f"run.dir={run_dir}",
        *(["cluster.restarts=2"] if launcher == "python" else []),
    )
    if launcher == "torchrun":
        argv.insert(1, "--max-restarts=2")
    with Started(argv, run_dir, cwd=tmp_path) as started:
        code = started.ended(150)
        started.gone(10)
    status = status_of(run_dir)
    assert status is not None, started.output
    assert code == ExitCode.DIVERGED if launcher == "python" else code != 0, started.output
    assert (status.state, status.exit_code, status.attempt) == (RunState.FAILED, ExitCode.DIVERGED, 1), (
        started.output
    )
    assert RunDirectory(run_dir).attempts() == [1]
    rows = list(read_rows(RunDirectory(run_dir).metrics_file))
    assert [row["step"] for row in rows] == list(range(1, (status.step or 0) + 1))
    assert "is not finite" in (status.reason or "") or "are not finite" in (status.reason or "")
    assert all(step < (status.step or 0) for step in committed(run_dir / "checkpoints"))
    assert launcher == "torchrun" or "Traceback" not in started.output, "torchrun has one of its agent"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_diverged_point_of_a_sweep_ends_at_once_and_is_reported_as_diverged(
    data: Path, tmp_path: Path
) -> None:
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
    with Started(argv, tmp_path, cwd=tmp_path) as started:
        code = started.ended(250)
    assert code == ExitCode.DIVERGED, started.output
    sound, wild = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]
    assert (sound["state"], sound["step"], sound["swept"]) == ("done", 12, ["optim.lr=0.001"])
    assert (wild["state"], wild["number"]) == ("diverged", None)
    assert wild["step"] < 12
    assert "best: optim.lr=0.001" in started.output
