"""The folder of a run: attempts, identity, status, metric rows, one writer, and where state comes from.

    pytest tests/test_rundir.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.attempts import Times, write_times
from toolkit.config.schema import RunConfig, RunSection, TrainConfig
from toolkit.errors import CheckpointError, ConfigError, InputError, UserError
from toolkit.rundir import RunDirectory, RunState, Source, SourceKind, Status, resolve_source

PLAN = {"identity": "0"}


def config(*, seed: int = 0, fork: Path | None = None, resume: str = "auto", steps: int = 10) -> RunConfig:
    return RunConfig(run=RunSection(fork=str(fork) if fork else None), resume=resume, train=TrainConfig(seed=seed, steps=steps))


def begun(path: Path, **keys: object) -> RunDirectory:
    """A directory with one ended attempt."""
    directory = RunDirectory(path)
    directory.begin(config(**keys), PLAN)  # type: ignore[arg-type]
    directory.release()
    return directory


def checkpoint(directory: RunDirectory, name: str = "step-00000010") -> Path:
    folder = directory.checkpoints / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


# ---- attempts


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


# ---- one writer


def test_a_second_live_run_is_refused_and_named(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.begin(config(), PLAN)
    pid = json.loads((tmp_path / "lock").read_text())["pid"]
    with pytest.raises(ConfigError, match=f"process {pid} on "):
        second.begin(config(), PLAN)
    first.release()
    assert second.begin(config(), PLAN) == 2


def test_a_killed_owner_is_taken_over(tmp_path: Path) -> None:
    code = "import os, sys; from tests.test_rundir import *; RunDirectory(sys.argv[1]).begin(config(), PLAN); os.kill(os.getpid(), 9)"
    root = Path(__file__).parents[1]
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, timeout=60, check=False)
    assert killed.returncode == -9
    directory = RunDirectory(tmp_path)
    assert directory.status() == Status(state=RunState.STARTING, attempt=1)
    assert directory.begin(config(), PLAN) == 2


def test_a_child_that_inherits_the_lock_keeps_it(tmp_path: Path) -> None:
    owner = RunDirectory(tmp_path)
    owner.begin(config(), PLAN)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[owner.lock_descriptor])
    try:
        owner.release()
        with pytest.raises(ConfigError, match="one run at a time"):
            RunDirectory(tmp_path).begin(config(), PLAN)
    finally:
        child.communicate(b"\n", timeout=30)
    assert RunDirectory(tmp_path).begin(config(), PLAN) == 2


# ---- status


def test_the_last_word_keeps_step_and_checkpoint(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    directory.write_status(Status(state=RunState.RUNNING, attempt=1, step=7, checkpoint="checkpoints/step-00000005"))
    directory.finish(RunState.STOPPED, 75, "SIGTERM", attempt=1)
    end = Status(state=RunState.STOPPED, attempt=1, exit_code=75, step=7, checkpoint="checkpoints/step-00000005", reason="SIGTERM")
    assert directory.status() == end
    directory.finish(RunState.FAILED, 1, "later", attempt=1)
    assert directory.status() == end
    directory.finish(RunState.FAILED, 1, "the parent knows better", attempt=1, anew=True)
    after = directory.status()
    assert after is not None
    assert (after.state, after.step, after.reason) == (RunState.FAILED, 7, "the parent knows better")


def test_an_attempt_does_not_inherit_the_step_of_the_one_before(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    directory.write_status(Status(state=RunState.DONE, attempt=1, exit_code=0, step=7))
    directory.finish(RunState.REFUSED, 2, "no data", attempt=2)
    assert directory.status() == Status(state=RunState.REFUSED, attempt=2, exit_code=2, reason="no data")


def test_no_status_before_a_run(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path).status() is None
    RunDirectory(tmp_path).status_file.touch()  # as some file systems leave a file that was renamed and never synced
    assert RunDirectory(tmp_path).status() is None


def test_only_the_end_of_a_run_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run under way writes its status every second."""
    directory = begun(tmp_path)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    directory.write_status(Status(state=RunState.RUNNING, attempt=1, step=3))
    assert not synced
    directory.write_status(Status(state=RunState.DONE, attempt=1, exit_code=0, step=3))
    assert len(synced) == 2


# ---- metric rows


def rows(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": step / 3}) + "\n" for step in steps)


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def two_attempts(path: Path) -> RunDirectory:
    directory = begun(path)
    assert directory.begin(config(), PLAN) == 2
    return directory


def test_rows_that_run_again_move_to_the_old_attempt(tmp_path: Path) -> None:
    directory = two_attempts(tmp_path)
    directory.metrics_file.write_text(rows(1, 2, 3, 4, 5))
    directory.eval_file.write_text(rows(2, 4))
    directory.trim_after(3, attempt=2)
    assert directory.metrics_file.read_text() == rows(1, 2, 3)
    assert steps_of(directory.attempt_folder(1) / "metrics.jsonl") == [4, 5]
    assert steps_of(directory.eval_file) == [2]
    assert steps_of(directory.attempt_folder(1) / "eval.jsonl") == [4]


@pytest.mark.parametrize("torn", ['{"step": 4, "lo', '{"step": 4}', "\x00\x00\x00", "[4]\n", '{"step": "4"}\n'])
def test_a_torn_last_row_is_dropped(tmp_path: Path, torn: str) -> None:
    directory = two_attempts(tmp_path)
    directory.metrics_file.write_text(rows(1, 2, 3) + torn)
    directory.trim_after(3, attempt=2)
    assert directory.metrics_file.read_text() == rows(1, 2, 3)


def test_bytes_that_are_no_text_are_dropped(tmp_path: Path) -> None:
    directory = two_attempts(tmp_path)
    directory.metrics_file.write_bytes(rows(1, 2).encode() + b'{"step": 3, "a": "\xff')
    directory.trim_after(2, attempt=2)
    assert directory.metrics_file.read_text() == rows(1, 2)


def test_trimming_twice_after_a_crash_between_the_files_keeps_each_row_once(tmp_path: Path) -> None:
    directory = two_attempts(tmp_path)
    directory.metrics_file.write_text(rows(1, 2, 3))
    (directory.attempt_folder(1) / "metrics.jsonl").write_text(rows(2, 3))  # as if the second write had not happened
    directory.trim_after(1, attempt=2)
    assert steps_of(directory.attempt_folder(1) / "metrics.jsonl") == [2, 3]
    assert steps_of(directory.metrics_file) == [1]


def test_nothing_to_trim_leaves_the_file_untouched(tmp_path: Path) -> None:
    directory = two_attempts(tmp_path)
    directory.metrics_file.write_text(rows(1, 2))
    inode = directory.metrics_file.stat().st_ino
    directory.trim_after(2, attempt=2)
    assert directory.metrics_file.stat().st_ino == inode
    assert not (directory.attempt_folder(1) / "metrics.jsonl").exists()


def test_a_run_without_metrics_has_nothing_to_trim(tmp_path: Path) -> None:
    two_attempts(tmp_path).trim_after(0, attempt=2)


# ---- where state comes from


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


def test_the_end_of_an_attempt_tells_the_goodput_of_the_run(tmp_path: Path) -> None:
    directory = begun(tmp_path)
    write_times(directory.attempt_folder(1), Times(
        began=100.0, seen=160.0, first=0, first_step=112.0, starting=10.0, step=20, stepping=40.0, active=160.0))
    checkpoint(directory, "step-00000010")
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
