"""The sections of the attempts of a run and of its resolved configuration."""

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

SUPERSEDED_ATTEMPT_END = "a later attempt followed: see the end of its log"
CAUSES = {
    REPEATED: "steps that were or must be repeated",
    STARTING: "start-up: from an attempt's start to its first step",
    SAVING: "saving, while training waited",
    EVALUATION: "evaluation",
    ENDING: "shutdown: from an attempt's last step to its end",
    WAITING: "between attempts",
    OTHER: "between steps: logging, plots, probes",
}


def attempts_section(run: ReportData) -> ReportSection:
    if not run.attempts:
        missing = "There is no folder attempts/, so the times of the attempts are unknown."
        return ReportSection(id="attempts", title="Attempts", intro=(missing,))
    newest = run.attempts[-1].number
    rows = tuple(
        (
            str(attempt.number),
            _when(attempt.began),
            _when(attempt.ended),
            duration(attempt.ended - attempt.began) if attempt.began and attempt.ended else UNKNOWN,
            format_seconds(attempt.start_seconds),
            _end(run) if attempt.number == newest else without_secrets(attempt.end) or SUPERSEDED_ATTEMPT_END,
            f"{attempt.repeated:,}",
            "\n".join(attempt.files),
        )
        for attempt in run.attempts
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
            "steps repeated later",
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
        ("config.yaml: the resolved configuration", run.config_text),
        ("plan.json: the resolved plan", plan),
    )
    texts = tuple(CollapsedText(title, without_secrets(text)) for title, text in files if text)
    intro = () if texts else ("There is no config.yaml or plan.json.",)
    return ReportSection(id="configuration", title="Configuration", intro=intro, texts=texts)


def _goodput(run: ReportData) -> Iterator[str]:
    """Describe the goodput in the status file."""
    goodput = mapping_at(run.status, "goodput")
    share, wall, useful = (goodput.get(name) for name in ("share", "wall_seconds", "useful_seconds"))
    if is_number(share) and is_number(wall) and is_number(useful):
        yield (
            f"Goodput {format_percent(share)}: of {duration(wall)} since the first start, including the "
            f"time between attempts, {duration(useful)} went into steps that count."
        )


def _losses(run: ReportData) -> Iterator[ReportTable]:
    goodput = mapping_at(run.status, "goodput")
    wall = goodput.get("wall_seconds")
    lost = {name: value for name, value in mapping_at(goodput, "lost").items() if is_number(value)}
    if lost and is_number(wall) and wall > 0:
        rows = tuple(
            (CAUSES.get(name, name), duration(value), format_percent(value / wall))
            for name, value in lost.items()
        )
        yield ReportTable(caption="Lost time", head=("cause", "time", "of all"), align="lrr", rows=rows)


def _end(run: ReportData) -> str:
    state, reason = run.status.get("state", "unknown"), run.status.get("reason")
    code = run.status.get("exit_code")
    exit_code = f", exit code {code}" if code is not None else ""
    return f"{state}{exit_code}{f': {without_secrets(str(reason))}' if reason else ''}"


def _texts(attempts: tuple[AttemptRecord, ...]) -> Iterator[CollapsedText]:
    restarts = [
        f"attempt {attempt.number} {attempt.restart}" for attempt in attempts if attempt.restart is not None
    ]
    if restarts:
        yield CollapsedText("phases of the restarts", "\n".join(restarts))
    for attempt in attempts:
        if attempt.hang:
            yield CollapsedText(f"attempt {attempt.number}: hang report", without_secrets(attempt.hang))
        if attempt.log_end:
            yield CollapsedText(f"attempt {attempt.number}: end of the log", without_secrets(attempt.log_end))


def _when(moment: float | None) -> str:
    return UNKNOWN if moment is None else f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S}"
