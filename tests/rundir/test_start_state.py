"""The state that a run starts from.

pytest tests/rundir/test_start_state.py
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rundir.runs import PLAN, begin_run, config, make_checkpoint
from toolkit.checkpoint.directory import rewind_to_checkpoint
from toolkit.checkpoint_folder import NewestCheckpoint, find_newest, step_name
from toolkit.errors import CheckpointError, ConfigError, InputError, UserError
from toolkit.goodput import SAVES, AttemptTimes, SaveRecord, append_save, write_times
from toolkit.paths import Url
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.find import find_run
from toolkit.rundir.start_state import StartKind, StartState, resolve_start_state
from toolkit.rundir.status import RunState, Status


def test_resolve_start_state(tmp_path: Path) -> None:
    newest, other = tmp_path / "newest", tmp_path / "other"
    other.mkdir()
    assert resolve_start_state(config(), None) == StartState(StartKind.INITIAL)
    assert resolve_start_state(config(resume="never"), None) == StartState(StartKind.INITIAL)
    assert resolve_start_state(config(), newest) == StartState(StartKind.RESUME, newest)
    assert resolve_start_state(config(resume=str(other)), newest) == StartState(StartKind.RESUME, other)
    assert resolve_start_state(config(fork=other), None) == StartState(StartKind.FORK, other)
    assert resolve_start_state(config(fork=other), newest) == StartState(
        StartKind.RESUME, newest
    )  # a fork continues itself


def test_urls_are_sources_and_are_not_accessed(tmp_path: Path) -> None:
    url = Url("s3://bucket/mine")
    assert resolve_start_state(config(resume=f"{url}/"), None) == StartState(StartKind.RESUME, url)
    forks = config()
    forks.run.fork = str(url)
    assert resolve_start_state(forks, None) == StartState(StartKind.FORK, url)
    assert resolve_start_state(config(resume=f"file://{tmp_path}"), None).path == tmp_path
    with pytest.raises(InputError, match=r"resume=s3://\*\*\*@bucket/mine") as refused:
        resolve_start_state(config(resume="s3://user:hunter2@bucket/mine"), None)
    assert "hunter2" not in str(refused.value)
    directory = begin_run(tmp_path / "run")
    assert directory.begin(config(resume=str(url)), PLAN) == 2
    directory.release()


def test_a_run_that_continued_from_a_url_continues_from_it_until_its_next_save(tmp_path: Path) -> None:
    directory, url = begin_run(tmp_path / "run"), Url(f"s3://bucket/mine/{step_name(3)}-0123456789ab")
    rewind_to_checkpoint(directory.checkpoints, url, 3, tmp_path / "aside")
    assert find_newest(directory.checkpoints) == NewestCheckpoint(url)
    assert directory.newest_with_disagreements() == NewestCheckpoint(url)
    saved = make_checkpoint(directory, step_name(4))  # killed before it wrote ``latest``
    assert find_newest(directory.checkpoints) == NewestCheckpoint(saved)


@pytest.mark.parametrize(
    ("keys", "newest", "error", "named"),
    [
        ({"resume": "never"}, "step-10", ConfigError, "does not continue"),
        ({"resume": "/no/such"}, None, InputError, "resume=/no/such"),
        ({"fork": Path("/no/such")}, None, InputError, "run.fork=/no/such"),
        ({"fork": Path("/"), "resume": "/"}, None, ConfigError, "one state"),
    ],
)
def test_invalid_sources_are_rejected(
    keys: dict[str, object], newest: str | None, error: type[UserError], named: str
) -> None:
    with pytest.raises(error, match=named):
        resolve_start_state(config(**keys), Path(newest) if newest else None)  # type: ignore[arg-type]


def test_resume_never_rejects_existing_checkpoints(tmp_path: Path) -> None:
    directory = begin_run(tmp_path)
    assert directory.begin(config(resume="never"), PLAN) == 2
    directory.release()
    make_checkpoint(directory)
    with pytest.raises(ConfigError, match="does not continue"):
        directory.begin(config(resume="never"), PLAN)


# ---- files that do not agree


def trained(path: Path) -> RunDirectory:
    """A run that was killed at step 34, after saves of steps 10, 20 and 30."""
    directory = begin_run(path)
    for step in (10, 20, 30):
        saved = make_checkpoint(directory, step_name(step))
        append_save(directory.attempt_folder(1), SaveRecord(step=step, seconds=1.0, bytes=1, stepping=1.0))
    (directory.checkpoints / "latest").write_text(f"{saved.name}\n")
    write_times(directory.attempt_folder(1), AttemptTimes(began=1.0, seen=2.0, first=0))
    directory.metrics_file.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 35)))
    directory.write_status(Status(state=RunState.RUNNING, attempt=1, step=34, checkpoint=str(saved)))
    return directory


LOSSES: dict[str, tuple[Callable[[RunDirectory], object], str]] = {
    "the newest manifest": (
        lambda run: (run.checkpoints / step_name(30) / "manifest.json").unlink(),
        "step-00000030 has no manifest.json",
    ),
    "all manifests": (
        lambda run: [file.unlink() for file in run.checkpoints.glob("*/manifest.json")],
        "no complete checkpoint is in",
    ),
    "the newest checkpoint": (
        lambda run: shutil.rmtree(run.checkpoints / step_name(30)),
        "'step-00000030', which does not exist",
    ),
    "the newest checkpoint and the pointer": (
        lambda run: (shutil.rmtree(run.checkpoints / step_name(30)), (run.checkpoints / "latest").unlink()),
        "status.json records that step 30 was saved",
    ),
    "the newest checkpoint, with an older pointer and no status": (
        lambda run: (
            shutil.rmtree(run.checkpoints / step_name(30)),
            (run.checkpoints / "latest").write_text(step_name(20)),
            run.status_file.write_text(""),
        ),
        "saves.jsonl records that step 30 was saved",
    ),
    "all checkpoints": (
        lambda run: shutil.rmtree(run.checkpoints),
        "status.json records that step 30 was saved",
    ),
    "everything but the rows": (
        lambda run: (
            shutil.rmtree(run.checkpoints),
            (run.attempt_folder(1) / SAVES).unlink(),
            run.status_file.unlink(),
        ),
        "metrics.jsonl has rows up to step 34",
    ),
}


@pytest.mark.parametrize("what", LOSSES)
def test_run_with_lost_files_is_rejected(what: str, tmp_path: Path) -> None:
    directory = trained(tmp_path)
    assert directory.newest_with_disagreements() == NewestCheckpoint(directory.checkpoints / step_name(30))
    lose, seen = LOSSES[what]
    lose(directory)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=re.escape(seen)) as refused:
        directory.begin(config(), PLAN)
    assert sorted(tmp_path.rglob("*")) == before
    assert "resume=never" in str(refused.value)
    words = re.findall(r"resume=(\S+step-\d+)", str(refused.value))
    assert bool(words) == any((tmp_path / "checkpoints").glob("*/manifest.json"))
    for word in (*words, "never"):  # the remedy works
        directory.check(config(resume=word))


LEFT: dict[str, tuple[Callable[[RunDirectory], object], int | None]] = {
    "a temporary folder": (lambda run: (run.checkpoints / ".tmp-step-00000040-attempt-001-4").mkdir(), 30),
    "a checkpoint that the pointer does not name yet": (lambda run: make_checkpoint(run, step_name(40)), 40),
    "a status that a power failure emptied": (lambda run: run.status_file.write_text(""), 30),
    "a status behind the checkpoint": (
        lambda run: run.write_status(
            Status(state=RunState.RUNNING, attempt=1, step=29, checkpoint=f"checkpoints/{step_name(20)}")
        ),
        30,
    ),
    "no checkpoint yet": (
        lambda run: (
            shutil.rmtree(run.checkpoints),
            (run.attempt_folder(1) / "saves.jsonl").unlink(),
            run.write_status(Status(state=RunState.RUNNING, attempt=1, step=34)),
        ),
        None,
    ),
    "later checkpoints that resume=PATH moved": (
        lambda run: (
            (run.checkpoints / step_name(30)).rename(
                _made(run.attempt_folder(1) / "checkpoints") / step_name(30)
            )
            and (run.checkpoints / "latest").write_text(step_name(20))
        ),
        20,
    ),
}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("what", LEFT)
def test_crash_leftovers_are_resumed(what: str, tmp_path: Path) -> None:
    directory = trained(tmp_path)
    leave, step = LEFT[what]
    leave(directory)
    directory.check(config())
    assert directory.newest_with_disagreements() == NewestCheckpoint(
        None if step is None else directory.checkpoints / step_name(step)
    )


def test_unreadable_status_is_rejected(tmp_path: Path) -> None:
    directory = trained(tmp_path)
    for text in ("{", "[]", '{"state": "asleep"}', '{"state": "done", "attempt": 1, "more": 1}'):
        directory.status_file.write_text(text)
        with pytest.raises(InputError, match=r"status.json cannot be read"):
            directory.check(config())


def test_resume_from_other_run_is_rejected(tmp_path: Path) -> None:
    other = begin_run(tmp_path / "other", seed=1)
    saved = make_checkpoint(other)
    for path in (saved, other.path):
        with pytest.raises(CheckpointError, match=f"run.fork={path}"):
            RunDirectory(tmp_path / "run").begin(config(seed=2, resume=str(path)), PLAN)
    assert RunDirectory(tmp_path / "run").begin(config(seed=1, resume=str(saved)), PLAN) == 1


def test_a_fork_records_its_parent_and_keeps_it(tmp_path: Path) -> None:
    parent, another = begin_run(tmp_path / "parent", seed=1), begin_run(tmp_path / "another", seed=1)
    child = begin_run(tmp_path / "child", seed=2, fork=parent.path)
    assert json.loads((child.path / "fork.json").read_text()) == {"parent": str(parent.path), "attempt": 1}
    make_checkpoint(child)
    assert child.begin(config(seed=2, fork=parent.path), PLAN) == 2
    child.release()
    with pytest.raises(ConfigError, match="one parent"):
        child.begin(config(seed=2, fork=another.path), PLAN)


def test_a_run_with_steps_of_its_own_cannot_become_a_fork(tmp_path: Path) -> None:
    parent, run = begin_run(tmp_path / "parent"), begin_run(tmp_path / "run")
    make_checkpoint(run)
    with pytest.raises(ConfigError, match="steps of its own"):
        run.begin(config(fork=parent.path), PLAN)


def test_fork_in_parent_folder_is_rejected(tmp_path: Path) -> None:
    directory = begin_run(tmp_path)
    saved = make_checkpoint(directory)
    for path in (directory.path, saved):
        with pytest.raises(ConfigError, match=r"run\.name or run\.dir"):
            directory.begin(config(fork=path), PLAN)


@pytest.mark.parametrize("key", ["resume", "run.fork"])
def test_invalid_path_is_reported_with_key(key: str) -> None:
    long = "a" * 300
    given = config(resume=long) if key == "resume" else config(fork=Path(long))
    with pytest.raises(InputError, match="File name too long") as refused:
        resolve_start_state(given, None)
    assert refused.value.problems[0].key == key


# ---- a run by its name


def test_run_name_resolves_to_directory(tmp_path: Path) -> None:
    hop = begin_run(tmp_path / "hop-0123abcd")
    begin_run(tmp_path / "hop-on-0123abcd")
    (tmp_path / "hop-deadbeef").mkdir()  # no run
    assert find_run(tmp_path / "hop", "source") == hop.path
    assert resolve_start_state(config(resume=str(tmp_path / "hop")), None) == StartState(
        StartKind.RESUME, hop.path
    )
    assert resolve_start_state(config(fork=tmp_path / "hop"), None) == StartState(StartKind.FORK, hop.path)


def test_existing_path_is_returned(tmp_path: Path) -> None:
    begin_run(tmp_path / "hop-0123abcd")
    own = begin_run(tmp_path / "hop")
    assert find_run(own.path, "source") == own.path
    assert find_run(tmp_path / "other", "source") == tmp_path / "other"
    assert find_run(tmp_path / "none" / "other", "source") == tmp_path / "none" / "other"


def test_ambiguous_run_name_is_rejected(tmp_path: Path) -> None:
    one, other = begin_run(tmp_path / "hop-0123abcd"), begin_run(tmp_path / "hop-89abcdef")
    with pytest.raises(InputError, match="2 runs") as refused:
        find_run(tmp_path / "hop", "source")
    assert str(one.path) in str(refused.value)
    assert str(other.path) in str(refused.value)
    assert f"write source={other.path}" in str(refused.value)


def test_a_fork_by_name_records_the_directory_as_its_parent(tmp_path: Path) -> None:
    parent = begin_run(tmp_path / "hop-0123abcd", seed=1)
    make_checkpoint(parent)
    child = begin_run(tmp_path / "child", seed=2, fork=tmp_path / "hop")
    assert json.loads(child.fork_file.read_text())["parent"] == str(parent.path)
