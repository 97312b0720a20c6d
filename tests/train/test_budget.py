"""A run stops before it exceeds its budget, evaluated and saved, and continues with a larger one.

pytest tests/train/test_budget.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.train.fakes import FakeClock, completed_step
from tests.train.user_run import UserRun
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, ExitCode
from toolkit.goodput import Attempt, AttemptTimes
from toolkit.rundir.budget import check_budget
from toolkit.rundir.status import RunState, ended_by_budget
from toolkit.rundir.usage import AttemptUsage
from toolkit.testing.tiny import tiny_plan
from toolkit.train.budget import ENDING_SECONDS, BudgetWatch, StopCosts


def test_needed_time_counts_what_may_come_before_the_end() -> None:
    costs = StopCosts(step=10.0, evaluation=20.0, save=3.0, upload=100.0, ending=5.0)
    assert costs.needed(evaluation_due=False) == 10 + 20 + 2 * (3 + 100) + 5
    assert costs.needed(evaluation_due=True) == 10 + 40 + 2 * (3 + 100) + 5


def watch(
    clock: FakeClock,
    earlier: Sequence[AttemptUsage] = (),
    every: int = 4,
    upload: float = 0.0,
    **budget_keys: object,
) -> BudgetWatch:
    """The watch of an attempt on two ranks that began 50 s ago."""
    plan = tiny_plan(ranks=2, eval__every=every, eval__batches=3)
    for name, value in budget_keys.items():
        setattr(plan.config.budget, name, value)
    return BudgetWatch(
        plan,
        earlier,
        began=clock.now - 50.0,
        save_seconds=lambda: 2.0,
        upload_seconds=lambda: upload,
        clock=clock,
        now=lambda: datetime.fromtimestamp(clock.now, UTC),
    )


def steps_until_stop(watched: BudgetWatch, clock: FakeClock, seconds: float = 10.0, most: int = 500) -> int:
    """Make steps of ``seconds`` as the loop does; return the number of steps at which the run stops."""
    watched.on_start(0)
    for step in range(1, most):
        clock.now += seconds
        if watched.spent(step):
            return step
        watched.on_step(completed_step(step))
    return most


def test_run_stops_before_the_limit_with_time_for_step_evaluation_and_save() -> None:
    clock = FakeClock()
    watched = watch(clock, gpu_hours=1.0)  # 1800 s of two ranks, of which 50 s are over
    step = steps_until_stop(watched, clock)
    # An evaluation, which was never measured, is taken to need 30 s. One is due after this step, 1730 s after
    # the start; one step earlier none was.
    assert step == 168
    assert watched.costs().needed(evaluation_due=True) == 10 + 2 * 30 + 2 * 2 + ENDING_SECONDS > 1800 - 1730
    assert watched.reason is not None
    assert watched.reason.startswith("budget.gpu_hours=1: 0.9611 are used")
    assert "to continue, raise budget.gpu_hours" in watched.reason
    assert ended_by_budget(RunState.STOPPED, watched.reason)


def test_time_for_uploads_is_kept() -> None:
    without, slow = FakeClock(), FakeClock()
    steps = steps_until_stop(watch(without, gpu_hours=1.0), without)
    assert steps - steps_until_stop(watch(slow, gpu_hours=1.0, upload=100.0), slow) == 2 * 100 / 10


def test_earlier_attempts_count_with_their_ranks() -> None:
    times = AttemptTimes(began=0, seen=600, ended=600, active=580, state=RunState.STOPPED.value)
    earlier = [AttemptUsage(Attempt(times), ranks=4, nodes=1)]  # 2400 of 7200 device seconds
    fresh, resumed = FakeClock(), FakeClock()
    assert steps_until_stop(watch(fresh, gpu_hours=2.0), fresh) == 348
    # 1200 s less, of which 15 s more are kept, as the end of an attempt was measured
    assert steps_until_stop(watch(resumed, earlier, gpu_hours=2.0), resumed) == 228


def test_time_of_day_is_a_limit_and_the_first_limit_counts() -> None:
    clock = FakeClock()
    until = datetime.fromtimestamp(clock.now + 500, UTC).isoformat()
    watched = watch(clock, until=until, gpu_hours=1000.0)
    assert steps_until_stop(watched, clock) == 44
    assert watched.reason is not None
    assert watched.reason.startswith(f"budget.until={until}: in ")


def test_slow_start_and_pauses_do_not_count_as_steps() -> None:
    clock = FakeClock()
    watched = watch(clock, gpu_hours=100.0)
    watched.on_start(0)
    clock.now += 300.0  # with compilation
    assert not watched.spent(1)
    assert watched.costs().step == 300.0, "all that is known"
    watched.on_step(completed_step(1))
    watched.on_save_blocked(7.0)
    for seconds in (30.0, 12.0):
        watched.on_eval({"seconds": seconds})
    clock.now += 10.0 + 7.0 + 42.0
    assert not watched.spent(2)
    assert watched.costs() == StopCosts(
        step=10.0, evaluation=42.0, save=7.0, upload=0.0, ending=ENDING_SECONDS
    )


def test_without_evaluation_none_is_planned() -> None:
    clock = FakeClock()
    assert watch(clock, every=0, gpu_hours=100.0).costs().evaluation == 0.0


# ---- whole runs


def limited(hours: float) -> Callable[[RunConfig], None]:
    def change(config: RunConfig) -> None:
        config.budget.gpu_hours = hours

    return change


@pytest.fixture
def after_five(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the budget suffice for five steps, however fast the machine is."""
    calls = 0

    def fabricated(self: StopCosts, *, evaluation_due: bool) -> float:
        nonlocal calls
        calls += 1
        return 0.0 if calls < 5 else 1e6

    monkeypatch.setattr(StopCosts, "needed", fabricated)


@pytest.mark.usefixtures("after_five")
def test_run_within_a_budget_evaluates_saves_stops_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = UserRun(tmp_path / "run", limited(10.0), steps=9)
    assert stopped.code is ExitCode.STOPPED
    status = stopped.status
    assert (status.state, status.exit_code, status.step) == (RunState.STOPPED, 75, 5)
    assert status.reason is not None
    assert status.reason.startswith("budget.gpu_hours=10: ")
    assert stopped.checkpoints()[-1] == 5
    assert [row["step"] for row in stopped.rows("eval")] == [2, 4, 5], "evaluated where it stops"

    with pytest.raises(ConfigError, match=r"raise the budget: budget\.gpu_hours=20") as refused:
        check_budget(stopped.config, 1, stopped.directory)
    assert len(refused.value.problems) == 1
    monkeypatch.undo()
    check_budget(
        replace(stopped.config, budget=replace(stopped.config.budget, gpu_hours=20.0)), 1, stopped.directory
    )
    whole = UserRun(tmp_path / "whole", steps=9)
    resumed = UserRun(tmp_path / "run", limited(20.0), steps=9)
    assert resumed.code is ExitCode.DONE
    assert resumed.losses() == whole.losses()
    assert whole.rows("eval")[-1]["loss"] == resumed.rows("eval")[-1]["loss"]


def test_run_with_a_large_budget_completes(tmp_path: Path) -> None:
    """The control."""
    run = UserRun(tmp_path, limited(1000.0), steps=9)
    assert (run.code, run.status.reason) == (ExitCode.DONE, None)
