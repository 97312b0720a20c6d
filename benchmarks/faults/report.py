"""The tables of a campaign, from the rows of its cases: by kind of restart and by class of faults."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.faults.cases import LAYOUTS, PARENT, PLANNED_CASES
from benchmarks.faults.catalogue import FAULTS, LEFT_OUT, Expected
from benchmarks.faults.other_load import IDLE_CORES
from benchmarks.faults.recovery import PHASES, percentile

BEGIN = "<!-- campaign: python benchmarks/campaign.py writes this table -->"
END = "<!-- end of the campaign -->"
# Faults after which the ranks are restarted at once, on one machine.
DEATHS = ("rank-killed", "two-ranks-killed", "rank-segfault", "exception", "out-of-memory")
STANDBYS = "plain `python`, with standbys and snapshots in memory"
COLD = "plain `python`"
COLD_TORCHRUN = "torchrun"
NODES = "torchrun, two machines"
REPEATED = "the same command again"
WITHOUT_TOOLKIT = "torchrun, without the toolkit"
KINDS = (STANDBYS, COLD, COLD_TORCHRUN, NODES, REPEATED)

Row = Mapping[str, Any]


def kind_of_restart(row: Row) -> str | None:
    """Return what restarts the ranks of a case; None: the fault does not end the attempt."""
    if row["expected"] == Expected.UNAFFECTED:
        return None
    if row["expected"] == Expected.STOPPED or row["launcher"] == "deepspeed":
        return REPEATED
    if LAYOUTS[row["layout"]].nodes > 1:
        return NODES
    if row["launcher"] != PARENT:
        return COLD_TORCHRUN
    return STANDBYS if row["warm"] else COLD


def is_timed(row: Row) -> bool:
    """Return whether the machine was otherwise idle during a case (or a run without the toolkit)."""
    return bool(row["other_cores"] < IDLE_CORES)


def _with_fault(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose fault came before the run had ended."""
    return [row for row in rows if not row["missed"]]


def summarise(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Return the figures of each class by name, in the order of names. Cases whose run had ended before the
    fault are left out.
    """
    rows = _with_fault(rows)
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


def summarise_restarts(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Return the figures of each kind of restart over all classes, and ``deaths``: seconds of those after
    ``DEATHS`` only, which can be compared with torchrun without the toolkit.
    """
    rows = _with_fault(rows)
    found = {}
    for name in KINDS:
        mine = [row for row in rows if kind_of_restart(row) == name]
        deaths = _recovery_figures([row for row in mine if row["fault"] in DEATHS])
        found[name] = {"cases": len(mine), **_recovery_figures(mine), "deaths": deaths}
    stock = [row["stock"] for row in rows if row.get("stock")]
    seconds = _seconds_figures([run["seconds"] for run in stock if is_timed(run)])
    recovered = sum(run["seconds"] is not None for run in stock)
    found[WITHOUT_TOOLKIT] = {"cases": len(stock), **seconds, "recovered": recovered, "deaths": seconds}
    return {name: figures for name, figures in found.items() if figures["cases"]}


def _recovery_figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how many of the cases have a new step after the fault, and the times of those that are timed."""
    recovered = [row for row in rows if row["recovery"] is not None]
    timed = [row["recovery"] for row in recovered if is_timed(row)]
    return {
        **_seconds_figures([recovery["seconds"] for recovery in timed]),
        "recovered": len(recovered),
        "dominating_phase": dominating_phase(timed),
        "repeated_steps_max": max((row["recovery"]["repeated"] for row in recovered), default=None),
    }


def _seconds_figures(seconds: Sequence[float | None]) -> dict[str, Any]:
    """Return the percentiles of cases; None: without a new step."""
    known = [each for each in seconds if each is not None]
    return {
        "timed": len(known),
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


def table(rows: Sequence[Row], missing: Mapping[str, str] | None = None) -> str:
    """Return the tables of a campaign in Markdown, after a paragraph about what was run.

    Args:
        rows: of all cases; empty: nothing has been run.
        missing: classes that cannot be injected on this machine, with the reason.
    """
    if not rows:
        return "No case has been recorded yet."
    restarts, classes = summarise_restarts(rows), summarise(rows)
    lines = [_introduction(rows)]
    if restarts:
        lines += [
            "",
            "| Restarted by | Cases | Recovered | Timed | Fault to next new step, p50 / p95 | Dominated by |"
            " Deaths of ranks only | Steps repeated |",
            "|---|---|---|---|---|---|---|---|",
        ]
    for name, figures in restarts.items():
        most = figures.get("repeated_steps_max")
        lines.append(
            f"| {name} | {figures['cases']} | {figures['recovered']} | {figures['timed']} | "
            f"{_seconds(figures)} | {figures.get('dominating_phase') or '-'} | "
            f"{_seconds(figures['deaths'])} | {'-' if most is None else f'at most {most}'} |"
        )
    lines += [
        "",
        "| Fault | Expected | Cases | Violated | Timed | Fault to next new step, p50 / p95 | Dominated by |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, figures in classes.items():
        lines.append(
            f"| {name} | {figures['expected']} | {figures['cases']} | {figures['violated']} | "
            f"{figures['timed']} | {_seconds(figures)} | {figures['dominating_phase'] or '-'} |"
        )
    without = [name for name in FAULTS if name not in classes and name not in (missing or {})]
    if without:
        lines += ["", f"Classes without a case so far: {', '.join(without)}."]
    left_out = "; ".join(f"{name} ({why})" for name, why in {**LEFT_OUT, **(missing or {})}.items())
    return "\n".join([*lines, "", f"Left out: {left_out}."])


def _introduction(rows: Sequence[Row]) -> str:
    """Return a paragraph: which cases were run when and where, how many violate an invariant, and which
    times count.
    """
    dates = sorted({row["date"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    machines = " and ".join(sorted({row["machine"] for row in rows}))
    versions = " and ".join(sorted({row["versions"] for row in rows}))
    hit = _with_fault(rows)
    violated = sum(bool(row["violations"]) for row in hit)
    late = f" In {len(rows) - len(hit)} cases the run had ended before the fault; they do not count." * (
        len(hit) < len(rows)
    )
    timed = [row for row in hit if is_timed(row)]
    most = f" (at most {max(row['other_cores'] for row in timed):.2f})" if timed else ""
    layouts = len({row["layout"] for row in rows})
    return (
        f"{len(rows)} of the {PLANNED_CASES} cases of seed {rows[0]['campaign_seed']} have been run, "
        f"on {layouts} layouts ({when}; {machines}; {versions}). "
        f"{violated} of {len(hit)} cases violated an invariant.{late} Times come only from the {len(timed)} "
        f"cases during which other processes kept less "
        f"than {IDLE_CORES} cores busy on average{most}."
    )


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
