"""The learning rate of each step.

pytest tests/plan/test_schedule.py
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from tests.plan.cases import CPU, run_config
from toolkit.config.optim import LrScaling, ScheduleConfig, ScheduleName
from toolkit.plan import make_plan
from toolkit.plan.schedule import learning_rate, scheduled_rate


def rates(name: str, steps: int = 100, lr: float = 1.0, **values: Any) -> list[float]:
    schedule = ScheduleConfig(name=ScheduleName(name), **values)
    config = run_config(schedule=schedule, optim__lr=lr, train__steps=steps)
    return [scheduled_rate(config, step) for step in range(steps)]


def test_constant_stays_at_the_peak_after_warmup() -> None:
    found = rates("constant", warmup=4)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert set(found[4:]) == {1.0}


def test_linear_decays_in_equal_steps() -> None:
    found = rates("linear", warmup=20, min_lr=0.2)
    assert found[20] == 1.0
    assert all(a - b == pytest.approx(0.8 / 80) for a, b in pairwise(found[20:]))
    assert found[-1] == pytest.approx(0.2 + 0.8 / 80)


def test_cosine_is_half_way_in_the_middle_of_its_decay() -> None:
    found = rates("cosine", warmup=10, decay=40, min_lr=0.1)
    assert found[30] == pytest.approx(0.55)
    assert found[20] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert set(found[50:]) == {0.1}
    assert all(a >= b for a, b in pairwise(found[10:]))


def test_wsd_is_constant_until_its_decay() -> None:
    found = rates("wsd", warmup=10, decay=20)
    assert set(found[9:81]) == {1.0}
    assert found[90] == pytest.approx(0.5)
    assert found[99] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("scaling", "factor"), [(LrScaling.none, 1.0), (LrScaling.linear, 4.0), (LrScaling.sqrt, 2.0)]
)
def test_peak_scales_with_the_global_batch(scaling: LrScaling, factor: float) -> None:
    config = run_config(
        optim__lr=1e-3,
        optim__lr_scaling=scaling,
        optim__lr_reference_batch=2,
        train__global_batch=8,
        schedule__name=ScheduleName.constant,
    )
    assert scheduled_rate(config, 50) == pytest.approx(factor * 1e-3)


def test_rates_do_not_depend_on_the_order_of_calls() -> None:
    plan = make_plan(run_config(schedule__warmup=10), CPU)
    forward = [learning_rate(plan, step) for step in range(100)]
    assert [learning_rate(plan, step) for step in reversed(range(100))] == forward[::-1]
    assert len(set(forward[10:])) == 90
