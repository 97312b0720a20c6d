"""The folder of a run: attempts, identity, and automatic restarts.

pytest tests/rundir/test_directory.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rundir.runs import PLAN, begin_run, config, make_checkpoint
from toolkit.errors import ConfigError, InputError
from toolkit.goodput import AttemptTimes, write_times
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status


def test_each_start_opens_an_attempt(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert directory.begin(config(steps=10), {"n": 1}) == 1
    directory.release()
    assert directory.begin(config(steps=20), {"n": 2}) == 2
    assert directory.attempts() == [1, 2]
    assert [json.loads((directory.attempt_folder(n) / "plan.json").read_text()) for n in (1, 2)] == [
        {"n": 1},
        {"n": 2},
    ]
    assert json.loads(directory.plan_file.read_text()) == {"n": 2}
    newest, first = directory.attempt_folder(2) / "config.yaml", directory.attempt_folder(1) / "config.yaml"
    assert directory.config_file.read_text() == newest.read_text() != first.read_text()
    assert directory.status() == Status(state=RunState.STARTING, attempt=2)


def test_other_run_is_rejected_without_writing(tmp_path: Path) -> None:
    directory = begin_run(tmp_path, seed=1)
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"seed") as refused:
        directory.begin(config(seed=2), PLAN)
    assert "run.fork" in str(refused.value)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert directory.attempts() == [1]


def test_folder_with_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "src").mkdir()
    with pytest.raises(InputError, match=r"contains notes\.txt, src, and no run") as refused:
        RunDirectory(tmp_path).begin(config(), PLAN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "src"]
    remedy = refused.value.problems[0].remedy.rpartition("run.dir=")[2]
    assert RunDirectory(remedy).begin(config(), PLAN) == 1, "the remedy works"


@pytest.mark.parametrize("entry", ["lock", "jobs", "attempts", "checkpoints", "lost+found", ".gitkeep"])
def test_prepared_folder_is_accepted(tmp_path: Path, entry: str) -> None:
    """A killed start leaves its lock, a submitted job its folder, a new disk lost+found; checkpoints may
    have been copied in.
    """
    if entry in ("lock", ".gitkeep"):
        (tmp_path / entry).touch()
    else:
        (tmp_path / entry).mkdir()
    assert RunDirectory(tmp_path).begin(config(), PLAN) == 1


def test_run_with_extra_files_continues(tmp_path: Path) -> None:
    begin_run(tmp_path, seed=1).release()
    (tmp_path / "notes.txt").write_text("mine")
    assert RunDirectory(tmp_path).begin(config(seed=1), PLAN) == 2


@pytest.mark.parametrize("name", ["/proc/x", "FILE", "FILE/x", "LONG"])
def test_os_errors_have_rule_and_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    path = Path(name.replace("FILE", str(tmp_path / "file")).replace("LONG", str(tmp_path / ("a" * 300))))
    with pytest.raises(InputError) as refused:
        RunDirectory(path).begin(config(), PLAN)
    (problem,) = refused.value.problems
    assert problem.key == "run.dir"
    assert "run.dir=FOLDER" in problem.remedy


# ---- automatic restarts


def test_lock_holder_opens_next_attempt(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.begin(config(), PLAN) == 1
    assert directory.begin(config(), PLAN) == 2
    with pytest.raises(ConfigError, match="one run at a time"):
        RunDirectory(tmp_path).begin(config(), PLAN)


def test_start_removes_what_killed_writers_left(tmp_path: Path) -> None:
    """Only of files that no process without the lock writes."""
    directory = begin_run(tmp_path / "run")
    make_checkpoint(directory)
    left = [
        tmp_path / "run" / name
        for name in (
            ".status.json.0a1b2c3d.writing",
            ".metrics.jsonl.0a1b2c3d.writing",
            "checkpoints/.latest.0a1b2c3d.writing",
            "attempts/001/.times.json.0a1b2c3d.writing",
        )
    ]
    other = tmp_path / "run" / ".report.html.0a1b2c3d.writing"
    for file in (*left, other):
        file.touch()
    begin_run(tmp_path / "run")
    assert [file for file in (*left, other) if file.exists()] == [other]
    assert directory.status_file.exists()


def test_resume_option_applies_to_first_attempt_only(tmp_path: Path) -> None:
    """Following resume=PATH again would lose later steps."""
    directory = begin_run(tmp_path)
    resumed, never = config(resume="/a/checkpoint"), config(resume="never")
    assert directory.config_for_restart(resumed, 1) == resumed, "it never got to train"
    write_times(directory.attempt_folder(1), AttemptTimes(began=1.0, seen=2.0, first=40))
    assert directory.config_for_restart(resumed, 1).resume == "auto"
    assert directory.config_for_restart(never, 1).resume == "auto"
    assert directory.config_for_restart(resumed, 0) == resumed, "a person typed it"
