"""Summarise the rows of a campaign by class: a table, and the JSON for benchmarks/results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.faults.recovery import PHASES, percentile

BEGIN = "<!-- campaign: python benchmarks/campaign.py writes this table -->"
END = "<!-- end of the campaign -->"
# Faults after which the ranks are restarted at once, on one machine.
DEATHS = ("rank-killed", "two-ranks-killed", "rank-segfault", "exception", "out-of-memory")
# What restarts the ranks: launcher, and whether the run has standbys and snapshots in memory.
RESTARTERS: Mapping[str, tuple[str, bool]] = {
    "python, with standbys and snapshots in memory": ("python", True),
    "python": ("python", False),
    "torchrun": ("torchrun", False),
    "deepspeed: the same command again": ("deepspeed", False),
}
WITHOUT_TOOLKIT = "torchrun, without the toolkit"


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of each class by name, in the order of names. Cases whose run had ended before the
    fault are left out.
    """
    rows = [row for row in rows if not row["missed"]]
    found = {}
    for name in sorted({row["fault"] for row in rows}):
        mine = [row for row in rows if row["fault"] == name]
        found[name] = {
            "cases": len(mine),
            "expected": mine[0]["expected"],
            "violated": sum(bool(row["violations"]) for row in mine),
            **_recovery_figures(mine),
        }
    return found


def summarise_restarts(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of faults that kill ranks, on one machine, by what restarts the ranks."""
    rows = [row for row in rows if row["fault"] in DEATHS and not row["missed"]]
    found = {}
    for name, (launcher, warm) in RESTARTERS.items():
        mine = [row for row in rows if (row["launcher"], row["warm"]) == (launcher, warm)]
        found[name] = {"cases": len(mine), **_recovery_figures(mine)}
    stock = [row["stock"]["seconds"] for row in rows if row.get("stock")]
    found[WITHOUT_TOOLKIT] = {"cases": len(stock), **_seconds_figures(stock)}
    return {name: figures for name, figures in found.items() if figures["cases"]}


def _recovery_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    recoveries = [row["recovery"] for row in rows if row["recovery"] is not None]
    return {
        **_seconds_figures([row["recovery"] and row["recovery"]["seconds"] for row in rows]),
        "dominating_phase": dominating_phase(recoveries),
        "repeated_steps_max": max((recovery["repeated"] for recovery in recoveries), default=None),
    }


def _seconds_figures(seconds: Sequence[float | None]) -> dict[str, Any]:
    """Return the percentiles of cases; None: without a new step."""
    known = [each for each in seconds if each is not None]
    return {
        "recovered": len(known),
        "p50_seconds": percentile(known, 0.5) if known else None,
        "p95_seconds": percentile(known, 0.95) if known else None,
    }


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
        "| Fault | Expected | Cases | Violated | Fault to next new step, p50 / p95 | Dominated by |",
        "|---|---|---|---|---|---|",
    ]
    for name, figures in classes.items():
        lines.append(
            f"| {name} | {figures['expected']} | {figures['cases']} | {figures['violated']} | "
            f"{_seconds(figures)} | {figures['dominating_phase'] or '-'} |"
        )
    if result["restarts"]:
        lines += [
            "",
            f"Restarts after {', '.join(DEATHS)}:",
            "",
            "| Restarted by | Cases | Recovered | Fault to next new step, p50 / p95 | Dominated by |"
            " Steps repeated |",
            "|---|---|---|---|---|---|",
        ]
    for name, figures in result["restarts"].items():
        most = figures.get("repeated_steps_max")
        lines.append(
            f"| {name} | {figures['cases']} | {figures['recovered']} | {_seconds(figures)} | "
            f"{figures.get('dominating_phase') or '-'} | {'-' if most is None else f'at most {most}'} |"
        )
    left_out = "; ".join(f"{name} ({why})" for name, why in result["left_out"].items())
    return "\n".join([*lines, "", f"Left out: {left_out}."])


def _seconds(figures: Mapping[str, Any]) -> str:
    values = (figures["p50_seconds"], figures["p95_seconds"])
    return "-" if None in values else f"{values[0]:.1f} / {values[1]:.1f} s"


def replace_table(page: str, text: str) -> str:
    """Return the page with the table between the two marks replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page has no marks of the campaign")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
