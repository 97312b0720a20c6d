"""The interval between saves that ``checkpoint.every=auto`` chooses.

pytest tests/estimate/test_save_interval.py
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from tests.plan.cases import CPU, h100s, run_config
from toolkit.estimate.plan_report import to_json
from toolkit.estimate.save_interval import (
    CPU_MTBF_HOURS,
    MAX_SECONDS,
    MIN_SECONDS,
    NODE_MTBF_HOURS,
    PAUSE_SECONDS,
    SaveCosts,
    choose_interval,
    first_costs,
    mean_between_failures,
    optimal_interval,
    prior_between_failures,
)
from toolkit.plan import make_plan

COSTS = SaveCosts(save=10.0, commit=30.0, restart=600.0, between_failures=20_000.0)


def test_interval_is_that_of_daly() -> None:
    assert choose_interval(COSTS) == optimal_interval(10, 20_000) == pytest.approx(622.6, rel=0.01)
    frequent = replace(COSTS, between_failures=3000.0)  # 4% of the time in saves, which failures justify
    assert choose_interval(frequent) == optimal_interval(10, 3000)
    share = frequent.share(choose_interval(frequent))
    assert share > max(frequent.share(choose_interval(frequent) * factor) for factor in (0.7, 1.4))


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"save": 0.01, "commit": 0.01}, MIN_SECONDS),
        ({"commit": 900.0}, 900.0),  # one save is in flight at a time
        ({"between_failures": 1e8}, MAX_SECONDS),
        ({"between_failures": 1e8, "save": 50.0, "commit": 50.0}, 5000.0),  # 1% of the time
        ({"between_failures": inf}, MAX_SECONDS),
    ],
)
def test_bounds_of_the_interval(changes: dict[str, float], seconds: float) -> None:
    assert choose_interval(replace(COSTS, **changes)) == seconds


def test_failure_rate_moves_from_the_assumption_to_what_is_observed() -> None:
    assert mean_between_failures(1000, 0, 0) == 1000
    assert mean_between_failures(1000, 1000, 0) == 2000, "a quiet time is evidence too"
    assert mean_between_failures(1000, 50, 2) == 350, "three failures in 1050 s"
    assert mean_between_failures(1e6, 1e7, 1000) == pytest.approx(1e4, rel=0.11)


def test_prior_is_that_of_the_plan() -> None:
    config = run_config(checkpoint__every="auto")
    assert prior_between_failures(make_plan(config, CPU)) == CPU_MTBF_HOURS * 3600
    nodes = {"train__global_batch": 32, "checkpoint__every": "auto"}
    assert prior_between_failures(make_plan(run_config(**nodes), h100s(16))) == NODE_MTBF_HOURS * 3600 / 2
    given = run_config(**nodes, cluster__node_mtbf_hours=100.0)
    assert prior_between_failures(make_plan(given, h100s(16))) == 100 * 3600 / 2


def test_plan_shows_the_first_interval() -> None:
    plan = make_plan(run_config(checkpoint__every="auto"), CPU)
    assert first_costs(plan).save == pytest.approx(PAUSE_SECONDS, rel=0.01)
    assert to_json(plan)["saves"]["first_auto_interval"] == choose_interval(first_costs(plan))
    fixed = make_plan(run_config(checkpoint__every="30min"), CPU)
    assert to_json(fixed)["saves"]["first_auto_interval"] is None


def test_checkpoint_of_unknown_size_is_assumed_to_be_small() -> None:
    plan = replace(make_plan(run_config(checkpoint__every="auto"), CPU), parameters=())
    assert first_costs(plan).save == PAUSE_SECONDS
