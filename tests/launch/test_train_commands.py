"""The commands of the README and of launch/train.py, with real training.

pytest tests/launch/test_train_commands.py -m full
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.launch.processes import TRAIN, RunningCommand, command, read_status, send_signal
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

SMALL = ("+exp=quickstart", "train.steps=20", "zero=stage3", "model.hidden_size=128")
FORMS = {
    f"{launcher}, {f'{ranks} ranks' if ranks else 'default ranks'}": (launcher, ranks)
    for launcher in ("deepspeed", "torchrun", "python")
    for ranks in (2, None)
    if (launcher, ranks) != ("torchrun", None)  # its default is one rank, as that of Python
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data folder for all forms, and the losses of earlier ones."""
    return tmp_path_factory.mktemp("shared")


@pytest.mark.parametrize("form", FORMS)
def test_every_launcher_form_trains_the_same_run(form: str, shared: Path, tmp_path: Path) -> None:
    launcher, ranks = FORMS[form]
    run_dir = tmp_path / "run"
    argv = command(launcher, TRAIN, *SMALL, f"run.dir={run_dir}", f"data.path={shared / 'data'}", ranks=ranks)
    with RunningCommand(argv, run_dir, cwd=tmp_path) as started:
        assert started.wait_for_exit(300) == 0, started.output
        started.wait_until_gone(5)
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.exit_code, end.step) == (RunState.DONE, 0, 20)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 21))
    losses = shared / "losses.json"
    if not losses.exists():
        losses.write_text(json.dumps([row["loss"] for row in rows]))
    assert [row["loss"] for row in rows] == pytest.approx(json.loads(losses.read_text()), abs=1e-4)


@pytest.mark.parametrize(("launcher", "group"), [("deepspeed", False), ("torchrun", True)])
def test_stopped_run_resumes(launcher: str, group: bool, shared: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keys = (
        *("+exp=quickstart", "zero=stage2", "model.hidden_size=64"),
        *("checkpoint.every=never", "eval.every=0", f"data.path={shared / 'data'}", f"run.dir={run_dir}"),
    )
    directory = RunDirectory(run_dir)
    argv = command(launcher, TRAIN, *keys, "train.steps=100000", ranks=2)
    with RunningCommand(argv, run_dir, cwd=tmp_path) as started:
        started.wait_until(
            lambda: directory.metrics_file.exists() and directory.metrics_file.read_text().count("\n") > 3,
            200,
            "training",
        )
        send_signal(signal.SIGTERM, started.process.pid, group=group)
        started.wait_for_exit(60)
        started.wait_until_gone(15)
        stopped = read_status(run_dir)
        assert stopped is not None
        assert (stopped.state, stopped.exit_code) == (RunState.STOPPED, 75), started.output
        assert stopped.checkpoint
        assert stopped.step
    argv = command(launcher, TRAIN, *keys, f"run.dir={run_dir}", f"train.steps={stopped.step + 3}", ranks=2)
    with RunningCommand(argv, run_dir, cwd=tmp_path) as started:
        assert started.wait_for_exit(200) == 0, started.output
    end = read_status(run_dir)
    assert end is not None
    assert (end.state, end.attempt, end.step) == (RunState.DONE, 2, stopped.step + 3)
    steps = [json.loads(line)["step"] for line in directory.metrics_file.read_text().splitlines()]
    assert steps == list(range(1, stopped.step + 4))
