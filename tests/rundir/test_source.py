"""Where a run's state comes from.

    pytest tests/rundir/test_source.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rundir.runs import PLAN, begun, checkpoint, config
from toolkit.errors import CheckpointError, ConfigError, InputError, UserError
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.source import Source, SourceKind, resolve_source


def test_sources(tmp_path: Path) -> None:
    newest, other = tmp_path / "newest", tmp_path / "other"
    other.mkdir()
    assert resolve_source(config(), None) == Source(SourceKind.INITIAL)
    assert resolve_source(config(resume="never"), None) == Source(SourceKind.INITIAL)
    assert resolve_source(config(), newest) == Source(SourceKind.RESUME, newest)
    assert resolve_source(config(resume=str(other)), newest) == Source(SourceKind.RESUME, other)
    assert resolve_source(config(fork=other), None) == Source(SourceKind.FORK, other)
    assert resolve_source(config(fork=other), newest) == Source(SourceKind.RESUME, newest)  # a fork continues itself


@pytest.mark.parametrize(
    ("keys", "newest", "error", "named"),
    [
        ({"resume": "never"}, "step-10", ConfigError, "refuses to continue"),
        ({"resume": "/no/such"}, None, InputError, "resume=/no/such"),
        ({"fork": Path("/no/such")}, None, InputError, "run.fork=/no/such"),
        ({"fork": Path("/"), "resume": "/"}, None, ConfigError, "one state"),
    ],
)
def test_refused_sources(keys: dict[str, object], newest: str | None, error: type[UserError], named: str) -> None:
    with pytest.raises(error, match=named):
        resolve_source(config(**keys), Path(newest) if newest else None)  # type: ignore[arg-type]


def test_never_refuses_a_directory_with_checkpoints_before_anything_starts(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    assert directory.begin(config(resume="never"), PLAN) == 2
    directory.release()
    checkpoint(directory)
    with pytest.raises(ConfigError, match="refuses to continue"):
        directory.begin(config(resume="never"), PLAN)


def test_resuming_from_another_run_is_a_fork(tmp_path: Path) -> None:
    other = begun(tmp_path / "other", seed=1)
    saved = checkpoint(other)
    for path in (saved, other.path):
        with pytest.raises(CheckpointError, match=f"run.fork={path}"):
            RunDirectory(tmp_path / "run").begin(config(seed=2, resume=str(path)), PLAN)
    assert RunDirectory(tmp_path / "run").begin(config(seed=1, resume=str(saved)), PLAN) == 1


def test_a_fork_records_its_parent_and_keeps_it(tmp_path: Path) -> None:
    parent, another = begun(tmp_path / "parent", seed=1), begun(tmp_path / "another", seed=1)
    child = begun(tmp_path / "child", seed=2, fork=parent.path)
    assert json.loads((child.path / "fork.json").read_text()) == {"parent": str(parent.path), "attempt": 1}
    checkpoint(child)
    assert child.begin(config(seed=2, fork=parent.path), PLAN) == 2
    child.release()
    with pytest.raises(ConfigError, match="one parent"):
        child.begin(config(seed=2, fork=another.path), PLAN)


def test_a_run_with_steps_of_its_own_cannot_become_a_fork(tmp_path: Path) -> None:
    parent, run = begun(tmp_path / "parent"), begun(tmp_path / "run")
    checkpoint(run)
    with pytest.raises(ConfigError, match="steps of its own"):
        run.begin(config(fork=parent.path), PLAN)


def test_a_fork_apart_from_its_parent(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    saved = checkpoint(directory)
    for path in (directory.path, saved):
        with pytest.raises(ConfigError, match=r"run\.name or run\.dir"):
            directory.begin(config(fork=path), PLAN)


@pytest.mark.parametrize("key", ["resume", "run.fork"])
def test_a_path_that_the_operating_system_refuses_is_named_by_its_key(key: str) -> None:
    long = "a" * 300
    given = config(resume=long) if key == "resume" else config(fork=Path(long))
    with pytest.raises(InputError, match="File name too long") as refused:
        resolve_source(given, None)
    assert refused.value.problems[0].key == key
