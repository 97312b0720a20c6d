"""The folder of a run: attempts, identity, and starts that nobody typed.

    pytest tests/rundir/test_directory.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rundir.runs import PLAN, begun, config
from toolkit.attempts import Times, write_times
from toolkit.errors import ConfigError
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status


def test_each_start_is_an_attempt_and_the_top_holds_the_newest(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert directory.begin(config(steps=10), {"n": 1}) == 1
    directory.release()
    assert directory.begin(config(steps=20), {"n": 2}) == 2
    assert directory.attempts() == [1, 2]
    assert [json.loads((directory.attempt_folder(n) / "plan.json").read_text()) for n in (1, 2)] == [{"n": 1}, {"n": 2}]
    assert json.loads(directory.plan_file.read_text()) == {"n": 2}
    newest, first = directory.attempt_folder(2) / "config.yaml", directory.attempt_folder(1) / "config.yaml"
    assert directory.config_file.read_text() == newest.read_text() != first.read_text()
    assert directory.status() == Status(state=RunState.STARTING, attempt=2)


def test_another_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    directory = begun(tmp_path, seed=1)
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"seed") as refused:
        directory.begin(config(seed=2), PLAN)
    assert "run.fork" in str(refused.value)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert directory.attempts() == [1]


def test_a_folder_with_other_files_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert RunDirectory(tmp_path).begin(config(), PLAN) == 1


# ---- starts that nobody typed


def test_the_process_that_has_the_folder_opens_the_next_attempt(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.begin(config(), PLAN) == 1
    assert directory.begin(config(), PLAN) == 2
    with pytest.raises(ConfigError, match="one run at a time"):
        RunDirectory(tmp_path).begin(config(), PLAN)


def test_what_was_typed_for_the_first_attempt_is_not_done_again(tmp_path: Path) -> None:
    """After resume=PATH has been followed, going there again would lose what was done since."""
    directory = begun(tmp_path)
    went, never = config(resume="/a/checkpoint"), config(resume="never")
    assert directory.continued(went, 1) == went, "it never got to train"
    write_times(directory.attempt_folder(1), Times(began=1.0, seen=2.0, first=40))
    assert directory.continued(went, 1).resume == "auto"
    assert directory.continued(never, 1).resume == "auto"
    assert directory.continued(went, 0) == went, "a person typed it"
