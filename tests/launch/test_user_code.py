"""Datasets and hooks of the user's own code in trainings of several ranks.

pytest tests/launch/test_user_code.py            a hook that raises on rank 1 only
pytest tests/launch/test_user_code.py -m full    other failures, and resuming in another layout
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.launch.processes import ROOT, TRAIN, RunningCommand, command, read_status
from tests.train import user_code
from toolkit.checkpoint import open_reader
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

CODE = "tests.train.user_code"
FILE = str(user_code.__file__)
STEPS = 8
KEYS = (
    "model=custom",
    f"model.target={CODE}.Linear",
    f"task.target={CODE}.Regression",
    "data=custom",
    f"data.target={CODE}.Table",
    "+data.arguments.samples=40",
    f"train.steps={STEPS}",
    "train.global_batch=8",
    "train.micro_batch=2",
    "optim.lr=0.05",
    "schedule=constant",
    "eval.every=4",
    "checkpoint.every=4",
    "monitor=files",
    "monitor.probe=false",
    "debug.threads=1",
    "cluster.restarts=0",
    "cluster.grace_seconds=1",
)
ENVIRON = {"TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}


def train(run_dir: Path, *words: str, ranks: int | None = 2, seconds: float = 150) -> tuple[int, str]:
    """Return the exit code and the output of a run."""
    argv = command("python", TRAIN, *KEYS, *words, f"run.dir={run_dir}", ranks=ranks)
    with RunningCommand(argv, run_dir, cwd=run_dir.parent, environ=ENVIRON) as started:
        code = started.wait_for_exit(seconds)
        started.wait_until_gone(15)
        return code, started.output


def line_of(text: str) -> int:
    lines = Path(FILE).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def check_failure(run_dir: Path, code: int, output: str, line: int) -> None:
    assert code == 1, output
    assert output.count("Traceback (most recent call last)") == 1, output
    assert re.search(rf"{re.escape(FILE)}[:\", line]+{line}\b", output), output
    status = read_status(run_dir)
    assert status is not None
    assert (status.state, status.exit_code) == (RunState.FAILED, 1)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_hook_that_raises_on_rank_1_ends_the_run_with_one_traceback(tmp_path: Path) -> None:
    hook = ("+hooks.mine.target=tests.train.user_code.Fails", "+hooks.mine.arguments={event: step, rank: 1}")
    code, output = train(tmp_path / "run", *hook, "zero=stage1")
    check_failure(tmp_path / "run", code, output, line_of('raise KeyError("lost")'))
    assert f"hooks.mine.on_step ({FILE}:{line_of('class Fails')}) raised this error in" in output


@pytest.mark.full
@pytest.mark.timeout(200)
def test_dataset_that_raises_on_rank_1_is_named_with_its_line(tmp_path: Path) -> None:
    code, output = train(
        tmp_path / "run", "zero=stage1", "data.workers=2", "+data.arguments.bad=2", "eval.every=0"
    )
    assert code == 1, output
    assert f"raised OSError in {FILE}:{line_of('raise OSError')} when reading sample 2" in output
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status.state is RunState.FAILED


@pytest.mark.full
@pytest.mark.timeout(200)
def test_hook_that_blocks_is_named_in_the_report_of_the_hang(tmp_path: Path) -> None:
    hook = (f"+hooks.mine.target={CODE}.Sleeps", "+hooks.mine.arguments.seconds=1000")
    code, output = train(tmp_path / "run", *hook, "zero=stage1", "monitor.hang_seconds=5")
    assert code == 1, output
    directory = RunDirectory(tmp_path / "run")
    text = directory.hang_file(1).read_text()
    assert "rank 1 is in hooks.mine.on_step" in text, text
    assert f"user_code.py:{line_of('time.sleep(self.seconds)')}" in text, text


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def evaluations(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "eval.jsonl").read_text().splitlines()]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["Table", "StatefulRows"])
def test_layouts_have_equal_losses_and_continue_each_other_with_the_state_of_hooks(
    target: str, tmp_path: Path
) -> None:
    """Local, ZeRO 2 and ZeRO 3; ZeRO 2 resumed as ZeRO 3 and locally, with a hook on rank 1 only."""
    data = f"data.target={CODE}.{target}"
    hook = (f"+hooks.mine.target={CODE}.Recorder", "+hooks.mine.ranks=first")
    assert train(tmp_path / "local", data, *hook, "engine=local", ranks=None)[0] == 0
    expected = losses(tmp_path / "local")
    assert expected[-1] < expected[0]
    second = ("+hooks.second.target=tests.train.user_code.Recorder", "+hooks.second.ranks=[1]")
    for zero in ("stage2", "stage3"):
        code, output = train(tmp_path / zero, data, *hook, *second, f"zero={zero}")
        assert code == 0, output
        assert losses(tmp_path / zero) == pytest.approx(expected, rel=1e-5)
        assert evaluations(tmp_path / zero) == pytest.approx(evaluations(tmp_path / "local"), rel=1e-5)
        assert "only rank 0 records them" in output

    half = tmp_path / "half"
    assert train(half, data, *hook, *second, "zero=stage2", f"train.steps={STEPS // 2}")[0] == 0
    assert hook_states(half)["second"]["steps"] == STEPS // 2
    for name, words, ranks in (("as_zero3", ["zero=stage3"], 2), ("as_local", ["engine=local"], None)):
        shutil.copytree(half, tmp_path / name)
        code, output = train(tmp_path / name, data, *hook, *(second if ranks else ()), *words, ranks=ranks)
        assert code == 0, output
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-5)
        assert hook_states(tmp_path / name)["mine"]["steps"] == STEPS
        if ranks:
            assert hook_states(tmp_path / name)["second"]["steps"] == STEPS

    # The control: a slightly smaller learning rate.
    other = tmp_path / "other"
    assert train(other, data, "engine=local", "optim.lr=0.049", ranks=None)[0] == 0
    assert losses(other) != pytest.approx(expected, rel=1e-5)


def hook_states(run_dir: Path) -> dict[str, Any]:
    found: Any = open_reader(run_dir).scalars["hooks"]
    return dict(found)
