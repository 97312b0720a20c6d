"""status.json: a run's status, and the recorded end of an attempt.

pytest tests/rundir/test_status.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.rundir.runs import begin_run, make_checkpoint
from toolkit.goodput import AttemptTimes, write_times
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status


def test_finish_keeps_step_and_checkpoint(tmp_path: Path) -> None:
    directory = begin_run(tmp_path)
    directory.write_status(
        Status(state=RunState.RUNNING, attempt=1, step=7, checkpoint="checkpoints/step-00000005")
    )
    directory.finish(RunState.STOPPED, 75, "SIGTERM", attempt=1)
    end = Status(
        state=RunState.STOPPED,
        attempt=1,
        exit_code=75,
        step=7,
        checkpoint="checkpoints/step-00000005",
        reason="SIGTERM",
    )
    assert directory.status() == end
    directory.finish(RunState.FAILED, 1, "later", attempt=1)
    assert directory.status() == end
    directory.finish(RunState.FAILED, 1, "the parent knows better", attempt=1, overwrite=True)
    after = directory.status()
    assert after is not None
    assert (after.state, after.step, after.reason) == (RunState.FAILED, 7, "the parent knows better")


def test_an_attempt_does_not_inherit_the_step_of_the_one_before(tmp_path: Path) -> None:
    directory = begin_run(tmp_path)
    directory.write_status(Status(state=RunState.DONE, attempt=1, exit_code=0, step=7))
    directory.finish(RunState.REFUSED, 2, "no data", attempt=2)
    assert directory.status() == Status(state=RunState.REFUSED, attempt=2, exit_code=2, reason="no data")


def test_status_is_none_before_a_run(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path).status() is None
    RunDirectory(
        tmp_path
    ).status_file.touch()  # as some file systems leave a file that was renamed and never synced
    assert RunDirectory(tmp_path).status() is None


def test_only_final_status_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running run writes its status every second."""
    directory = begin_run(tmp_path)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    directory.write_status(Status(state=RunState.RUNNING, attempt=1, step=3))
    assert not synced
    directory.write_status(Status(state=RunState.DONE, attempt=1, exit_code=0, step=3))
    assert len(synced) == 2


def test_finish_records_goodput(tmp_path: Path) -> None:
    directory = begin_run(tmp_path)
    write_times(
        directory.attempt_folder(1),
        AttemptTimes(
            began=100.0,
            seen=160.0,
            first=0,
            first_step=112.0,
            starting=10.0,
            step=20,
            stepping=40.0,
            active=160.0,
        ),
    )
    make_checkpoint(directory, "step-00000010")
    directory.write_status(Status(state=RunState.RUNNING, attempt=1, step=20))
    directory.finish(RunState.FAILED, 1, "rank 1", attempt=1)
    status = directory.status()
    assert status is not None
    assert status.goodput is not None
    assert status.goodput["useful_seconds"] == 20.0, "half of the steps will have to be run again"
    ended = json.loads((directory.attempt_folder(1) / "times.json").read_text())
    assert (ended["state"], ended["reason"]) == ("failed", "rank 1")
    assert ended["ended"] > 160.0
    assert directory.saved_step() == 10


def test_newest_checkpoint_is_that_of_the_last_step_whatever_else_is_in_the_folder(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert (directory.saved_step(), directory.newest_checkpoint()) == (None, None)
    for name in ("step-99999999", "step-100000000", "step-99999999.copy"):
        make_checkpoint(directory, name)
    assert directory.saved_step() == 100_000_000
    assert directory.newest_checkpoint() == directory.checkpoints / "step-100000000"


def test_unreadable_status_counts_as_no_step(tmp_path: Path) -> None:
    """The supervisor asks while healthy ranks train on a file system that fails for a moment."""
    directory = RunDirectory(tmp_path)
    directory.write_status(Status(state=RunState.RUNNING, attempt=1, step=7))
    assert directory.has_stepped(1), "control"
    directory.status_file.write_text("{")
    assert not directory.has_stepped(1)
    directory.status_file.unlink()
    directory.status_file.mkdir()  # reading it raises an OSError
    assert not directory.has_stepped(1)
