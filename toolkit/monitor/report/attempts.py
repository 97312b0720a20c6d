"""The starts of a run: when, for how long, how each one ended; and its configuration as it was resolved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime

from toolkit.errors import without_secrets
from toolkit.goodput import ENDING, EVALUATION, OTHER, REPEATED, SAVING, STARTING, WAITING
from toolkit.monitor.report.curve_reader import is_number
from toolkit.monitor.report.elements import (
    UNKNOWN,
    CollapsedText,
    ReportSection,
    ReportTable,
    format_percent,
    format_seconds,
)
from toolkit.monitor.report.run_data import AttemptRecord, ReportData, mapping_at
from toolkit.progress import duration

LATER = "a later attempt followed: see the end of its log"
CAUSES = {
    REPEATED: "steps that were run again, or will have to be",
    STARTING: "from a start to its first step",
    SAVING: "training stood still for saves",
    EVALUATION: "evaluation",
    ENDING: "from an attempt's last step to its end",
    WAITING: "between two attempts",
    OTHER: "between steps: logging, plots, probes",
}


def attempts_section(run: ReportData) -> ReportSection:
    if not run.attempts:
        missing = "There is no folder attempts/, so it is not known when the run was started."
        return ReportSection(id="attempts", title="Attempts", intro=(missing,))
    newest = run.attempts[-1].number
    rows = tuple(
        (
            str(one.number),
            _when(one.began),
            _when(one.ended),
            duration(one.ended - one.began) if one.began and one.ended else UNKNOWN,
            format_seconds(one.start_seconds),
            _end(run) if one.number == newest else without_secrets(one.end) or LATER,
            f"{one.repeated:,}",
            "\n".join(one.files),
        )
        for one in run.attempts
    )
    table = ReportTable(
        caption="Starts",
        align="rnnrrlrl",
        rows=rows,
        note="Times are in UTC, by the clock of the machine that wrote them.",
        head=(
            "attempt",
            "began",
            "last word",
            "took",
            "first step after",
            "how it ended",
            "steps run again later",
            "left behind",
        ),
    )
    return ReportSection(
        id="attempts",
        title="Attempts",
        intro=tuple(_goodput(run)),
        tables=(table, *_losses(run)),
        texts=tuple(_texts(run.attempts)),
    )


def configuration_section(run: ReportData) -> ReportSection:
    plan = json.dumps(run.plan, indent=1) if run.plan else ""
    files = (
        ("config.yaml: the configuration, resolved", run.config_text),
        ("plan.json: what was decided from it", plan),
    )
    texts = tuple(CollapsedText(title, without_secrets(text)) for title, text in files if text)
    intro = () if texts else ("There is neither config.yaml nor plan.json.",)
    return ReportSection(id="configuration", title="Configuration", intro=intro, texts=texts)


def _goodput(run: ReportData) -> Iterator[str]:
    """From the status, which every end of an attempt and every second of one brings up to date."""
    told = mapping_at(run.status, "goodput")
    share, wall, useful = (told.get(name) for name in ("share", "wall_seconds", "useful_seconds"))
    if is_number(share) and is_number(wall) and is_number(useful):
        yield (
            f"Goodput {format_percent(share)}: of {duration(wall)} since the first start, between attempts too, {duration(useful)} went "
            f"into steps that stand."
        )


def _losses(run: ReportData) -> Iterator[ReportTable]:
    told = mapping_at(run.status, "goodput")
    wall = told.get("wall_seconds")
    lost = {name: value for name, value in mapping_at(told, "lost").items() if is_number(value)}
    if lost and is_number(wall) and wall > 0:
        rows = tuple(
            (CAUSES.get(name, name), duration(value), format_percent(value / wall))
            for name, value in lost.items()
        )
        yield ReportTable(
            caption="Where the rest of the time went",
            head=("cause", "time", "of all"),
            align="lrr",
            rows=rows,
        )


def _end(run: ReportData) -> str:
    state, reason = run.status.get("state", "unknown"), run.status.get("reason")
    code = run.status.get("exit_code")
    return f"{state}{f', exit code {code}' if code is not None else ''}{f': {without_secrets(str(reason))}' if reason else ''}"


def _texts(every: tuple[AttemptRecord, ...]) -> Iterator[CollapsedText]:
    for one in every:
        if one.hang:
            yield CollapsedText(f"attempt {one.number}: the report of its hang", without_secrets(one.hang))
        if one.log_end:
            yield CollapsedText(f"attempt {one.number}: the end of its log", without_secrets(one.log_end))


def _when(moment: float | None) -> str:
    return UNKNOWN if moment is None else f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S}"
