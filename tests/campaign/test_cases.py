"""The choice of cases.

pytest tests/campaign/test_cases.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.faults.cases import DISTRIBUTED, LAYOUTS, MODEL, STEPS, RunLayout, choose_cases
from benchmarks.faults.catalogue import FAULTS, possible_faults
from benchmarks.faults.recovery import percentile
from toolkit.config.compose import compose
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World

ROOT = Path(__file__).resolve().parents[2]
CHOICES = {name: fault.choice for name, fault in FAULTS.items()}


def test_cases_follow_from_the_seed_and_a_longer_campaign_continues_a_shorter_one() -> None:
    cases = list(choose_cases(7, 60, CHOICES))
    assert cases == list(choose_cases(7, 60, CHOICES))
    assert cases[:20] == list(choose_cases(7, 20, CHOICES))
    assert cases != list(choose_cases(8, 60, CHOICES))


def test_each_class_occurs_once_before_any_occurs_again() -> None:
    cases = list(choose_cases(3, 2 * len(CHOICES), CHOICES))
    assert Counter(case.fault for case in cases[: len(CHOICES)]) == dict.fromkeys(CHOICES, 1)
    assert Counter(case.fault for case in cases) == dict.fromkeys(CHOICES, 2)


def test_cases_cover_layouts_launchers_and_moments() -> None:
    cases = list(choose_cases(1, 500, CHOICES))
    assert {case.layout for case in cases} == DISTRIBUTED.keys()
    assert {case.launcher for case in cases} == {"python", "torchrun", "deepspeed"}
    assert all(LAYOUTS[case.layout].nodes == FAULTS[case.fault].nodes for case in cases)
    assert all(case.launcher in FAULTS[case.fault].launchers for case in cases)
    eights = sum(LAYOUTS[case.layout].ranks == 8 for case in cases)
    assert 0 < eights < 30, "rare, because eight ranks need minutes on two cores"
    warm = [case for case in cases if case.warm]
    assert all(case.launcher == "python" and LAYOUTS[case.layout].ranks <= 4 for case in warm)
    assert len({case.fault for case in warm}) == sum(True in fault.warm for fault in FAULTS.values())
    assert all(case.warm for case in cases if case.fault in ("standby-killed", "snapshot-damaged"))
    killed = [case.warm for case in cases if case.fault == "rank-killed" and case.launcher == "python"]
    assert set(killed) == {True, False}
    moments = sorted(case.moment for case in cases)
    assert moments[0] < 2
    assert moments[-1] > STEPS - 4
    assert moments[len(moments) // 2] == pytest.approx(STEPS / 2, abs=2)


def test_class_without_a_fitting_layout_is_refused() -> None:
    layouts = {"dp2": LAYOUTS["megatron-dp2"]}
    with pytest.raises(ValueError, match="no layout of 2 nodes for link-cut-long"):
        list(choose_cases(1, 1, {"link-cut-long": CHOICES["link-cut-long"]}, layouts))


def test_unknown_class_is_refused() -> None:
    with pytest.raises(ValueError, match="no such class: rank-kiled"):
        possible_faults(["rank-kiled"])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_layouts_can_be_planned(layout: RunLayout, tmp_path: Path) -> None:
    config = compose([*MODEL, *layout.overrides, f"data.path={tmp_path}", f"run.dir={tmp_path / 'run'}"])
    world = World(ranks=layout.ranks, ranks_per_node=layout.ranks // layout.nodes, device=Device.CPU)
    assert make_plan(config, world).batch.global_batch == 24


def test_percentile_is_a_measured_value() -> None:
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.95) == 4.0
