"""Render a run as a self-contained HTML page: style, script and data are inline, and its security policy
forbids requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from toolkit.monitor.report.summary import SummaryTile, run_state, summary_sentences, summary_tiles
from toolkit.monitor.report.training import training_section

# In the order of the page.
SECTIONS: tuple[Callable[[ReportData], ReportSection], ...] = (
    training_section,
    ledger_section,
    alerts_section,
    comparison_section,
    hardware_section,
    attempts_section,
    configuration_section,
)
FORMATTERS: dict[AxisFormat, Callable[[float | None], str]] = {
    AxisFormat.NUMBER: format_number,
    AxisFormat.PERCENT: format_percent,
    AxisFormat.BYTES: format_gigabytes,
    AxisFormat.SECONDS: format_seconds,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """The content of a page.

    Attributes:
        state: in one or two words; ``level`` colours it: good, warning or error.
        summary: paragraphs below the title.
    """

    name: str
    state: str
    level: str
    summary: Sequence[str]
    tiles: Sequence[SummaryTile]
    sections: Sequence[ReportSection]
    footer: str


def render_page(run: ReportData) -> str:
    """Return the HTML page of a run."""
    state, level = run_state(run)
    return render_content(
        PageContent(
            name=run.name,
            state=state,
            level=level,
            summary=summary_sentences(run),
            tiles=list(summary_tiles(run)),
            sections=[build(run) for build in SECTIONS],
            footer=_footer(run),
        )
    )


def render_content(content: PageContent) -> str:
    """Return an HTML page of any content."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    charts = [chart for section in content.sections for chart in section.charts]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Style and script are our own. The template escapes all text from files, and ``embed_json`` the charts'
    # data.
    return environment.from_string(_file("page.html.j2")).render(
        page={
            "name": content.name,
            "state": content.state,
            "mood": content.level,
            "verdict": [without_secrets(sentence) for sentence in content.summary],
            "tiles": [asdict(tile) for tile in content.tiles],
            "sections": content.sections,
            "footer": content.footer,
        },
        figures={chart.id: chart_table(chart) for chart in charts},
        charts=Markup(embed_json([chart.data() for chart in charts])),
        css=Markup(_file("page.css")),
        script=Markup(_file("page.js")),
    )


def embed_json(value: Any) -> str:
    """Encode JSON for a script element, such that no text can end the element or start a comment. Raises
    ValueError for NaN.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def chart_table(chart: Chart) -> ReportTable:
    """Return a chart's data as a table, for readers who cannot see it."""
    format_value = FORMATTERS[chart.y_format]

    def row(one: Series) -> tuple[str, ...]:
        known = [value for value in one.mid if value is not None]
        extremes = one.spread()
        if not known or extremes is None:
            return (one.name, *[UNKNOWN] * 5)
        return (
            one.name,
            f"{len(known):,}",
            format_value(known[0]),
            format_value(known[-1]),
            format_value(extremes[0]),
            format_value(extremes[1]),
        )

    return ReportTable(
        caption=chart.title,
        head=("line", "points", "first", "last", "lowest", "highest"),
        align="lrrrrr",
        rows=tuple(map(row, chart.series)),
    )


def _footer(run: ReportData) -> str:
    created = f"{datetime.fromtimestamp(run.read_at, UTC):%Y-%m-%d at %H:%M:%S} UTC"
    return (
        f"Created on {created} from the files in {run.folder.absolute()}. The metrics and their limits are "
        "described in docs/monitoring.md of the toolkit."
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
