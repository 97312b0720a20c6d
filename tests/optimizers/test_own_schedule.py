"""The user's own learning rate schedule: convention, checks before the start, and what a plan shows.

pytest tests/optimizers/test_own_schedule.py
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.optimizers.own_optimizers import by_samples, inverse_sqrt
from tests.plan.cases import CPU, run_config
from toolkit.config.optim import LrScaling, ScheduleConfig, ScheduleName
from toolkit.errors import ConfigError, PlanError
from toolkit.estimate.plan_report import _rates
from toolkit.plan import make_plan
from toolkit.plan.schedule import check_schedule, learning_rate
from toolkit.plan.types import RunPlan
from toolkit.user_code import check_user_code

OWN = "tests.optimizers.own_optimizers"


def plan_of(function: str, arguments: dict[str, Any] | None = None, **changes: Any) -> RunPlan:
    schedule = ScheduleConfig(name=ScheduleName.custom, target=f"{OWN}.{function}", arguments=arguments or {})
    return make_plan(run_config(schedule=schedule, **changes), CPU)


def test_rate_is_the_factor_of_the_scaled_peak() -> None:
    plan = plan_of(
        "inverse_sqrt",
        {"warmup": 4},
        optim__lr=1e-3,
        optim__lr_scaling=LrScaling.linear,
        optim__lr_reference_batch=4,
    )
    check_schedule(plan)
    peak = 1e-3 * plan.config.train.global_batch / 4
    assert [learning_rate(plan, step) for step in range(9)] == [
        pytest.approx(peak * inverse_sqrt(step, 0, warmup=4)) for step in range(9)
    ]
    assert learning_rate(plan, 0) == pytest.approx(peak / 4), "the first step is step 0"


def test_samples_are_those_before_the_step_also_in_a_batch_ramp() -> None:
    plan = plan_of(
        "by_samples",
        train__global_batch=16,
        train__micro_batch=2,
        train__batch_ramp__start=4,
        train__batch_ramp__increment=4,
        train__batch_ramp__samples=40,
    )
    assert len({plan.batch.at(step).size for step in range(20)}) > 2, "the batch grows"
    lr = plan.config.optim.lr
    for step in range(20):
        assert learning_rate(plan, step) == lr * by_samples(step, plan.batch.at(step).first_sample)


def test_plan_shows_the_rates() -> None:
    text = _rates(plan_of("inverse_sqrt", optim__lr=1e-2, train__steps=80))
    assert text.startswith(f"{OWN}.inverse_sqrt: 0.005 at step 0, 0.01 at step 1, ")
    assert text.endswith("at step 79")


@pytest.mark.parametrize(
    ("function", "arguments", "seen"),
    [
        ("nan_later", {}, r"returns nan for step \d+ after \d+ samples \(.*own_optimizers.py:\d+\)"),
        ("wrong_signature", {}, r"too many positional arguments \(.*own_optimizers.py:\d+\)"),
        ("inverse_sqrt", {"warmpu": 3}, r"unexpected keyword argument 'warmpu' \(.*own_optimizers.py:\d+\)"),
        ("impure", {}, r"different factors \(.*own_optimizers.py:\d+\)"),
        ("raises", {}, r"ZeroDivisionError: division by zero for step 0 .*own_optimizers.py:\d+\)"),
        ("Adagrad", {}, "it is a type"),
    ],
)
def test_mistakes_are_named_before_the_start(function: str, arguments: dict[str, Any], seen: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_schedule(plan_of(function, arguments))
    (problem,) = raised.value.problems
    assert problem.key == "schedule.target"
    assert re.search(seen, problem.seen), problem.seen


def test_name_is_checked_without_an_import() -> None:
    with pytest.raises(ConfigError, match=r"remedy: write schedule.target=.*\.inverse_sqrt"):
        check_user_code(plan_of("inverse_sqr").config)


@pytest.mark.parametrize(
    ("schedule", "rule"),
    [
        (ScheduleConfig(name=ScheduleName.custom), "belong to your own function"),
        (ScheduleConfig(arguments={"warmup": 3}), "belong to your own function"),
        (ScheduleConfig(target=f"{OWN}.by_samples"), "a schedule has one source"),
        (
            ScheduleConfig(name=ScheduleName.custom, target=f"{OWN}.by_samples", warmup=3, min_lr=1e-5),
            "computes the whole curve",
        ),
    ],
    ids=["no target", "no target with arguments", "two sources", "other settings"],
)
def test_settings_that_would_have_no_effect_are_refused(schedule: ScheduleConfig, rule: str) -> None:
    with pytest.raises(PlanError, match=rule):
        make_plan(run_config(schedule=schedule), CPU)
