"""Repeating the command of a finished run exits with 0 and a message before any rank trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.processes import FAKE, RunningCommand, command, read_status
from tests.rundir.runs import make_checkpoint
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState

WORDS = ("+exp=quickstart", "train.steps=3")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "launcher",
    ["python", *(pytest.param(name, marks=pytest.mark.full) for name in ("deepspeed", "torchrun"))],
)
def test_finished_run_exits_without_changes(launcher: str, tmp_path: Path) -> None:
    from toolkit.config.compose import compose

    run_dir = tmp_path / "run"
    directory = RunDirectory(run_dir)
    directory.begin(compose([*WORDS, f"run.dir={run_dir}"]), {})
    directory.release()
    make_checkpoint(directory, "step-00000003")
    directory.finish(RunState.DONE, 0, None, attempt=1)
    before = read_status(run_dir)
    with RunningCommand(
        command(launcher, FAKE, *WORDS, "zero=stage3", f"run.dir={run_dir}"), run_dir, cwd=tmp_path
    ) as started:
        assert started.wait_for_exit(120) == 0, started.output
        started.wait_until_gone(15)
    assert started.output.count("nothing to do: 3 of 3 steps of") == 1, started.output
    assert "Traceback" not in started.output
    assert "attempt" not in started.output
    assert directory.attempts() == [1]
    assert read_status(run_dir) == before
