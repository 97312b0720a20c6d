"""With ``checkpoint.every=auto`` the interval follows measured saves and failures, and losses stay equal.

pytest tests/train/test_auto_interval.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.fakes import FakeClock
from tests.train.user_run import UserRun
from toolkit.config.checkpoint import Cadence
from toolkit.config.schema import RunConfig
from toolkit.estimate import save_interval
from toolkit.estimate.save_interval import CPU_MTBF_HOURS, PAUSE_SECONDS, optimal_interval
from toolkit.goodput import Attempt, AttemptTimes, SaveRecord, read_times
from toolkit.monitor.health.checkpoints import LateCheckpoint
from toolkit.monitor.sink import Kind
from toolkit.rundir.status import RunState
from toolkit.rundir.usage import AttemptUsage
from toolkit.testing.tiny import tiny_plan
from toolkit.train.auto_interval import AutoInterval, ChosenInterval, interval_from_history
from toolkit.train.saving import SaveTimer

DAY = CPU_MTBF_HOURS * 3600
FAILED = AttemptUsage(
    Attempt(
        AttemptTimes(
            began=0,
            seen=10_000,
            ended=10_000,
            first_step=50,
            active=9_000,
            state=RunState.FAILED.value,
            save_pause=4.0,
        ),
        (SaveRecord(step=8, seconds=5.0, bytes=1, stepping=1.0),),
    ),
    ranks=1,
    nodes=1,
)


def again(began: float) -> AttemptUsage:
    """The same attempt later, with a first step 100 s after its start."""
    times = FAILED.attempt.times
    end = began + 10_000
    moved = replace(times, began=began, seen=end, ended=end, first_step=began + 100, active=began + 9_000)
    return replace(FAILED, attempt=replace(FAILED.attempt, times=moved))


def test_first_interval_comes_from_the_plan() -> None:
    chosen = interval_from_history(tiny_plan(checkpoint__every="auto"), [], elapsed=0.0)
    assert chosen.seconds == pytest.approx(optimal_interval(PAUSE_SECONDS, DAY), rel=0.01)
    assert not chosen.measured
    assert "1 s (assumed)" in str(chosen)


def test_measured_saves_replace_the_assumption() -> None:
    plan = tiny_plan(checkpoint__every="auto")
    chosen = interval_from_history(plan, [], elapsed=0.0, paused=[9.0, 3.0, 2.0], committed=[9.0, 30.0, 30.0])
    assert (chosen.costs.save, chosen.costs.commit, chosen.measured) == (3.0, 30.0, True)
    assert chosen.seconds == optimal_interval(3.0, DAY)


def test_earlier_attempts_give_saves_failures_and_the_cost_of_a_restart() -> None:
    plan = tiny_plan(checkpoint__every="auto")
    chosen = interval_from_history(plan, [FAILED, again(11_000)], elapsed=500.0)
    assert (chosen.costs.save, chosen.costs.commit) == (4.0, 5.0)
    assert (chosen.failures, chosen.observed) == (2, 20_500)
    assert chosen.costs.between_failures == (DAY + 20_500) / 3
    assert chosen.costs.restart == 11_100 - 9_000
    quiet = interval_from_history(plan, [], elapsed=500.0, paused=[4.0])
    assert chosen.seconds < quiet.seconds, "failures make saves more frequent"
    assert "2 in 5:41:40 so far" in str(chosen)


def test_failures_on_more_nodes_count_as_many_hours() -> None:
    plan = tiny_plan(checkpoint__every="auto")
    wide = replace(FAILED, nodes=4)
    assert interval_from_history(plan, [wide], elapsed=0.0).observed == 40_000


def test_interval_is_chosen_after_each_save_and_logged_when_it_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, chosen = FakeClock(), list[ChosenInterval]()
    plan = tiny_plan(checkpoint__every="auto")
    auto = AutoInterval(plan, [], began=clock.now, apply=chosen.append, clock=clock)
    timer = SaveTimer(chosen[-1].seconds, clock)
    clock.now += chosen[-1].seconds
    assert timer.due()
    for pause in (10.0, 10.5, 9.5):
        auto.on_save_start(1)
        auto.on_save_end(1, pause, 100)
        auto.on_save_blocked(pause)
    assert [each.costs.save for each in chosen[1:]] == [10.0, 10.25, 10.0]
    auto.on_save_blocked(500.0)  # the wait for a background save at the end
    assert len(chosen) == 4
    assert len([text for text in caplog.messages if "checkpoint.every=auto" in text]) == 2
    timer.seconds = chosen[-1].seconds
    assert not timer.due(), "the measured interval is longer"


def test_late_checkpoint_follows_the_interval() -> None:
    clock = FakeClock()
    late = LateCheckpoint(Cadence(auto=True), clock)
    late.saved(1)
    clock.now += 1000.0
    assert late.check(Kind.STEP, {"step": 9}) is None
    late.set_interval(100.0)
    assert late.check(Kind.STEP, {"step": 9}) is not None


# ---- whole runs


def automatic(config: RunConfig) -> None:
    config.checkpoint.every, config.checkpoint.keep_last = "auto", 100


def test_run_saves_by_itself_with_equal_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = UserRun(tmp_path / "plain", steps=12)
    monkeypatch.setattr(save_interval, "optimal_interval", lambda save, between_failures: 1e-6)
    rare = UserRun(tmp_path / "rare", automatic, steps=12)
    monkeypatch.setattr(save_interval, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(save_interval, "PAUSE_SECONDS", 0.0)  # the first save is due after the first step
    often = UserRun(tmp_path / "often", automatic, steps=12)
    assert rare.checkpoints() == [12], "the control: a minute has not passed"
    assert often.checkpoints()[0] == 1
    assert often.losses() == rare.losses() == plain.losses()
    times = read_times(often.directory.attempt_folder(1))
    assert times is not None
    assert times.save_pause is not None
    assert times.save_interval is not None
    assert 0 < times.save_interval < save_interval.MAX_SECONDS
    assert times.between_failures == pytest.approx(DAY, rel=0.01)
