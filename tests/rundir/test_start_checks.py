"""A start in an existing run: whether there is anything to do, and whether its learning rate changes.

pytest tests/rundir/test_start_checks.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rundir.runs import begin_run, config, make_checkpoint
from toolkit.config.checkpoint import CheckpointConfig
from toolkit.config.optim import ScheduleConfig
from toolkit.config.schema import EvalConfig, RunConfig
from toolkit.errors import Severity
from toolkit.plan.schedule import scheduled_rate
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.start_checks import NothingToDo, check_remaining_work, schedule_warning
from toolkit.rundir.status import RunState


def ended(path: Path, state: RunState = RunState.DONE, *, steps: int = 10, saved: int = 10) -> RunDirectory:
    directory = begin_run(path, steps=steps)
    make_checkpoint(directory, f"step-{saved:08d}")
    directory.finish(state, 0, None, attempt=1)
    return directory


@pytest.mark.parametrize(
    ("steps", "words"), [(10, "10 of 10 steps of"), (6, "10 steps, more than train.steps=6, of")]
)
def test_a_finished_run_has_nothing_to_do(tmp_path: Path, steps: int, words: str) -> None:
    directory = ended(tmp_path / "run")
    with pytest.raises(NothingToDo, match=r"^nothing to do: ") as nothing:
        check_remaining_work(config(steps=steps), directory)
    assert words in str(nothing.value)
    assert "train.steps=20" in str(nothing.value)


@pytest.mark.parametrize(
    "given",
    [
        config(steps=11),
        config(resume="runs/elsewhere"),
        replace(config(), eval=EvalConfig(every=5)),
        replace(config(), checkpoint=CheckpointConfig(export=True)),
    ],
    ids=["more steps", "back to a checkpoint", "another evaluation", "export"],
)
def test_finished_run_with_new_evaluation_starts(tmp_path: Path, given: RunConfig) -> None:
    check_remaining_work(given, ended(tmp_path / "run"))


def test_run_failed_after_last_save_starts(tmp_path: Path) -> None:
    check_remaining_work(config(), ended(tmp_path / "run", RunState.FAILED))


def test_run_without_last_save_starts(tmp_path: Path) -> None:
    check_remaining_work(config(), ended(tmp_path / "run", saved=8))


def test_first_start_is_needed(tmp_path: Path) -> None:
    check_remaining_work(config(), RunDirectory(tmp_path / "run"))


# ---- the schedule


def scheduled(steps: int, decay: int | None) -> RunConfig:
    return replace(config(steps=steps), schedule=ScheduleConfig(warmup=30, decay=decay, min_lr=2e-5))


def trained(path: Path, before: RunConfig) -> RunDirectory:
    """A run of ``before``, with a row for each of its steps."""
    directory = RunDirectory(path)
    directory.begin(before, {})
    directory.release()
    make_checkpoint(directory, f"step-{before.train.steps:08d}")
    rows = [{"step": step + 1, "lr": scheduled_rate(before, step)} for step in range(before.train.steps)]
    directory.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_changed_learning_rate_gives_warning(tmp_path: Path) -> None:
    directory = trained(tmp_path / "run", scheduled(100, None))
    warning = schedule_warning(scheduled(200, None), directory)
    assert warning is not None
    assert warning.severity is Severity.WARNING
    assert (
        f"step 100 was {scheduled_rate(scheduled(100, None), 99):.4g}, "
        f"and is {scheduled_rate(scheduled(200, None), 99):.4g}" in str(warning)
    )
    assert "schedule.decay=170" in warning.remedy
    assert f"run.fork={directory.path} schedule.decay=70" in warning.remedy


def test_fixed_decay_gives_no_warning(tmp_path: Path) -> None:
    directory = trained(tmp_path / "run", scheduled(100, 270))
    assert schedule_warning(scheduled(200, 270), directory) is None


def test_first_start_gives_no_schedule_warning(tmp_path: Path) -> None:
    assert schedule_warning(scheduled(200, None), RunDirectory(tmp_path / "run")) is None
