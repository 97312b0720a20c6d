"""A command whose budget is spent stops with a save, is not restarted, and refuses to start again.

pytest tests/launch/test_budget_run.py -m full
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.processes import TRAIN, RunningCommand, command, read_status
from tests.launch.tiny_runs import KEYS, STEPS, read_losses
from toolkit.cluster.jobs.requeue import JobBaseline, NextAction, StopSignal, decide_requeue, read_outcome
from toolkit.errors import ExitCode
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

SECOND = "budget.gpu_hours=0.0001"  # less than half a second of a rank: one step, on any machine


@pytest.mark.full  # in this process: tests/train/test_budget.py
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("launcher", "words", "ranks"), [("python", ("engine=local",), 1), ("torchrun", ("engine=megatron",), 2)]
)
def test_budget_stops_the_run_once_and_a_larger_one_continues(
    launcher: str, words: tuple[str, ...], ranks: int, data: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    own = [key for key in KEYS if not key.startswith(("eval.every", "cluster.restarts"))]
    keys = (*own, *words, f"data.path={data}", f"run.dir={run_dir}", "eval.every=3", "cluster.restarts=3")

    def start(*more: str) -> tuple[int, str]:
        argv = command(launcher, TRAIN, *keys, *more, ranks=ranks)
        if launcher == "torchrun":
            argv[1:1] = ["--max_restarts", "3"]
        with RunningCommand(argv, run_dir, cwd=tmp_path) as started:
            code = started.wait_for_exit(280)
            started.wait_until_gone(60)
            return code, started.output

    code, output = start(SECOND)
    directory, status = RunDirectory(run_dir), read_status(run_dir)
    assert code == ExitCode.STOPPED or (launcher == "torchrun" and code != 0), output
    assert status is not None
    assert (status.state, status.exit_code, status.step) == (RunState.STOPPED, 75, 1), output
    assert status.reason is not None
    assert status.reason.startswith(f"{SECOND}: ")
    assert directory.attempts() == [1], "it was not restarted"
    assert directory.saved_step() == 1
    assert [row["step"] for row in map(json.loads, directory.eval_file.read_text().splitlines())] == [1]
    outcome = read_outcome(run_dir, StopSignal.NONE, code)
    assert decide_requeue(JobBaseline(), outcome, restarts=3, requeue=True).next is NextAction.END

    code, output = start(SECOND)
    assert code == ExitCode.USER or (launcher == "torchrun" and code != 0), output
    assert "there is no time left for another one" in output
    assert "remedy: raise the budget: budget.gpu_hours=" in output
    assert directory.attempts() == [1]

    code, output = start("budget.gpu_hours=100")
    assert code == ExitCode.DONE, output
    assert [step for step, _ in read_losses(directory.metrics_file)] == list(range(1, STEPS + 1))
