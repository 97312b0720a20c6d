"""The budget of a run compared with its prediction, in the plan.

pytest tests/estimate/test_budget.py
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.plan.cases import h100s, run_config
from toolkit.errors import Severity
from toolkit.estimate.budget import budget_limits, budget_warning, forecast_budget, format_budget
from toolkit.estimate.plan_report import format_plan, to_json, warn_about_budget
from toolkit.estimate.types import StepEstimate
from toolkit.plan import make_plan
from toolkit.plan.types import RunPlan

NOW = datetime(2027, 1, 1, tzinfo=UTC)
STEP = StepEstimate(seconds=36.0, low=30.0, high=40.0, parts={})  # 100 steps take an hour


def planned(**budget: object) -> RunPlan:
    config = run_config(monitor__price_per_gpu_hour=2.0, **{f"budget__{key}": budget[key] for key in budget})
    return make_plan(config, h100s(4))


def test_limits_are_hours_of_wall_time() -> None:
    plan = planned(usd=160.0, gpu_hours=60.0, until="2027-01-01T05:00+01:00")
    limits = budget_limits(plan.config, ranks=8, device_hours=20.0, now=NOW)
    assert [(limit.key, limit.hours_left) for limit in limits] == [
        ("budget.usd", (160 - 40) / 16),
        ("budget.gpu_hours", 5.0),
        ("budget.until", 4.0),
    ]
    later = budget_limits(plan.config, ranks=4, device_hours=20.0, now=NOW + timedelta(hours=5))
    assert [limit.hours_left for limit in later] == [15.0, 10.0, -1.0]
    assert budget_limits(planned().config, ranks=8, device_hours=0.0, now=NOW) == []


def test_forecast_names_the_step_at_which_the_budget_ends_the_run() -> None:
    plan = planned(usd=4.0, gpu_hours=100.0)
    small, large = forecast_budget(plan, STEP, now=NOW)
    assert small.exceeded
    assert not large.exceeded
    assert small.needed == pytest.approx(8, rel=0.02), "4 GPUs for an hour, and saves"
    assert (small.steps, large.steps) == (pytest.approx(50, abs=1), 100)
    warning = budget_warning(plan, [small, large])
    assert warning is not None
    assert (warning.key, warning.severity) == ("budget.usd", Severity.WARNING)
    assert f"write train.steps={small.steps}" in warning.remedy
    assert budget_warning(plan, [large]) is None
    rows = dict(format_budget(plan, [small, large]))
    assert rows["budget.usd"].startswith("4: the run costs 8")
    assert rows["budget.usd"].endswith(f"so it ends after about {small.steps} steps")
    assert rows["budget.gpu_hours"].startswith("100 GPU-hours: the run takes 4")


def test_forecast_of_a_resumed_run_counts_what_is_done() -> None:
    [resumed] = forecast_budget(planned(gpu_hours=4.0), STEP, device_hours=3.0, completed=80, now=NOW)
    assert resumed.needed == pytest.approx(0.8, rel=0.02)
    assert not resumed.exceeded
    [behind] = forecast_budget(planned(gpu_hours=4.0), STEP, device_hours=3.5, completed=80, now=NOW)
    assert (behind.exceeded, behind.steps) == (True, pytest.approx(92, abs=1))


def test_time_of_day_is_compared_with_the_duration() -> None:
    plan = planned(until="2027-01-01T00:30Z")
    [half] = forecast_budget(plan, STEP, now=NOW)
    assert (half.exceeded, half.steps) == (True, pytest.approx(50, abs=1))
    [(_, text)] = format_budget(plan, [half])
    assert text.startswith("2027-01-01T00:30Z, in 30:00: the run takes 1:0")
    [past] = forecast_budget(plan, STEP, now=NOW + timedelta(days=1))
    assert (past.steps, past.exceeded) == (0, True)


def test_plan_shows_the_budget_and_warns() -> None:
    plan = planned(gpu_hours=1e-6)
    shown = to_json(warn_about_budget(plan))
    assert [row["key"] for row in shown["budget"]] == ["budget.gpu_hours"]
    assert shown["warnings"][-1]["key"] == "budget.gpu_hours"
    assert to_json(planned())["budget"] == []
    assert warn_about_budget(planned(gpu_hours=1e9)).warnings == plan.warnings
    assert format_plan(plan) is not None
