"""The report compares the predicted parts of a step with the measured ones and names the largest difference.

pytest tests/monitor/report/test_predicted_parts.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.report.runs import PARTS, STEP_SECONDS, write_run
from toolkit.monitor.report.page import render_page
from toolkit.monitor.report.planned_vs_measured import attempt_comparisons, comparison_section
from toolkit.monitor.report.predicted_parts import StepComparison, compare_step, likely_reason, step_sentence
from toolkit.monitor.report.run_data import ReportData
from toolkit.monitor.report.run_reader import read_run
from toolkit.progress import Progress
from toolkit.step_parts import PARTS as LEDGER_PARTS
from toolkit.step_parts import UNDIVIDED_PARTS, communication

# What write_run writes for each part of the median step, which takes STEP_SECONDS.
MEASURED = {name: share * STEP_SECONDS for name, share in PARTS.items() if name not in UNDIVIDED_PARTS}


def read(tmp_path: Path, step_seconds: dict[str, Any] | None) -> ReportData:
    folder = write_run(tmp_path / "run", 60)
    for file in (folder / "plan.json", *folder.glob("attempts/*/plan.json")):
        plan = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**plan, "step_seconds": step_seconds}), encoding="utf-8")
    return read_run(folder, Progress.silent())


def prediction(parts: dict[str, float], *, spread: float = 0.1) -> dict[str, Any]:
    seconds = sum(parts.values())
    return {"seconds": seconds, "low": seconds * (1 - spread), "high": seconds * (1 + spread), "parts": parts}


def compare(run: ReportData) -> StepComparison:
    _, attempt = attempt_comparisons(run)[0]
    comparison = compare_step(attempt.plan, attempt.total, attempt.parts)
    assert comparison is not None
    return comparison


@pytest.mark.parametrize("part", ["communication/data", "forward", "bubble"])
def test_part_that_was_predicted_too_short_is_named(tmp_path: Path, part: str) -> None:
    predicted = {**MEASURED, part: MEASURED[part] / 2}
    comparison = compare(read(tmp_path, prediction(predicted)))
    worst, *others = comparison.parts
    assert worst.part == part
    assert worst.seconds == pytest.approx(MEASURED[part] / 2)
    assert all(abs(other.seconds) < 1e-9 for other in others)
    assert f"The largest difference is {part}" in step_sentence(comparison)


def test_right_prediction_is_within_its_interval(tmp_path: Path) -> None:
    right = compare(read(tmp_path / "right", prediction(MEASURED)))
    assert right.within
    wrong = compare(
        read(tmp_path / "wrong", prediction({name: 2 * value for name, value in MEASURED.items()}))
    )
    assert wrong.within is False
    assert "outside the predicted interval" in step_sentence(wrong)


def test_parts_that_were_not_predicted_count_fully(tmp_path: Path) -> None:
    predicted = {name: value for name, value in MEASURED.items() if name != "communication/tensor"}
    worst = compare(read(tmp_path, prediction(predicted))).parts[0]
    assert (worst.part, worst.predicted) == ("communication/tensor", None)
    assert worst.seconds == pytest.approx(MEASURED["communication/tensor"])


def test_saves_are_no_part_of_a_step(tmp_path: Path) -> None:
    """Every hundredth step of the ledger has a save of 10 s, and every step logs."""
    parts = {part.part for part in compare(read(tmp_path, prediction(MEASURED))).parts}
    assert parts == MEASURED.keys()


def test_section_lists_the_parts(tmp_path: Path) -> None:
    run = read(tmp_path, prediction({**MEASURED, "bubble": 0.5}))
    section = comparison_section(run)
    table = next(table for table in section.tables if "time of a step by part" in table.caption)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["bubble"] == ("500 ms", "60 ms", "-440 ms", "-88%")
    assert rows["whole step"][0].startswith(f"{sum(MEASURED.values()) + 0.44:.3g} s (")
    assert "The largest difference is bubble" in section.intro[1]
    assert "time of a step by part" in render_page(run)


@pytest.mark.parametrize("absent", [None, {}, {"seconds": None}, {"seconds": 0}])
def test_runs_without_a_prediction_have_no_comparison(tmp_path: Path, absent: dict[str, Any] | None) -> None:
    section = comparison_section(read(tmp_path, absent))
    assert not any("by part" in table.caption for table in section.tables)
    assert len(section.intro) == 1


def test_every_part_has_a_likely_reason(tmp_path: Path) -> None:
    comparison = compare(read(tmp_path, prediction(MEASURED)))
    known = {part.part: part for part in comparison.parts}
    assert {name for name in LEDGER_PARTS if name not in UNDIVIDED_PARTS} <= known.keys()
    assert communication("data") in known
    assert all(likely_reason(part) for part in comparison.parts)
