"""The alerts section: each alert with its cause, evidence and next step."""

from __future__ import annotations

from toolkit.monitor.report.elements import ReportSection, ReportTable
from toolkit.monitor.report.run_data import MAX_ALERTS, ReportData


def alerts_section(run: ReportData) -> ReportSection:
    counts = run.alerts.counts
    if not counts:
        return ReportSection(
            id="alerts",
            title="Alerts",
            intro=("None." if run.steps.rows else "None so far; no step is complete yet.",),
        )
    total = sum(counts.values())
    kinds = sorted(counts.items(), key=lambda item: (item[0][0], -item[1]))
    summary = ReportTable(
        caption="Kinds",
        head=("level", "alert", "how often"),
        align="llr",
        rows=tuple((level, name, f"{count:,}") for (level, name), count in kinds),
    )
    rows = tuple(
        tuple(
            _text(row.get(key))
            for key in ("step", "level", "name", "where", "cause", "evidence", "next_step")
        )
        for row in reversed(run.alerts.rows)
    )
    newest = ReportTable(
        caption="Newest first",
        head=("step", "level", "alert", "where", "cause", "evidence", "next step"),
        align="rllllll",
        rows=rows,
        note=f"The newest {MAX_ALERTS} of {total:,} alerts; alerts.jsonl has all of them."
        if total > len(rows)
        else "",
    )
    intro = (
        "Repeated alerts of one kind are shown at growing intervals, so one row may stand for several. "
        "Alerts are marked on the curves."
    )
    return ReportSection(
        id="alerts",
        title="Alerts",
        intro=(intro,),
        tables=(summary, newest) if len(counts) > 1 else (newest,),
    )


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)
