"""The section on where the time of the steps went, from the rows of ``monitor/ledger_rows.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from toolkit.monitor.report.elements import (
    AxisFormat,
    Chart,
    ReportSection,
    ReportTable,
    Series,
    curve_series,
    format_percent,
    format_seconds,
)
from toolkit.monitor.report.run_data import LedgerCurves, ReportData
from toolkit.monitor.report.training import step_marks
from toolkit.step_parts import (
    BACKWARD,
    BUBBLE,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    LOGGING,
    OPTIMIZER,
    TRANSFER,
    UNEXPLAINED,
)

USEFUL_PARTS = (FORWARD, BACKWARD, OPTIMIZER)
COLOURS = {
    FORWARD: "sky",
    BACKWARD: "blue",
    OPTIMIZER: "green",
    DATA: "orange",
    TRANSFER: "yellow",
    BUBBLE: "red",
    CHECKPOINT: "brown",
    EVALUATION: "teal",
    LOGGING: "grey",
    UNEXPLAINED: "pale",
}
AXES_COLOURS = ("pink", "rose", "violet", "ink")
# from the bottom: useful parts, then lost time by size, then unexplained time
BOTTOM_PARTS = (*USEFUL_PARTS, TRANSFER)
MIN_DATA_SHARE = 0.01  # of all time; below, the ranks that wait for samples are not listed
RANKS = 8  # ranks listed as most often the slowest
# points of the shares; with narrower buckets an occasional save appears as stripes instead of its share
MAX_POINTS = 150


def ledger_section(run: ReportData) -> ReportSection:
    ledger = run.ledger
    parts = ledger.parts
    if not parts:
        why = (
            "it is disabled by monitor.ledger=false, and runs of older versions have none"
            if run.steps.rows
            else "no step is complete yet"
        )
        return ReportSection(id="ledger", title="Time breakdown", intro=(f"There is no time ledger: {why}.",))
    useful = sum(ledger.share(part) for part in USEFUL_PARTS)
    intro = (
        f"Forward, backward and optimizer took {format_percent(useful)} of the time of "
        f"{ledger.curves.rows:,} steps; {format_percent(ledger.share(UNEXPLAINED))} is unexplained. A step "
        "lasts from one wait for samples to the next, so it includes the evaluation and the save that "
        "follow it.",
        "Each part is that of the median rank. Parts of different ranks, for example of different pipeline "
        "stages, need not add up to the step.",
    )
    return ReportSection(
        id="ledger",
        title="Time breakdown",
        intro=intro,
        charts=(_shares_chart(run, parts), _seconds_chart(run)),
        tables=(_table(ledger, parts), *_rank_tables(ledger)),
    )


def colours(parts: list[str]) -> dict[str, str]:
    axes = sorted(part for part in parts if part not in COLOURS)
    return {**COLOURS, **{part: AXES_COLOURS[number % len(AXES_COLOURS)] for number, part in enumerate(axes)}}


def _shares_chart(run: ReportData, parts: list[str]) -> Chart:
    """Draw the share of each part in the time of a bucket's steps; they add up to 1."""
    curves = run.ledger.curves.curves
    order = [part for part in BOTTOM_PARTS if part in parts] + [
        part for part in parts if part not in (*BOTTOM_PARTS, UNEXPLAINED)
    ]
    order += [UNEXPLAINED] * (UNEXPLAINED in parts)
    points = len(run.ledger.curves.x)
    edges = [number * points // min(points, MAX_POINTS) for number in range(min(points, MAX_POINTS) + 1)]
    x = [run.ledger.curves.x[first] for first in edges[:-1]]
    sums = {
        part: [sum(value or 0.0 for value in curves[part].sum[first:end]) for first, end in pairwise(edges)]
        for part in order
    }
    whole = [sum(values) for values in zip(*sums.values(), strict=True)]
    colour_of = colours(parts)
    summary = ", ".join(f"{part} {format_percent(run.ledger.share(part))}" for part in parts)
    series = tuple(
        Series(
            name=part,
            colour=colour_of[part],
            x=x,
            mid=[value / of_all if of_all else 0.0 for value, of_all in zip(values, whole, strict=True)],
        )
        for part, values in sums.items()
    )
    return Chart(
        id="ledger-shares",
        title="Share of each part",
        series=series,
        y_label="share of the time",
        y_format=AxisFormat.PERCENT,
        stacked=True,
        marks=step_marks(run),
        alt=f"Stacked shares of each part in the steps' time. Over the whole run: {summary}.",
    )


def _seconds_chart(run: ReportData) -> Chart:
    """Draw the largest parts as lines, which shows what has grown."""
    curves, colour_of = run.ledger.curves, colours(run.ledger.parts)
    drawn = [curve_series(curves, "wall_seconds", "whole step", "ink")]
    drawn += [curve_series(curves, f"{part} max", part, colour_of[part]) for part in run.ledger.parts[:5]]
    lines = tuple(line for line in drawn if line is not None)
    return Chart(
        id="ledger-seconds",
        title="The largest parts on the slowest rank",
        series=lines,
        alt="Seconds of the five largest parts and of the whole step, over the steps.",
        y_label="seconds",
        y_format=AxisFormat.SECONDS,
        from_zero=True,
        marks=step_marks(run),
    )


def _table(ledger: LedgerCurves, parts: list[str]) -> ReportTable:
    """List each part's share, its mean over all steps, and its spread over ranks in the steps that have
    it.
    """
    rows = []
    for part in parts:
        middle = ledger.curves.total(part)
        low, high = ledger.curves.total(f"{part} min"), ledger.curves.total(f"{part} max")
        rows.append(
            (
                part,
                format_percent(ledger.share(part)),
                format_seconds(middle.sum / ledger.curves.rows),
                format_seconds(low.median),
                format_seconds(middle.median),
                format_seconds(high.median),
                format_seconds(high.high),
                f"{middle.count:,}",
            )
        )
    return ReportTable(
        caption="Parts of a step",
        align="nrrrrrrr",
        rows=tuple(rows),
        head=(
            "part",
            "share of all time",
            "mean a step",
            "fastest rank",
            "median rank",
            "slowest rank",
            "longest ever",
            "steps with it",
        ),
        note="Fastest, median and slowest rank refer to the median step among those that have the part. "
        "Communication is the exposed part, by axis; communication that overlaps with computing does "
        "not appear.",
    )


def _rank_tables(ledger: LedgerCurves) -> Iterator[ReportTable]:
    """Yield which ranks are busy longest and which wait for samples, if there are several ranks."""
    if ledger.ranks < 2:
        return
    if ledger.slowest:
        yield _rank_table(
            "The slowest rank",
            ledger.slowest,
            (
                "The slowest rank is busy longest, without waiting for other ranks or samples; in total "
                f"{format_seconds(ledger.excess_seconds)} longer than the median rank. By chance all ranks "
                "appear about equally often; one rank far above the others is slow. Pipeline stages "
                "differ by their layers."
            ),
        )
    if ledger.starved and ledger.share(DATA) >= MIN_DATA_SHARE:
        yield _rank_table(
            "The rank that waited longest for samples",
            ledger.starved,
            "A single rank indicates a problem of its own disk, network or processors.",
        )


def _rank_table(caption: str, counts: Counter[int], note: str) -> ReportTable:
    total = sum(counts.values())
    rows = tuple(
        (f"rank {rank}", f"{count:,}", format_percent(count / total))
        for rank, count in counts.most_common(RANKS)
    )
    return ReportTable(caption=caption, head=("rank", "steps", "share"), align="lrr", rows=rows, note=note)
