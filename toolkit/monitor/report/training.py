"""The training section: losses, gradient norm, learning rate, throughput and utilisation over the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from toolkit.monitor.report.curve_reader import is_number
from toolkit.monitor.report.downsample import Curves
from toolkit.monitor.report.elements import (
    AxisFormat,
    Chart,
    ChartMark,
    ReportSection,
    Series,
    curve_series,
    format_number,
)
from toolkit.monitor.report.run_curves import EPOCHS
from toolkit.monitor.report.run_data import AttemptRecord, ReportData, effective_attempts

MARKS = 60  # the newest alerts drawn on a curve
COLOURS = ("blue", "orange", "green", "pink", "red", "violet", "teal", "brown", "yellow", "grey")


def training_section(run: ReportData) -> ReportSection:
    if not run.steps.rows:
        return ReportSection(
            id="training", title="Training", intro=("There are no curves, because no step is complete yet.",)
        )
    intro = [_resolution(run.steps)]
    if dropped := run.steps.total("dropped_rows").sum:
        intro.append(f"{dropped:,.0f} more rows were dropped because the file system was too slow.")
    return ReportSection(id="training", title="Training", intro=tuple(intro), charts=tuple(_charts(run)))


def _resolution(curves: Curves) -> str:
    zoom = "Drag over a curve to zoom all of them, double-click to reset."
    if curves.width <= 1:
        return f"Each of the {curves.rows:,} steps is a point. {zoom}"
    return (
        f"{curves.rows:,} steps, {curves.width:,.0f} per point: the line is their median, the band their "
        f"range. {zoom}"
    )


def step_marks(run: ReportData) -> tuple[ChartMark, ...]:
    """Return marks for the borders between attempts and the newest alerts."""
    rows = [row for row in run.alerts.rows if is_number(row.get("step"))][-MARKS:]
    alerts = (
        ChartMark(
            row["step"],
            str(row.get("level", "warning")),
            f"{row.get('name', 'alert')}: {row.get('cause', '')}",
            str(row.get("name", "alert")),
        )
        for row in rows
    )
    return (*attempt_marks(run, lambda attempt: attempt.first), *alerts)


def attempt_marks(
    run: ReportData, position: Callable[[AttemptRecord], float | None]
) -> tuple[ChartMark, ...]:
    """Return a mark for the start of each later attempt whose steps were not all repeated."""
    later = [
        (attempt, first, at)
        for attempt, first in effective_attempts(run.attempts)[1:]
        if (at := position(attempt)) is not None
    ]
    return tuple(
        ChartMark(
            at,
            "attempt",
            f"attempt {attempt.number} starts after step {first:,}",
            f"attempt {attempt.number}",
        )
        for attempt, first, at in later[-MARKS:]
    )


def _charts(run: ReportData) -> Iterator[Chart]:
    marks = step_marks(run)
    losses = [curve_series(run.steps, "loss", "training", "blue")]
    for colour, (name, curves) in zip(COLOURS[1:] * (1 + len(run.evals)), run.evals.items(), strict=False):
        drawn = curve_series(curves, "loss", name, colour)
        losses.append(drawn and _with_dots(drawn))
    label = "loss" if run.unit == "samples" else f"loss (nats per {run.unit.removesuffix('s')})"
    yield from _chart("loss", "Loss", label, losses, marks)
    accuracies = [
        curve_series(curves, "accuracy", name, colour)
        for colour, (name, curves) in zip(COLOURS[1:] * (1 + len(run.evals)), run.evals.items(), strict=False)
    ]
    yield from _chart(
        "accuracy",
        "Accuracy",
        "accuracy",
        [one and _with_dots(one) for one in accuracies],
        marks,
        AxisFormat.PERCENT,
    )
    norm = curve_series(run.steps, "grad_norm", "gradient norm", "green")
    yield from _chart("grad_norm", "Gradient norm before clipping", "gradient norm", [norm], marks)
    yield from _chart(
        "lr",
        "Learning rate",
        "learning rate",
        [curve_series(run.steps, "lr", "learning rate", "violet")],
        marks,
    )
    speed = f"{run.unit}_per_second"
    yield from _chart(
        "speed",
        "Throughput",
        f"{run.unit}/s",
        [curve_series(run.steps, speed, f"{run.unit}/s", "blue")],
        marks,
        zero=True,
    )
    used = [curve_series(run.steps, "mfu", "MFU", "green"), curve_series(run.steps, "hfu", "HFU", "orange")]
    yield from _chart(
        "mfu",
        "Utilisation of the GPUs' peak",
        "share of the dense peak",
        used,
        marks,
        AxisFormat.PERCENT,
        zero=True,
    )
    flops = [
        curve_series(run.steps, "model_tflops_per_gpu", "model", "green"),
        curve_series(run.steps, "hardware_tflops_per_gpu", "hardware", "orange"),
    ]
    if run.steps.total("mfu").count == 0:
        yield from _chart("tflops", "FLOP/s per GPU", "TFLOP/s per GPU", flops, marks, zero=True)
    times = [
        curve_series(run.steps, "step_seconds", "step", "blue"),
        curve_series(run.steps, "data_seconds", "waiting for samples", "orange"),
        curve_series(run.steps, "gc_seconds", "garbage collection", "grey"),
    ]
    yield from _chart("seconds", "Time per step", "seconds", times, marks, AxisFormat.SECONDS, zero=True)
    memory = [
        curve_series(run.steps, "device_bytes", "tensors on the device", "green"),
        curve_series(run.steps, "host_bytes", "process", "blue"),
    ]
    yield from _chart(
        "memory", "Memory after a step on the fullest rank", "bytes", memory, marks, AxisFormat.BYTES
    )
    yield from _chart(
        "loss_scale",
        "fp16 loss scale",
        "loss scale",
        [curve_series(run.steps, "loss_scale", "loss scale", "brown")],
        marks,
    )
    epochs = [
        curve_series(run.steps, name, name.removeprefix(EPOCHS), colour)
        for colour, name in zip(
            COLOURS, sorted(name for name in run.steps.curves if name.startswith(EPOCHS)), strict=False
        )
    ]
    yield from _chart(
        "epochs",
        "Epochs of each source",
        "epochs",
        epochs,
        attempt_marks(run, lambda attempt: attempt.first),
        zero=True,
    )


def _with_dots(drawn: Series) -> Series:
    return Series(
        name=drawn.name,
        colour=drawn.colour,
        x=drawn.x,
        mid=drawn.mid,
        low=drawn.low,
        high=drawn.high,
        dots=len(drawn.x) <= 100,
    )


def _chart(
    name: str,
    title: str,
    label: str,
    series: list[Series | None],
    marks: tuple[ChartMark, ...],
    written: AxisFormat = AxisFormat.NUMBER,
    *,
    zero: bool = False,
) -> Iterator[Chart]:
    """Yield a chart if there is something to draw."""
    drawn = tuple(one for one in series if one is not None)
    if drawn:
        yield Chart(
            id=name,
            title=title,
            alt=f"{title} over the steps. {'; '.join(map(_describe_series, drawn))}",
            series=drawn,
            y_label=label,
            y_format=written,
            from_zero=zero,
            marks=marks,
        )


def _describe_series(series: Series) -> str:
    known = [value for value in series.mid if value is not None]
    return (
        f"{series.name}: from {format_number(known[0])} to {format_number(known[-1])}, minimum "
        f"{format_number(min(known))}, maximum {format_number(max(known))}"
    )
