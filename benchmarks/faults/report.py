"""Summarise the rows of a campaign by class: a table, and the JSON for benchmarks/results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.faults.recovery import PHASES, percentile

BEGIN = "<!-- campaign: python benchmarks/campaign.py writes this table -->"
END = "<!-- end of the campaign -->"


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each class by name, in the order of names. Cases whose run had ended before the
    fault are left out.
    """
    rows = [row for row in rows if not row["missed"]]
    found = {}
    for name in sorted({row["fault"] for row in rows}):
        mine = [row for row in rows if row["fault"] == name]
        recoveries = [row["recovery"] for row in mine if row["recovery"] is not None]
        seconds = [recovery["seconds"] for recovery in recoveries]
        stock = [row["stock"]["seconds"] for row in mine if row.get("stock")]
        recovered = [each for each in stock if each is not None]
        found[name] = {
            "cases": len(mine),
            "expected": mine[0]["expected"],
            "violated": sum(bool(row["violations"]) for row in mine),
            "p50_seconds": percentile(seconds, 0.5) if seconds else None,
            "p95_seconds": percentile(seconds, 0.95) if seconds else None,
            "dominating_phase": dominating_phase(recoveries),
            "repeated_steps_max": max((recovery["repeated"] for recovery in recoveries), default=None),
            "stock_cases": len(stock),
            "stock_recovered": len(recovered),
            "stock_p50_seconds": percentile(recovered, 0.5) if recovered else None,
            "stock_p95_seconds": percentile(recovered, 0.95) if recovered else None,
        }
    return found


def dominating_phase(recoveries: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the phase with the largest mean share of time."""
    if not recoveries:
        return None
    means = {
        phase: statistics.fmean(recovery["phases"].get(phase, 0.0) for recovery in recoveries)
        for phase in PHASES
    }
    return max(means, key=lambda phase: means[phase])


def table(result: Mapping[str, Any]) -> str:
    """Return the table of a campaign's result in Markdown, with totals and the classes that were left out."""
    classes = result["classes"]
    cases = sum(figures["cases"] for figures in classes.values())
    violated = sum(figures["violated"] for figures in classes.values())
    lines = [
        f"Seed {result['seed']}, layouts {', '.join(result['layouts'])}, load average up to "
        f"{result['load']:.0f}: {cases} cases, {violated} with a violated invariant.",
        "",
        "| Fault | Expected | Cases | Violated | Fault to next new step, p50 / p95 | Dominated by |"
        " Stock torchrun, p50 / p95 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, figures in classes.items():
        stock = ""
        if figures["stock_cases"]:
            stock = f"{_seconds(figures, 'stock_')}; {figures['stock_recovered']} of {figures['stock_cases']}"
        lines.append(
            f"| {name} | {figures['expected']} | {figures['cases']} | {figures['violated']} | "
            f"{_seconds(figures)} | {figures['dominating_phase'] or '-'} | {stock} |"
        )
    left_out = "; ".join(f"{name} ({why})" for name, why in result["left_out"].items())
    return "\n".join([*lines, "", f"Left out: {left_out}."])


def _seconds(figures: Mapping[str, Any], prefix: str = "") -> str:
    values = (figures[f"{prefix}p50_seconds"], figures[f"{prefix}p95_seconds"])
    return "-" if None in values else f"{values[0]:.1f} / {values[1]:.1f} s"


def replace_table(page: str, text: str) -> str:
    """Return the page with the table between the two marks replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has no marks of the campaign")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
