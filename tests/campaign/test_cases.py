"""The choice of cases, and the summary of their rows.

pytest tests/campaign/test_cases.py
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.campaign import Campaign
from benchmarks.faults.cases import DISTRIBUTED, LAYOUTS, MODEL, STEPS, Case, Choice, RunLayout, choose_cases
from benchmarks.faults.catalogue import FAULTS, Expected, possible_faults
from benchmarks.faults.recovery import percentile
from benchmarks.faults.report import (
    BEGIN,
    END,
    dominating_phase,
    replace_table,
    summarise,
    summarise_restarts,
    table,
)
from toolkit.config.compose import compose
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World

ROOT = Path(__file__).resolve().parents[2]
CHOICES = {name: Choice(fault.launchers, fault.nodes, fault.warm) for name, fault in FAULTS.items()}


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


def test_campaign_continues_after_the_rows_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def run(self: Campaign, case: Case) -> dict[str, Any]:
        ran.append(case.number)
        made = row(case.fault, 1.0, layout=case.layout)
        return {**made, "seconds": 2.0, **case.to_json()}

    monkeypatch.setattr(Campaign, "run", run)
    first = Campaign(7, tmp_path, [], []).go_on(3)
    assert [each["number"] for each in first] == ran == [0, 1, 2]
    assert Campaign(7, tmp_path, [], []).go_on(3) == first
    assert [each["number"] for each in Campaign(7, tmp_path, [], []).go_on(5)] == ran == [0, 1, 2, 3, 4]


def row(fault: str, seconds: float | None, *, violated: bool = False, **more: Any) -> dict[str, Any]:
    recovery = None
    if seconds is not None:
        recovery = {"seconds": seconds, "phases": {"detect": 1.0, "start": seconds - 1}, "repeated": 2}
    violations = {"losses": ["other losses in steps 3"]} if violated else {}
    return {
        "fault": fault,
        "launcher": "torchrun",
        "warm": False,
        "expected": Expected.RESTARTED.value,
        "recovery": recovery,
        "violations": violations,
        "missed": False,
        **more,
    }


def test_summary_of_known_rows() -> None:
    rows = [row("rank-killed", float(number), stock={"seconds": 2.0 * number}) for number in range(1, 21)]
    rows += [row("rank-killed", None, violated=True, stock={"seconds": None}), row("nan", 3.0)]
    rows += [row("rank-killed", None) | {"missed": True}]
    found = summarise(rows)
    killed = found["rank-killed"]
    assert (killed["cases"], killed["violated"], killed["recovered"]) == (21, 1, 20)
    assert (killed["p50_seconds"], killed["p95_seconds"]) == (10, 19)
    assert killed["dominating_phase"] == "start"
    assert killed["repeated_steps_max"] == 2
    assert dominating_phase([]) is None
    restarts = summarise_restarts([*rows, row("exception", 0.5, launcher="python", warm=True)])
    warm = "python, with standbys and snapshots in memory"
    assert list(restarts) == [warm, "torchrun", "torchrun, without the toolkit"]
    assert (restarts[warm]["cases"], restarts[warm]["dominating_phase"]) == (1, "detect")
    stock = restarts["torchrun, without the toolkit"]
    assert (stock["cases"], stock["recovered"], stock["p95_seconds"]) == (21, 20, 38)
    result = {"seed": 1, "layouts": ["a", "b"], "load": 1.2, "classes": found, "restarts": restarts}
    text = table({**result, "left_out": {"x": "not possible"}})
    assert "Seed 1, layouts a, b, load average up to 1: 22 cases, 1 with a violated invariant." in text
    assert "| rank-killed | restarted | 21 | 1 | 10.0 / 19.0 s | start |" in text
    assert "| torchrun | 21 | 20 | 10.0 / 19.0 s | start | at most 2 |" in text
    assert "| torchrun, without the toolkit | 21 | 20 | 20.0 / 38.0 s | - | - |" in text
    assert "Left out: x (not possible)." in text


def test_percentile_is_a_measured_value() -> None:
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.95) == 4.0


def test_table_replaces_the_old_one_only() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replace_table(replace_table(page, "new"), "newer") == f"before\n{BEGIN}\n\nnewer\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="no marks"):
        replace_table("before", "new")


def test_page_shows_the_recorded_campaign() -> None:
    page, file = ROOT / "docs/results.md", ROOT / "benchmarks/results/campaign.json"
    text = table(json.loads(file.read_text())) if file.exists() else "No campaign has been recorded yet."
    assert replace_table(page.read_text(encoding="utf-8"), text) == page.read_text(encoding="utf-8")
