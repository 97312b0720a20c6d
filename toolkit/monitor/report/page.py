"""One page of a run, with everything in it: style, script and figures. It asks no network for anything, and says so to the browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from toolkit.errors import without_secrets
from toolkit.monitor.report.alerts import alerts
from toolkit.monitor.report.attempts import attempts, configuration
from toolkit.monitor.report.data import Run
from toolkit.monitor.report.hardware import hardware
from toolkit.monitor.report.ledger import ledger
from toolkit.monitor.report.reality import reality
from toolkit.monitor.report.training import training
from toolkit.monitor.report.verdict import state, tiles, verdict
from toolkit.monitor.report.view import (
    UNKNOWN,
    Chart,
    Format,
    Section,
    Series,
    Table,
    gigabytes,
    number,
    percent,
    seconds,
)

# In the order in which a person asks.
SECTIONS: tuple[Callable[[Run], Section], ...] = (
    training,
    ledger,
    alerts,
    reality,
    hardware,
    attempts,
    configuration,
)
WRITTEN: dict[Format, Callable[[float | None], str]] = {
    Format.NUMBER: number,
    Format.PERCENT: percent,
    Format.BYTES: gigabytes,
    Format.SECONDS: seconds,
}


def page(run: Run) -> str:
    """The HTML of a run."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    sections = [build(run) for build in SECTIONS]
    charts = [chart for section in sections for chart in section.charts]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    word, mood = state(run)
    # Style and script are ours; everything else is of files and escaped by the template, the figures by `embedded`.
    return environment.from_string(_file("page.html.j2")).render(
        page={
            "name": run.name,
            "state": word,
            "mood": mood,
            "verdict": [without_secrets(sentence) for sentence in verdict(run)],
            "tiles": [asdict(tile) for tile in tiles(run)],
            "sections": sections,
            "footer": _footer(run),
        },
        figures={chart.id: figures(chart) for chart in charts},
        charts=Markup(embedded([chart.data() for chart in charts])),
        css=Markup(_file("page.css")),
        script=Markup(_file("page.js")),
    )


def embedded(value: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end the element or begin a comment. NaN is refused."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def figures(chart: Chart) -> Table:
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

    return Table(
        caption=chart.title,
        head=("line", "points", "first", "last", "lowest", "highest"),
        align="lrrrrr",
        rows=tuple(map(row, chart.series)),
    )


def _footer(run: Run) -> str:
    made = f"{datetime.fromtimestamp(run.read_at, UTC):%Y-%m-%d at %H:%M:%S} UTC"
    return (
        f"Made on {made} from the files in {run.folder.absolute()}. What the figures mean, and what they cannot see: "
        f"docs/monitoring.md of the toolkit."
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
