"""The tables of a campaign from the rows of its cases.

pytest tests/campaign/test_report.py
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.campaign import PAGE, RECORDS
from benchmarks.faults.cases import Case
from benchmarks.faults.catalogue import FAULTS
from benchmarks.faults.report import (
    BEGIN,
    COLD,
    COLD_TORCHRUN,
    END,
    NODES,
    REPEATED,
    STANDBYS,
    WITHOUT_TOOLKIT,
    dominating_phase,
    kind_of_restart,
    replace_table,
    summarise,
    summarise_restarts,
    table,
)
from toolkit.rows import read_rows

ONE_MACHINE, TWO_MACHINES = "deepspeed-zero1-ranks2", "nodes2-megatron-dp2"


def row_of(case: Case, seconds: float | None = 1.0, **more: Any) -> dict[str, Any]:
    """A row of a case as a campaign writes it."""
    recovery = None
    if seconds is not None:
        recovery = {"seconds": seconds, "phases": {"detect": 1.0, "start": seconds - 1}, "repeated": 2}
    return {
        **case.to_json(),
        "expected": str(FAULTS[case.fault].expected),
        "recovery": recovery,
        "violations": {},
        "missed": False,
        "other_cores": 0.01,
        "seconds": 20.0,
        "campaign_seed": 7,
        "date": "2026-01-02",
        "machine": "a CPU, 2 cores",
        "versions": "torch 2",
        **more,
    }


def row(
    fault: str,
    seconds: float | None,
    launcher: str = "torchrun",
    layout: str = ONE_MACHINE,
    *,
    warm: bool = False,
    **more: Any,
) -> dict[str, Any]:
    return row_of(Case(0, fault, layout, launcher, 1.5, 3, warm), seconds, **more)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (None, row("rank-paused", 1.0)),
        (STANDBYS, row("rank-killed", 1.0, "python", warm=True)),
        (COLD, row("rank-frozen", 1.0, "python")),
        (COLD_TORCHRUN, row("rank-killed", 1.0)),
        (NODES, row("link-half-open", 1.0, layout=TWO_MACHINES)),
        (REPEATED, row("rank-killed", 1.0, "deepspeed")),
        (REPEATED, row("supervisor-killed", 1.0, "python", warm=True)),
    ],
    ids=lambda value: value["fault"] if isinstance(value, dict) else str(value),
)
def test_kind_of_restart_follows_from_the_expected_end_and_the_launcher(
    kind: str | None, case: dict[str, Any]
) -> None:
    assert kind_of_restart(case) == kind


def stock(seconds: float | None, other_cores: float = 0.0) -> dict[str, Any]:
    return {"seconds": seconds, "other_cores": other_cores}


def test_summary_of_known_rows() -> None:
    rows = [row("rank-killed", float(number), stock=stock(2.0 * number)) for number in range(1, 21)]
    rows += [row("rank-killed", None, violations={"losses": ["other"]}, stock=stock(None)), row("nan", 3.0)]
    rows += [row("rank-killed", None, missed=True)]
    killed = summarise(rows)["rank-killed"]
    assert (killed["cases"], killed["violated"], killed["recovered"], killed["timed"]) == (21, 1, 20, 20)
    assert (killed["p50_seconds"], killed["p95_seconds"]) == (10, 19)
    assert killed["dominating_phase"] == "start"
    assert killed["repeated_steps_max"] == 2
    assert dominating_phase([]) is None
    rows += [row("exception", 0.5, "python", warm=True), row("rank-frozen", 40.0)]
    restarts = summarise_restarts(rows)
    assert list(restarts) == [STANDBYS, COLD_TORCHRUN, REPEATED, WITHOUT_TOOLKIT]
    assert (restarts[STANDBYS]["cases"], restarts[STANDBYS]["dominating_phase"]) == (1, "detect")
    cold = restarts[COLD_TORCHRUN]
    assert (cold["cases"], cold["p95_seconds"], cold["deaths"]["p95_seconds"]) == (22, 20, 19), (
        "of all, of deaths"
    )
    without = restarts[WITHOUT_TOOLKIT]
    assert (without["cases"], without["recovered"], without["deaths"]["p95_seconds"]) == (21, 20, 38)


def test_times_of_a_busy_machine_do_not_count() -> None:
    """Violations of such cases do."""
    rows = [
        row("rank-killed", 1.0, stock=stock(2.0)),
        row("rank-killed", 90.0, other_cores=0.7, violations={"losses": ["other"]}, stock=stock(95.0)),
        row("rank-killed", 91.0, other_cores=0.3, stock=stock(96.0, 0.4)),
    ]
    killed = summarise(rows)["rank-killed"]
    assert (killed["cases"], killed["violated"], killed["recovered"], killed["timed"]) == (3, 1, 3, 1)
    assert killed["p95_seconds"] == 1
    restarts = summarise_restarts(rows)
    assert restarts[COLD_TORCHRUN]["p95_seconds"] == 1
    assert (restarts[WITHOUT_TOOLKIT]["timed"], restarts[WITHOUT_TOOLKIT]["p95_seconds"]) == (2, 95)


def test_tables_of_known_rows() -> None:
    rows = [row("rank-killed", 10.0, stock=stock(20.0)), row("nan", 3.0, date="2026-01-04")]
    rows += [row("rank-killed", 9.0, missed=True), row("rank-killed", 80.0, other_cores=1.5)]
    text = table(rows, {"disk-full": "needs root"})
    assert "4 of the 500 cases of seed 7 have been run, on 1 layouts (2026-01-02 to 2026-01-04" in text
    assert "0 of 3 cases violated an invariant. In 1 cases the run had ended before the fault" in text
    assert "Times come only from the 2 cases during which other processes kept less than 0.2 cores" in text
    assert f"| {COLD_TORCHRUN} | 2 | 2 | 1 | 10.0 / 10.0 s | start | 10.0 / 10.0 s | at most 2 |" in text
    assert f"| {WITHOUT_TOOLKIT} | 1 | 1 | 1 | 20.0 / 20.0 s | - | 20.0 / 20.0 s | - |" in text
    assert "| rank-killed | restarted | 2 | 0 | 1 | 10.0 / 10.0 s | start |" in text
    assert "Classes without a case so far: two-ranks-killed," in text
    assert "; disk-full (needs root)." in text
    assert table([]) == "No case has been recorded yet."


def test_table_replaces_the_old_one_only() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replace_table(replace_table(page, "new"), "newer") == f"before\n{BEGIN}\n\nnewer\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="no marks"):
        replace_table("before", "new")


def test_page_shows_the_recorded_campaign() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert replace_table(page, table(list(read_rows(RECORDS)))) == page
