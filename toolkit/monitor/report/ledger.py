"""Where the time of the steps went, over all ranks: the rows of ``monitor/ledger_rows.py``."""

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
from toolkit.monitor.step_parts import (
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
FIRST = (
    *USEFUL_PARTS,
    TRANSFER,
)  # from below: what is useful; then what is not, the largest first; last what is not known
STARVING = 0.01  # of all time: less is not worth asking whose it is
RANKS = 8  # the most often slowest ones that are named
STACKED = 150  # points of the shares: of less, a save now and then is seen as stripes instead of its share


def ledger_section(run: ReportData) -> ReportSection:
    held = run.ledger
    parts = held.parts
    if not parts:
        why = (
            "monitor.ledger=false leaves it out, and runs of older versions have none"
            if run.steps.rows
            else "no step is done yet"
        )
        return ReportSection(id="ledger", title="Where the time goes", intro=(f"There is no ledger: {why}.",))
    useful = sum(held.share(part) for part in USEFUL_PARTS)
    intro = (
        f"Forward, backward and optimizer took {format_percent(useful)} of the time of {held.curves.rows:,} steps, "
        f"{format_percent(held.share(UNEXPLAINED))} is unexplained. A step reaches from one wait for samples to the next, so the evaluation and "
        f"the save that followed it are its own.",
        "Each part is that of the median rank. Ranks differ, in a pipeline by their stage, so the parts need not add up to the step.",
    )
    return ReportSection(
        id="ledger",
        title="Where the time goes",
        intro=intro,
        charts=(_stack(run, parts), _walls(run)),
        tables=(_table(held, parts), *_ranks(held)),
    )


def colours(parts: list[str]) -> dict[str, str]:
    axes = sorted(part for part in parts if part not in COLOURS)
    return {**COLOURS, **{part: AXES_COLOURS[number % len(AXES_COLOURS)] for number, part in enumerate(axes)}}


def _stack(run: ReportData, parts: list[str]) -> Chart:
    """Shares of the time of a bucket's steps; they make 1."""
    curves = run.ledger.curves.curves
    order = [part for part in FIRST if part in parts] + [
        part for part in parts if part not in (*FIRST, UNEXPLAINED)
    ]
    order += [UNEXPLAINED] * (UNEXPLAINED in parts)
    points = len(run.ledger.curves.x)
    edges = [number * points // min(points, STACKED) for number in range(min(points, STACKED) + 1)]
    x = [run.ledger.curves.x[first] for first in edges[:-1]]
    sums = {
        part: [sum(value or 0.0 for value in curves[part].sum[first:end]) for first, end in pairwise(edges)]
        for part in order
    }
    whole = [sum(values) for values in zip(*sums.values(), strict=True)]
    paint = colours(parts)
    said = ", ".join(f"{part} {format_percent(run.ledger.share(part))}" for part in parts)
    series = tuple(
        Series(
            name=part,
            colour=paint[part],
            x=x,
            mid=[value / of_all if of_all else 0.0 for value, of_all in zip(values, whole, strict=True)],
        )
        for part, values in sums.items()
    )
    return Chart(
        id="ledger-shares",
        title="Shares of the steps' time",
        series=series,
        y_label="share of the time",
        y_format=AxisFormat.PERCENT,
        stacked=True,
        marks=step_marks(run),
        alt=f"Shares of each part in the steps' time, stacked. In all: {said}.",
    )


def _walls(run: ReportData) -> Chart:
    """The largest parts as lines, so that what grew is seen."""
    curves, paint = run.ledger.curves, colours(run.ledger.parts)
    drawn = [curve_series(curves, "wall_seconds", "whole step", "ink")]
    drawn += [curve_series(curves, f"{part} max", part, paint[part]) for part in run.ledger.parts[:5]]
    lines = tuple(one for one in drawn if one is not None)
    return Chart(
        id="ledger-seconds",
        title="Seconds of the largest parts, slowest rank",
        series=lines,
        alt="Seconds of the five largest parts, and of the whole step, over the steps.",
        y_label="seconds",
        y_format=AxisFormat.SECONDS,
        from_zero=True,
        marks=step_marks(run),
    )


def _table(held: LedgerCurves, parts: list[str]) -> ReportTable:
    """Per part: its share, its mean over all steps, and how ranks differ in the steps that have it."""
    rows = []
    for part in parts:
        middle = held.curves.total(part)
        low, high = held.curves.total(f"{part} min"), held.curves.total(f"{part} max")
        rows.append(
            (
                part,
                format_percent(held.share(part)),
                format_seconds(middle.sum / held.curves.rows),
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
            "quickest rank",
            "median rank",
            "slowest rank",
            "longest ever",
            "steps with it",
        ),
        note="Quickest, median and slowest rank are of the median step among those that have the part. Exposed communication is named by "
        "its axes; what overlaps with computing takes no time here.",
    )


def _ranks(held: LedgerCurves) -> Iterator[ReportTable]:
    """Who is the longest busy, and who waits for samples, if there is anybody to compare with."""
    if held.ranks < 2:
        return
    if held.slowest:
        yield _who(
            "The slowest rank",
            held.slowest,
            (
                f"Slowest: the longest busy, without waiting for others or for samples; in all {format_seconds(held.excess_seconds)} beyond the "
                f"median rank. Ranks that differ by chance take turns here, a slow one stands alone. In a pipeline stages differ by what they "
                f"hold."
            ),
        )
    if held.starved and held.share(DATA) >= STARVING:
        yield _who(
            "The rank that waited longest for its samples",
            held.starved,
            "One rank alone: its own disk, network or processors.",
        )


def _who(caption: str, counts: Counter[int], note: str) -> ReportTable:
    total = sum(counts.values())
    rows = tuple(
        (f"rank {rank}", f"{count:,}", format_percent(count / total))
        for rank, count in counts.most_common(RANKS)
    )
    return ReportTable(caption=caption, head=("rank", "steps", "share"), align="lrr", rows=rows, note=note)
