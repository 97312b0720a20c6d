"""What earlier attempts used, and starts for which the budget leaves no time.

pytest tests/rundir/test_budget.py
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

import pytest

from tests.remedies import choices
from toolkit.config.compose import compose
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, ExitCode
from toolkit.goodput import AttemptTimes, write_times
from toolkit.rundir.budget import check_budget
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState
from toolkit.rundir.usage import device_hours, read_usage, restart_seconds

NOW = datetime(2027, 1, 1, tzinfo=UTC)
HOUR = 3600.0


@cache
def composed(*words: str) -> RunConfig:
    return compose(["+exp=quickstart", *words])


def config(folder: Path, *words: str) -> RunConfig:
    found = composed(*words)
    return replace(found, run=replace(found.run, dir=str(folder)))


def add_attempt(
    given: RunConfig,
    *,
    began: float,
    ended: float,
    ranks: int = 2,
    nodes: int = 1,
    first_step: float | None = None,
    active: float | None = None,
    state: RunState = RunState.FAILED,
    reason: str = "rank 1 was killed",
) -> None:
    directory = RunDirectory(str(given.run.dir))
    number = directory.begin(given, {"world": {"ranks": ranks, "nodes": nodes}})
    times = AttemptTimes(began=began, seen=ended, first_step=first_step, active=active)
    write_times(directory.attempt_folder(number), times)
    directory.finish(state, int(ExitCode.FAILURE), reason, attempt=number, at=ended)
    directory.release()


def test_usage_counts_ranks_of_every_attempt_and_failures_after_the_first_step(tmp_path: Path) -> None:
    given = config(tmp_path / "run")
    add_attempt(given, began=0, ended=HOUR, first_step=10, active=3000)
    add_attempt(given, began=2 * HOUR, ended=3 * HOUR, ranks=8, nodes=4)  # died before its first step
    add_attempt(given, began=4 * HOUR, ended=5 * HOUR, first_step=4 * HOUR + 60, state=RunState.STOPPED)
    usage = read_usage(RunDirectory(tmp_path / "run"))
    assert device_hours(usage) == 2 + 8 + 2, "time between attempts does not count"
    assert [each.failed for each in usage] == [True, False, False]
    assert [each.nodes for each in usage] == [1, 4, 1]
    assert restart_seconds(usage) is None, "the attempt after the failure made no step"
    add_attempt(given, began=5 * HOUR, ended=6 * HOUR, first_step=5 * HOUR + 40, active=5.5 * HOUR)
    add_attempt(given, began=7 * HOUR, ended=8 * HOUR, first_step=7 * HOUR + 20)
    usage = read_usage(RunDirectory(tmp_path / "run"))
    assert restart_seconds(usage) == 1.5 * HOUR + 20, "from the last step to the end of the next first step"
    assert len(read_usage(RunDirectory(tmp_path / "run"), before=3)) == 2


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("budget.gpu_hours=1.5", "budget.gpu_hours=4"),
        ("budget.gpu_hours=2", "budget.gpu_hours=4"),
        ("budget.until=2026-12-31T12:00Z", "budget.until=2027-01-02T00:00:00+00:00"),
        # 5 s are left, and a start took 10 s
        ("budget.until=2027-01-01T00:00:05Z", "budget.until=2027-01-02T00:00:05+00:00"),
    ],
)
def test_start_without_time_left_is_refused_with_a_remedy_that_works(
    tmp_path: Path, word: str, remedy: str
) -> None:
    folder = tmp_path / "run"
    given = config(folder, word)
    add_attempt(given, began=0, ended=HOUR, first_step=10)
    directory = RunDirectory(folder)
    with pytest.raises(ConfigError, match=r"a run ends before it exceeds its budget") as refused:
        check_budget(given, 2, directory, NOW)
    [problem] = refused.value.problems
    assert problem.seen.startswith(f"{word}: ")
    [choice] = choices(problem.remedy)
    [typed] = choice.words
    assert typed.startswith(remedy)
    check_budget(config(folder, typed), 2, directory, NOW)


def test_every_exhausted_limit_is_reported(tmp_path: Path) -> None:
    given = config(tmp_path / "run", "budget.gpu_hours=1", "budget.until=2026-12-31T12:00Z")
    add_attempt(given, began=0, ended=HOUR)
    with pytest.raises(ConfigError) as refused:
        check_budget(given, 2, RunDirectory(tmp_path / "run"), NOW)
    assert [problem.key for problem in refused.value.problems] == ["budget.gpu_hours", "budget.until"]


def test_budget_that_stopped_the_run_must_grow(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given, now = config(folder, "budget.gpu_hours=3"), NOW + timedelta(hours=1)
    reason = "budget.gpu_hours=3: 2 are used, and one more step may need 30:00"
    add_attempt(given, began=0, ended=HOUR, first_step=10, state=RunState.STOPPED, reason=reason)
    directory = RunDirectory(folder)
    with pytest.raises(ConfigError, match=r"raise the budget: budget\.gpu_hours=6"):
        check_budget(given, 2, directory, now)
    check_budget(config(folder, "budget.gpu_hours=6"), 2, directory, now)
    check_budget(config(folder), 2, directory, now)


def test_other_stops_leave_the_rest_of_the_budget(tmp_path: Path) -> None:
    """The control."""
    given = config(tmp_path / "run", "budget.gpu_hours=3")
    add_attempt(given, began=0, ended=HOUR, first_step=10, state=RunState.STOPPED, reason="SIGTERM")
    check_budget(given, 2, RunDirectory(tmp_path / "run"), NOW)
    check_budget(given, 2, RunDirectory(tmp_path / "another"), NOW)
