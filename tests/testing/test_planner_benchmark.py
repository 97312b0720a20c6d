"""The figures of benchmarks/planner_cpu.py, and that its layouts can be planned.

pytest tests/testing/test_planner_benchmark.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from toolkit.config.compose import compose
from toolkit.estimate.calibrated_profile import FACTORS, scale_profile
from toolkit.estimate.calibration_fit import CalibrationRun, fit_factors
from toolkit.estimate.profile import shipped_profile
from toolkit.estimate.step import estimate_step
from toolkit.estimate.types import StepEstimate
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World


@pytest.fixture(scope="module")
def planner(benchmarks: None) -> ModuleType:
    import planner_cpu

    return planner_cpu


def rows(seconds: list[float], predicted: list[float]) -> list[dict[str, object]]:
    return [
        {
            "description": "d",
            "layout": f"zero{index}",
            "seconds": measured,
            "predicted": estimate,
            "low": 0.9 * estimate,
            "high": 1.1 * estimate,
        }
        for index, (measured, estimate) in enumerate(zip(seconds, predicted, strict=True))
    ]


def test_figures_of_known_rows(planner: ModuleType) -> None:
    found = planner.summarise(rows([1.0, 2.0, 3.0, 4.0], [1.1, 2.0, 4.5, 4.0]))
    assert found["mean_absolute_error"] == pytest.approx((0.1 + 0 + 0.5 + 0) / 4)
    assert found["largest_error"] == pytest.approx(0.5)
    assert found["within_15_percent"] == 0.75
    assert found["kendall_tau"] == pytest.approx((5 - 1) / 6)
    assert found["good_choices"] == 1.0
    assert "75% within 15%, mean error 15.0%. Kendall's tau 0.67. In 100% of" in planner.table_row(found)


def test_control_a_wrong_ranking_has_a_negative_tau_and_bad_choices(planner: ModuleType) -> None:
    found = planner.summarise(rows([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]))
    assert found["kendall_tau"] == -1.0
    assert found["good_choices"] == 0.0
    assert found["cases"][0] == {
        "description": "d",
        "fixed": "nothing",
        "chosen": "zero2",
        "best": "zero0",
        "regret": 2.0,
    }


def test_differences_within_the_noise_do_not_rank(planner: ModuleType) -> None:
    found = planner.summarise(rows([1.0, 1.01, 2.0], [1.0, 0.9, 2.0]))
    assert found["kendall_tau"] == pytest.approx(1 / 3)
    assert found["kendall_tau_beyond_noise"] == 1.0


def test_no_measured_layout_is_calibrated_on(planner: ModuleType) -> None:
    calibrated = {description.overrides for description in planner.CALIBRATED}
    assert not calibrated & {description.overrides for description in planner.DESCRIPTIONS}
    assert sum(len(description.layouts) for description in planner.DESCRIPTIONS) >= 20
    cases = {
        (description.name, *filter(allows, description.layouts))
        for description in planner.DESCRIPTIONS
        for allows in planner.FIXED.values()
    }
    assert sum(len(candidates) > 1 for _, *candidates in cases) >= 30


@pytest.mark.full
def test_every_layout_can_be_planned(planner: ModuleType) -> None:
    world = World(ranks=planner.RANKS, ranks_per_node=planner.RANKS, device=Device.CPU)
    for description in (*planner.DESCRIPTIONS, *planner.CALIBRATED):
        for layout in description.layouts:
            make_plan(compose(planner.run_overrides(description, layout, Path("runs/none"))), world)


@pytest.mark.full
@pytest.mark.parametrize("known", [True, False], ids=["all runs", "control: runs without ZeRO 3"])
def test_the_calibrated_layouts_determine_the_times_of_the_others(planner: ModuleType, known: bool) -> None:
    """On a machine that differs from the profile by planted factors. Without the runs under ZeRO 3, the time
    of its hooks stays that of the profile.
    """
    truth = {"matmul": 1.4, "memory": 0.6, "operator": 2.0, "collective": 1.7, "module": 2.0, "torch": 1.2}
    world = World(ranks=planner.RANKS, ranks_per_node=planner.RANKS, device=Device.CPU)
    shipped = shipped_profile("cpu")

    def estimator(description: Any, layout: str) -> Callable[[Mapping[str, float]], StepEstimate]:
        plan = make_plan(compose(planner.run_overrides(description, layout, Path("runs/none"))), world)

        def estimate(factors: Mapping[str, float]) -> StepEstimate:
            found = estimate_step(plan, scale_profile(shipped, factors))
            assert found is not None
            return found

        return estimate

    runs = []
    for description in planner.CALIBRATED:
        for layout in description.layouts:
            if known or "zero3" not in layout:
                estimate = estimator(description, layout)
                made = estimate(truth)
                runs.append(
                    CalibrationRun(name=layout, seconds=made.seconds, parts=made.parts, estimate=estimate)
                )
    factors = fit_factors(FACTORS, runs * planner.ROUNDS).factors
    errors = {
        (description.name, layout): estimate(factors).seconds / estimate(truth).seconds - 1
        for description in planner.DESCRIPTIONS
        for layout in description.layouts
        if known or layout == "zero3"
        for estimate in [estimator(description, layout)]
    }
    largest = max(map(abs, errors.values()))
    assert largest < 0.05 if known else largest > 0.15, errors
