"""One page of a run, with everything in it: style, script and figures. It asks no network for anything, and says so to the browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from toolkit.errors import without_secrets
from toolkit.monitor.report.alerts import alerts_section
from toolkit.monitor.report.attempts import attempts_section, configuration_section
from toolkit.monitor.report.elements import (
    UNKNOWN,
    AxisFormat,
    Chart,
    ReportSection,
    ReportTable,
    Series,
    format_gigabytes,
    format_number,
    format_percent,
    format_seconds,
)
from toolkit.monitor.report.hardware import hardware_section
from toolkit.monitor.report.ledger import ledger_section
from toolkit.monitor.report.planned_vs_measured import comparison_section
from toolkit.monitor.report.run_data import ReportData
from toolkit.monitor.report.summary import run_state, summary_sentences, summary_tiles
from toolkit.monitor.report.training import training_section

# In the order in which a person asks.
SECTIONS: tuple[Callable[[ReportData], ReportSection], ...] = (
    training_section,
    ledger_section,
    alerts_section,
    comparison_section,
    hardware_section,
    attempts_section,
    configuration_section,
)
WRITTEN: dict[AxisFormat, Callable[[float | None], str]] = {
    AxisFormat.NUMBER: format_number,
    AxisFormat.PERCENT: format_percent,
    AxisFormat.BYTES: format_gigabytes,
    AxisFormat.SECONDS: format_seconds,
}


def render_page(run: ReportData) -> str:
    """The HTML of a run."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    sections = [build(run) for build in SECTIONS]
    charts = [chart for section in sections for chart in section.charts]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    word, mood = run_state(run)
    # Style and script are ours; everything else is of files and escaped by the template, the figures by `embedded`.
    return environment.from_string(_file("page.html.j2")).render(
        page={
            "name": run.name,
            "state": word,
            "mood": mood,
            "verdict": [without_secrets(sentence) for sentence in summary_sentences(run)],
            "tiles": [asdict(tile) for tile in summary_tiles(run)],
            "sections": sections,
            "footer": _footer(run),
        },
        figures={chart.id: chart_table(chart) for chart in charts},
        charts=Markup(embed_json([chart.data() for chart in charts])),
        css=Markup(_file("page.css")),
        script=Markup(_file("page.js")),
    )


def embed_json(value: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end the element or begin a comment. NaN is refused."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def chart_table(chart: Chart) -> ReportTable:
    """A chart's figures for who does not see it."""
    written = WRITTEN[chart.y_format]

    def row(one: Series) -> tuple[str, ...]:
        known = [value for value in one.mid if value is not None]
        extremes = one.spread()
        if not known or extremes is None:
            return (one.name, *[UNKNOWN] * 5)
        return (
            one.name,
            f"{len(known):,}",
            written(known[0]),
            written(known[-1]),
            written(extremes[0]),
            written(extremes[1]),
        )

    return ReportTable(
        caption=chart.title,
        head=("line", "points", "first", "last", "lowest", "highest"),
        align="lrrrrr",
        rows=tuple(map(row, chart.series)),
    )


def _footer(run: ReportData) -> str:
    made = f"{datetime.fromtimestamp(run.read_at, UTC):%Y-%m-%d at %H:%M:%S} UTC"
    return (
        f"Made on {made} from the files in {run.folder.absolute()}. What the figures mean, and what they cannot see: "
        f"docs/monitoring.md of the toolkit."
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
