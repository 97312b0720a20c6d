"""Draw a scaling report: one self-contained HTML page, and its two main charts as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO

from toolkit.estimate.scaling import LEAST_EFFICIENCY, Candidate, Scaling, ScalingCurve
from toolkit.estimate.scaling_report import (
    MEASURED_HEAD,
    TITLES,
    ScalingReport,
    measured_rows,
    point_rows,
    table_head,
)
from toolkit.monitor.report.elements import (
    AxisFormat,
    Chart,
    ReportSection,
    ReportTable,
    Series,
    format_number,
    format_percent,
    format_seconds,
)
from toolkit.monitor.report.ledger import colours
from toolkit.monitor.report.page import PageContent, render_content
from toolkit.monitor.report.summary import SummaryTile

COLOURS = {Scaling.STRONG: "blue", Scaling.WEAK: "green"}
PLOT_COLOURS = {Scaling.STRONG: "#0072b2", Scaling.WEAK: "#009e73"}  # blue and green of page.css
MEASURED = "measured runs"


def render_scaling_page(report: ScalingReport, created: float) -> str:
    """Return the HTML page.

    Args:
        created: Unix time that the page shows.
    """
    broken = any(curve.first_broken is not None or curve.reference is None for curve in report.curves)
    return render_content(
        PageContent(
            name=f"Scaling of {report.name}",
            state="breaks" if broken else "scales",
            level="warning" if broken else "good",
            summary=[f"{report.hardware}.", *report.sentences],
            tiles=list(_tiles(report)),
            sections=[
                _overview(report),
                *(_details(curve, report) for curve in report.curves),
                *_measured_section(report),
            ],
            footer=(
                f"Created on {datetime.fromtimestamp(created, UTC):%Y-%m-%d at %H:%M:%S} UTC. The method and "
                "its limits are described in docs/scaling.md of the toolkit."
            ),
        )
    )


def render_scaling_plot(report: ScalingReport) -> str:
    """Return an SVG picture of efficiency and of throughput per rank over the number of ranks."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # The object interface instead of pyplot has no global figures.
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, chart in ((left, _efficiency_chart(report)), (right, _throughput_chart(report))):
        for line in chart.series:
            xs = [2**x for x in line.x]
            mid, low, high = (
                None if values is None else [math.nan if value is None else value for value in values]
                for values in (line.mid, line.low, line.high)
            )
            colour = next((PLOT_COLOURS[kind] for kind in Scaling if line.name.startswith(kind)), "black")
            style = {"marker": "x", "linestyle": "none"} if line.name == MEASURED else {"marker": "o"}
            axes.plot(xs, mid, color=colour, markersize=4, label=line.name, **style)
            if low is not None and high is not None:
                axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.0f}")
        axes.set(xlabel="ranks", ylabel=chart.y_label, title=chart.title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    left.axhline(LEAST_EFFICIENCY, color="grey", linestyle="--", linewidth=1)
    figure.suptitle(f"{report.name} on {report.hardware}")
    picture = StringIO()
    with rc_context({"svg.hashsalt": "scaling"}):  # the same report gives the same file
        FigureCanvasSVG(figure).print_svg(picture, metadata={"Date": None})
    return picture.getvalue()


def _tiles(report: ScalingReport) -> Iterator[SummaryTile]:
    for curve in report.curves:
        name = f"{curve.scaling.value} scaling"
        good = [
            point.ranks
            for point in curve.points
            if not point.broken and (curve.first_broken is None or point.ranks < curve.first_broken.ranks)
        ]
        if good:
            yield SummaryTile(name, f"{good[-1]:,} ranks", f"with at least {LEAST_EFFICIENCY:.0%} efficiency")
        last = next((point for point in reversed(curve.points) if point.written is not None), None)
        if last is not None and last.written is not None and last.efficiency is not None:
            yield SummaryTile(
                f"{name}, {last.ranks:,} ranks",
                format_percent(last.efficiency.value),
                f"{format_seconds(last.written.estimate.seconds)} a step",
            )


def _overview(report: ScalingReport) -> ReportSection:
    intro = (
        "Efficiency is the throughput per rank relative to the smallest number of ranks that can run. The "
        "bands are 80% intervals. A line has a gap where the configuration as written cannot run.",
    )
    charts = (_efficiency_chart(report), _throughput_chart(report), _seconds_chart(report))
    return ReportSection(id="scaling", title="Scaling", intro=intro, charts=charts)


def _efficiency_chart(report: ScalingReport) -> Chart:
    series: list[Series] = []
    for curve in report.curves:
        known = [point.efficiency for point in curve.points]
        series.append(
            Series(
                name=f"{curve.scaling.value} scaling",
                colour=COLOURS[curve.scaling],
                x=[math.log2(point.ranks) for point in curve.points],
                mid=[None if value is None else value.value for value in known],
                low=[None if value is None else value.low for value in known],
                high=[None if value is None else value.high for value in known],
                dots=True,
            )
        )
        changed = [
            (math.log2(point.ranks), point.changed_efficiency.value)
            for point in curve.points
            if point.changed_efficiency is not None
        ]
        if changed:
            series.append(
                Series(
                    name=f"{curve.scaling.value} scaling with changes",
                    colour={"blue": "sky", "green": "teal"}[COLOURS[curve.scaling]],
                    x=[x for x, _ in changed],
                    mid=[value for _, value in changed],
                    dots=True,
                )
            )
    return Chart(
        id="efficiency",
        title="Efficiency",
        alt="Efficiency of strong and weak scaling over the number of ranks",
        series=tuple(series),
        y_label="efficiency",
        y_format=AxisFormat.PERCENT,
        x_format=AxisFormat.RANKS,
        from_zero=True,
    )


def _throughput_chart(report: ScalingReport) -> Chart:
    """Draw the throughput per rank, in which measured runs of any batch can be compared."""
    series = []
    for curve in report.curves:
        rows = [(math.log2(one.plan.world.ranks), one) for one in _written(curve)]
        samples = [
            one.plan.batch.global_batch * report.units_per_sample / one.plan.world.ranks for _, one in rows
        ]
        estimates = [one.estimate for _, one in rows]
        series.append(
            Series(
                name=f"{curve.scaling.value} scaling",
                colour=COLOURS[curve.scaling],
                x=[x for x, _ in rows],
                mid=[size / estimate.seconds for size, estimate in zip(samples, estimates, strict=True)],
                low=[size / estimate.high for size, estimate in zip(samples, estimates, strict=True)],
                high=[size / estimate.low for size, estimate in zip(samples, estimates, strict=True)],
                dots=True,
            )
        )
    if report.measured:
        series.append(
            Series(
                name=MEASURED,
                colour="ink",
                x=[math.log2(run.ranks) for run in report.measured],
                mid=[
                    run.global_batch * report.units_per_sample / (run.ranks * run.seconds)
                    for run in report.measured
                ],
                dots=True,
            )
        )
    return Chart(
        id="throughput",
        title="Throughput per rank",
        alt=f"{report.unit} per second and rank over the number of ranks",
        series=tuple(series),
        y_label=f"{report.unit} per second and rank",
        x_format=AxisFormat.RANKS,
        from_zero=True,
    )


def _seconds_chart(report: ScalingReport) -> Chart:
    return Chart(
        id="seconds",
        title="Seconds per step",
        alt="Predicted seconds of a step over the number of ranks",
        series=tuple(
            Series(
                name=f"{curve.scaling.value} scaling",
                colour=COLOURS[curve.scaling],
                x=[math.log2(one.plan.world.ranks) for one in _written(curve)],
                mid=[one.estimate.seconds for one in _written(curve)],
                low=[one.estimate.low for one in _written(curve)],
                high=[one.estimate.high for one in _written(curve)],
                dots=True,
            )
            for curve in report.curves
        ),
        y_label="seconds",
        y_format=AxisFormat.SECONDS,
        x_format=AxisFormat.RANKS,
    )


def _details(curve: ScalingCurve, report: ScalingReport) -> ReportSection:
    """Show where the time of each point goes, and the table of the points."""
    written = _written(curve)
    parts = list(dict.fromkeys(part for one in written for part in one.estimate.parts))
    colour_of = colours(parts)
    chart = Chart(
        id=f"{curve.scaling.value}-parts",
        title="Share of each part in a step",
        alt=f"Shares of the parts of a step under {curve.scaling.value} scaling",
        series=tuple(
            Series(
                name=part,
                colour=colour_of[part],
                x=[math.log2(one.plan.world.ranks) for one in written],
                mid=[one.estimate.parts.get(part, 0.0) / one.estimate.seconds for one in written],
            )
            for part in parts
        ),
        y_label="share of the step",
        y_format=AxisFormat.PERCENT,
        x_format=AxisFormat.RANKS,
        stacked=True,
    )
    table = ReportTable(
        caption=TITLES[curve.scaling],
        head=table_head(report),
        align="rrlrrrrr",
        rows=tuple(point_rows(curve, report)),
    )
    return ReportSection(
        id=curve.scaling.value,
        title=f"{curve.scaling.value.capitalize()} scaling",
        charts=(chart,) if parts else (),
        tables=(table,),
    )


def _measured_section(report: ScalingReport) -> Iterator[ReportSection]:
    if report.factors is None:
        return
    factors = report.factors
    yield ReportSection(
        id="measured",
        title="Measured runs",
        intro=(
            f"Computing is multiplied by {format_number(factors.computing)} and communication by "
            f"{format_number(factors.communication)}, which were fitted to these runs.",
        ),
        tables=(
            ReportTable(
                caption="Steps measured, predicted, and corrected by both factors",
                head=MEASURED_HEAD,
                align="lrlrrrr",
                rows=tuple(measured_rows(report)),
            ),
        ),
    )


def _written(curve: ScalingCurve) -> list[Candidate]:
    return [point.written for point in curve.points if point.written is not None]
