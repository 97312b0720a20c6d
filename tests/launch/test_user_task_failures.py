"""A task or metric that fails ends the run on all ranks, with one message that names its line.

pytest tests/launch/test_user_task_failures.py             an exception on rank 1
pytest tests/launch/test_user_task_failures.py -m full     every failure
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launch import broken_tasks
from tests.launch.processes import ROOT, TRAIN, RunningCommand, command, read_status
from toolkit.errors import ExitCode
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory

HERE = "tests.launch.broken_tasks"
FILE = re.escape(str(Path(broken_tasks.__file__).resolve()))
KEYS = (
    "model=custom",
    f"model.target={HERE}.network",
    "data=custom",
    f"data.target={HERE}.Table",
    "train.steps=6",
    "train.global_batch=8",
    "eval.every=4",
    "zero=stage2",
    "schedule=constant",
    "monitor=files",
    "debug.threads=1",
    "cluster.restarts=0",
)
TASK, METRIC = f"task.target={HERE}.Regression", f"+metrics.error.target={HERE}.Error"


def fail(tmp_path: Path, *overrides: str) -> tuple[int, str, Path]:
    """Return the exit code, the output and the run directory of a run on two ranks."""
    run_dir = tmp_path / "run"
    argv = command("python", TRAIN, *KEYS, f"run.dir={run_dir}", *overrides)
    environ = {"PYTHONPATH": str(ROOT)}  # for the package tests
    with RunningCommand(argv, run_dir, cwd=tmp_path, environ=environ) as started:
        code = started.wait_for_exit(120)
        started.wait_until_gone()
        return code, started.output, run_dir


@pytest.mark.full  # hooks have a quick test of the same: test_user_code.py
@pytest.mark.timeout(180)
def test_exception_on_rank_1_ends_all_ranks_with_one_traceback(tmp_path: Path) -> None:
    code, output, run_dir = fail(tmp_path, TASK, "+task.arguments.where=loss_sum")
    assert code == ExitCode.FAILURE, output
    assert output.count("Traceback") == 1, output
    assert re.search(r"rank 1: .*Traceback.*ArithmeticError: broken on rank 1 only", output, re.DOTALL)
    assert re.search(rf"task.target \({FILE}:\d+\) raised this error in {FILE}:\d+", output), output
    assert len(list(read_rows(RunDirectory(run_dir).metrics_file))) == 2, "two steps were completed"


CASES: dict[str, tuple[tuple[str, ...], ExitCode, str]] = {
    "wrong signature": (
        (f"task.target={HERE}.WrongSignature",),
        ExitCode.USER,
        rf"its loss_sum\(self, batch.* \({FILE}:\d+\) does not fit",
    ),
    "a batch that is no dict on rank 1": (
        (TASK, "+task.arguments.where=collate"),
        ExitCode.USER,
        rf"rank 1: .*its collate \({FILE}:\d+\) returned a list",
    ),
    "a metric's update on rank 1": (
        (TASK, METRIC, "+metrics.error.arguments.where=update"),
        ExitCode.FAILURE,
        rf"metrics.error \({FILE}:\d+\) raised this error in {FILE}:\d+",
    ),
    "a metric's result on rank 1": (
        (TASK, METRIC, "+metrics.error.arguments.where=compute"),
        ExitCode.FAILURE,
        rf"metrics.error \({FILE}:\d+\) raised this error in {FILE}:\d+",
    ),
    "a metric that is NaN": (
        (TASK, METRIC, "+metrics.error.arguments.where=no_number"),
        ExitCode.USER,
        rf"metrics.error.target=.*compute \({FILE}:\d+\) returned nan for error",
    ),
}


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES)
def test_failures_are_named_once_and_end_all_ranks(case: str, tmp_path: Path) -> None:
    overrides, expected, message = CASES[case]
    code, output, run_dir = fail(tmp_path, *overrides)
    assert code == expected, output
    assert output.count("Traceback") == (expected is ExitCode.FAILURE), output
    assert len(re.findall(message, output)) == 1, output
    status = read_status(run_dir)
    assert status is not None
    assert status.exit_code == expected
    if case == "wrong signature":
        assert not RunDirectory(run_dir).metrics_file.exists(), "refused before a rank started"


@pytest.mark.full
@pytest.mark.timeout(180)
def test_nan_is_recorded_if_the_run_continues(tmp_path: Path) -> None:
    arguments = (TASK, METRIC, "+metrics.error.arguments.where=no_number", "train.on_nonfinite=skip")
    code, output, run_dir = fail(tmp_path, *arguments)
    assert code == ExitCode.DONE, output
    assert [row["step"] for row in read_rows(RunDirectory(run_dir).eval_file)] == [4, 6]
    assert "returned nan for error" in output
