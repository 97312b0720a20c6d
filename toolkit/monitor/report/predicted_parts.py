"""Compare the predicted time of a step with the measured one, part by part, and name the part that differs
most.

The prediction is ``step_seconds`` of plan.json (``toolkit/estimate/step.py``), whose parts have the names of
the step-time ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.commands import command_line
from toolkit.monitor.report.curve_reader import is_number
from toolkit.monitor.report.downsample import RunningStats
from toolkit.monitor.report.elements import UNKNOWN, ReportTable, format_percent, format_seconds
from toolkit.monitor.report.run_data import mapping_at
from toolkit.step_parts import (
    BACKWARD,
    BUBBLE,
    COMMUNICATION,
    DATA,
    FORWARD,
    OPTIMIZER,
    TRANSFER,
    UNDIVIDED_PARTS,
    UNEXPLAINED,
)

WALL = "wall_seconds"  # of a row of the ledger
STEP = "step_seconds"
NEGLIGIBLE = 0.005  # of the step: parts that are smaller in both columns are not listed

_COMPUTING = (
    "The device computes {slower} than its profile: another clock, other kernels than the profile's, or "
    "matrix shapes that use it differently. See the clocks under Hardware and the plan's attention, loss and "
    "compile, and record a trace with monitor.profile_step=STEP."
)
REASONS = {
    FORWARD: _COMPUTING,
    BACKWARD: _COMPUTING,
    BUBBLE: "The stages of the pipeline take unequal time, or a stage waits for a late neighbour. Compare "
    "the ranks under Time breakdown; more micro-batches or virtual stages make the bubble smaller.",
    OPTIMIZER: "The update runs at another speed of memory, or on another device, than the profile's. See "
    "the optimizer kernel and offload in the plan.",
    TRANSFER: "Copies between host and device run at another speed than the profile's, which `{calibrate}` "
    "measures.",
    DATA: "The prediction assumes that samples are ready. See who waits for them under Time breakdown; more "
    "data.workers or a local copy of the data help.",
    COMMUNICATION: "The links run at another speed than the profile's, other collectives overlap with "
    "computing than assumed, or ranks wait for a slower one. Compare the links along each axis below with "
    "the ranks under Time breakdown.",
    UNEXPLAINED: "This time is outside of all parts: Python, hooks, or garbage collection. Record a trace "
    "with monitor.profile_step=STEP.",
}


@dataclass(frozen=True, slots=True)
class PartDifference:
    """Seconds of one part in a step; None: not predicted, or not measured."""

    part: str
    predicted: float | None
    measured: float | None

    @property
    def seconds(self) -> float:
        """The measured minus the predicted time of the part."""
        return (self.measured or 0.0) - (self.predicted or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """Predicted and measured seconds of the median step.

    Attributes:
        low, high: bounds of the prediction's 80% interval; None if plan.json has none.
        parts: the largest difference first, empty without a ledger. They do not include evaluation, saving
            and logging, which are not parts of the predicted step.
    """

    predicted: float
    low: float | None
    high: float | None
    measured: float
    parts: tuple[PartDifference, ...]

    @property
    def within(self) -> bool | None:
        """Whether the measured step is in the interval; None if there is no interval."""
        if self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high


def compare_step(
    plan: Mapping[str, Any], total: Callable[[str], RunningStats], recorded: Collection[str]
) -> StepComparison | None:
    """Compare a plan with the metrics and the ledger of the attempt that it belongs to.

    Args:
        plan: content of plan.json.
        total: returns the statistics of a step's metric or of a part of the ledger.
        recorded: the parts that the ledger has; empty without a ledger.

    Returns:
        None if nothing was predicted, as by older versions, or no step has been measured.
    """
    prediction = mapping_at(plan, STEP)
    predicted, measured = prediction.get("seconds"), total(STEP).median
    if not is_number(predicted) or predicted <= 0 or not measured:
        return None
    low, high = (value if is_number(value := prediction.get(name)) else None for name in ("low", "high"))
    expected = {name: value for name, value in mapping_at(prediction, "parts").items() if is_number(value)}
    return StepComparison(
        predicted=predicted,
        low=low,
        high=high,
        measured=measured,
        parts=tuple(
            sorted(_differences(expected, total, recorded), key=lambda part: (-abs(part.seconds), part.part))
        ),
    )


def _differences(
    expected: Mapping[str, float], total: Callable[[str], RunningStats], recorded: Collection[str]
) -> Iterator[PartDifference]:
    if not recorded:
        return
    for name in {*recorded, *expected} - UNDIVIDED_PARTS:
        stats = total(name)
        # Rows of the ledger leave out parts that took no time, so a part of few steps has a median of zero.
        measured = stats.median if 2 * stats.count >= total(WALL).count else None
        if measured or expected.get(name):
            yield PartDifference(name, expected.get(name), measured)


def step_sentence(comparison: StepComparison) -> str:
    """Describe the comparison and the part that differs most, with its likely reason."""
    predicted, measured = comparison.predicted, comparison.measured
    where = {None: "", True: ", within the predicted interval", False: ", outside the predicted interval"}
    change = measured / predicted - 1
    compared = f"{format_percent(abs(change))} {'longer' if change > 0 else 'shorter'} than predicted"
    text = f"The median step took {format_seconds(measured)}, {compared}{where[comparison.within]}."
    if not comparison.parts:
        return text
    worst = comparison.parts[0]
    return (
        f"{text} The largest difference is {worst.part}: {format_seconds(worst.measured or 0.0)} instead of "
        f"{format_seconds(worst.predicted or 0.0)}. {likely_reason(worst)}"
    )


def likely_reason(difference: PartDifference) -> str:
    """State why a part may differ, and where to look."""
    return REASONS.get(difference.part.partition("/")[0], "").format(
        slower="slower" if difference.seconds > 0 else "faster", calibrate=command_line("calibrate")
    )


def parts_table(comparison: StepComparison, caption: str) -> ReportTable:
    """List predicted and measured seconds of each part, and of the whole step with its interval."""
    least = NEGLIGIBLE * max(comparison.predicted, comparison.measured)
    shown = [part for part in comparison.parts if max(part.predicted or 0.0, part.measured or 0.0) >= least]
    whole = (
        "whole step",
        format_interval(comparison),
        format_seconds(comparison.measured),
        _signed(comparison.measured - comparison.predicted),
        _relative(comparison.measured - comparison.predicted, comparison.predicted),
    )
    return ReportTable(
        caption=caption,
        head=("part", "predicted", "measured", "difference", "of the prediction"),
        align="nrrrr",
        rows=(whole, *(_row(part) for part in shown)),
        note="Measured: the median step, and of each part that of the median rank. The interval contains the "
        f"measured step with a probability of 80%. `{command_line('calibrate', 'RUN_DIR')}` adds this run to "
        "the calibration of its machines.",
    )


def format_interval(comparison: StepComparison) -> str:
    """Format the prediction as ``1.23 s (1.1 s to 1.4 s)``."""
    predicted, low, high = comparison.predicted, comparison.low, comparison.high
    interval = "" if low is None or high is None else f" ({format_seconds(low)} to {format_seconds(high)})"
    return f"{format_seconds(predicted)}{interval}"


def _row(part: PartDifference) -> tuple[str, ...]:
    return (
        part.part,
        format_seconds(part.predicted),
        format_seconds(part.measured),
        _signed(part.seconds),
        _relative(part.seconds, part.predicted),
    )


def _signed(seconds: float) -> str:
    return f"{'+' if seconds > 0 else '-' if seconds < 0 else ''}{format_seconds(abs(seconds))}"


def _relative(seconds: float, predicted: float | None) -> str:
    return UNKNOWN if not predicted else f"{seconds / predicted:+.0%}"
