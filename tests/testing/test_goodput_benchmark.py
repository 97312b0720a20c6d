"""The pure parts of benchmarks/goodput.py: random failures, figures of a calibration, and predictions.

pytest tests/testing/test_goodput_benchmark.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.estimate.test_goodput import simulated_share


@pytest.fixture(scope="module")
def model(benchmarks: None) -> ModuleType:
    from harness import failure_model

    return failure_model


@pytest.fixture(scope="module")
def goodput(benchmarks: None) -> ModuleType:
    import goodput

    return goodput


def cold(model: ModuleType) -> Any:
    return model.Figures(
        step=0.2, every=20, pause=0.3, lag=0.5, restart=12.0, unready_restart=12.0, rearm=0.0
    )


def warm(model: ModuleType) -> Any:
    return model.Figures(step=0.2, every=5, pause=0.1, lag=0.1, restart=3.0, unready_restart=12.0, rearm=15.0)


def test_a_seed_gives_one_schedule_with_the_mean_that_was_asked_for(model: ModuleType) -> None:
    failures = model.draw_failures(40.0, 40_000.0, ranks=2, seed=1)
    assert failures == model.draw_failures(40.0, 40_000.0, ranks=2, seed=1)
    assert failures != model.draw_failures(40.0, 40_000.0, ranks=2, seed=2)
    assert len(failures) == pytest.approx(1000, rel=0.1)
    assert [failure.at for failure in failures] == sorted(failure.at for failure in failures)
    assert failures[-1].at < 40_000
    assert {failure.rank for failure in failures} == {0, 1}


def test_without_failures_only_pauses_are_lost(model: ModuleType) -> None:
    figures = cold(model)
    assert model.predict(figures, inf) == pytest.approx(4 / 4.3)
    assert model.replay(figures, [], 430.0) == pytest.approx(4 / 4.3)


def test_one_failure_costs_its_restart_and_the_steps_since_the_save(model: ModuleType) -> None:
    figures = cold(model)
    # At 10 s two intervals of 4.3 s are saved, and 1.4 s of the third are lost.
    found = model.replay(figures, [model.Failure(10.0, 0)], 22.0 + 43.0)
    assert found * 65 == pytest.approx(2 * 4 + 10 * 4)
    # At 8.8 s the save of the second interval is not complete.
    found = model.replay(figures, [model.Failure(8.8, 0)], 20.8 + 43.0)
    assert found * 63.8 == pytest.approx(1 * 4 + 10 * 4)


def test_a_failure_soon_after_another_finds_no_standby(model: ModuleType) -> None:
    figures = warm(model)
    apart = model.replay(figures, [model.Failure(10.0, 0), model.Failure(40.0, 0)], 100.0)
    soon = model.replay(figures, [model.Failure(10.0, 0), model.Failure(20.0, 0)], 100.0)
    assert 100 * (apart - soon) == pytest.approx(12 - 3, abs=1.2)


@pytest.mark.parametrize("mean", [40.0, 120.0])
@pytest.mark.parametrize("contender", [cold, warm])
def test_the_prediction_is_within_a_point_of_random_schedules(
    model: ModuleType, contender: Any, mean: float
) -> None:
    figures = contender(model)
    average, _ = model.spread(figures, mean, 20_000.0, runs=60)
    assert model.predict(figures, mean) == pytest.approx(average, abs=0.01)
    free = replace(figures, restart=0.0, unready_restart=0.0)
    assert abs(model.predict(free, mean) - average) > 0.03, "the control: restarts that cost nothing"


def test_a_prediction_that_ignores_standbys_that_are_not_ready_is_wrong(model: ModuleType) -> None:
    figures = warm(model)
    average, _ = model.spread(figures, 40.0, 20_000.0, runs=60)
    assert model.predict(replace(figures, rearm=0.0), 40.0) - average > 0.03


def test_with_rare_failures_the_prediction_equals_the_planners_simulation(model: ModuleType) -> None:
    figures = replace(cold(model), step=6.0, lag=0.0)
    expected = simulated_share(120.0, 0.3, 12.0, 2000.0, segments=20_000)
    assert model.predict(figures, 2000.0) == pytest.approx(expected, abs=0.003)
    assert model.predict(figures, 1000.0) < expected - 0.03, "the control: twice as many failures"


def calibration(step: float, recorded: float, restart: float) -> dict[str, Any]:
    """Steps of which every fifth takes 0.5 s longer, and kills that each cost ``restart`` seconds."""
    pace = step + 0.1
    return {
        "gaps": [step + 0.5 * (number % 5 == 4) for number in range(100)],
        "recorded": [recorded] * 100,
        "lags": [0.7] * 20,
        "restarts": [
            {"seconds": restart + 10 * pace, "steps": 10, "recorded": 10 * recorded, "rearm": 9.0}
            for _ in range(3)
        ],
    }


def test_figures_of_a_calibration_are_those_that_were_planted(goodput: ModuleType) -> None:
    calibrations = {"cold": calibration(0.2, 0.19, 12.0), "warm": calibration(0.2, 0.19, 3.0)}
    by_steps = goodput.figures_of("warm", calibrations, "steps")
    assert by_steps.step == pytest.approx(0.2)
    assert by_steps.pause == pytest.approx(5 * 0.1)
    assert by_steps.lag == pytest.approx(0.2)
    assert (by_steps.restart, by_steps.unready_restart) == (pytest.approx(3.0), pytest.approx(12.0))
    by_record = goodput.figures_of("warm", calibrations, "record")
    assert by_record.step == pytest.approx(0.19)
    assert by_record.pause == pytest.approx(5 * 0.11)
    assert by_record.restart == pytest.approx(3.0)
    assert by_record.rearm == 9.0
    assert goodput.figures_of("cold", calibrations, "record").rearm == 0.0


def test_slow_steps_after_a_restart_cost_goodput_only_if_steps_are_counted(goodput: ModuleType) -> None:
    slow = calibration(0.2, 0.2, 3.0)
    for row in slow["restarts"]:  # ten steps of 0.5 s in place of 0.2 s
        row |= {"seconds": row["seconds"] + 3.0, "recorded": 5.0}
    assert goodput.restart_losses(slow, "steps") == pytest.approx([6.0] * 3)
    assert goodput.restart_losses(slow, "record") == pytest.approx([3.0] * 3)


def test_a_comparison_reports_differences_in_points(goodput: ModuleType, model: ModuleType) -> None:
    figures = cold(model)
    measured = model.replay(figures, [model.Failure(30.0, 0)], 120.0)
    row = goodput.compare(figures, measured, [30.0], [11.0, 13.0], mean=40.0, wall=120.0)
    assert row["points_off"]["replayed"] == pytest.approx(0)
    assert row["points_off"]["predicted"] == pytest.approx(100 * (row["predicted"] - measured))
    assert row["points_off"]["predicted"] < -5, "the schedule has one failure and not the expected three"
    assert abs(row["points_off"]["of_schedule"]) < 3
    assert "over 1 failures" in goodput.describe("cold", "record", row, 1)
    quiet = goodput.compare(figures, 0.9, [], [11.0, 13.0], mean=40.0, wall=120.0)
    assert quiet["of_schedule"] == pytest.approx(4 / 4.3)


def test_the_results_hold_both_contenders_in_both_accounts(
    goodput: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = []

    def calibrate(name: str, kills: int, seed: int, data: str) -> dict[str, Any]:
        seeds.append(seed)
        return calibration(0.2, 0.19, 12.0 if name == "cold" else 3.0)

    def measure(name: str, failures: list[Any], seconds: float, quiet: float, data: str) -> dict[str, Any]:
        return {
            "failures": [each.at for each in failures],
            "wall_seconds": seconds,
            "record": 0.6,
            "steps": 0.5,
        }

    monkeypatch.setattr(goodput, "calibrate", calibrate)
    monkeypatch.setattr(goodput, "measure", measure)
    out = tmp_path / "goodput.json"
    monkeypatch.setattr(sys, "argv", ["goodput.py", "--seed", "7", "--out", str(out)])
    goodput.main()
    found = json.loads(out.read_text())
    assert seeds == [8, 8], "the calibration does not have the seed of the measurement"
    for name in ("cold", "warm"):
        row = found["contenders"][name]
        assert (row["record"]["measured"], row["steps"]["measured"]) == (0.6, 0.5)
        assert 0 < row["record"]["predicted"] < 1
    assert len(capsys.readouterr().out.splitlines()) == 4
