"""Fit a few factors of a hardware profile to measured runs.

Each factor multiplies the seconds of one physical quantity: matrix products, attention, memory traffic, each
kind of link, and the engine's own work. The fit minimises, in logarithms of the factors x,

    sum over runs  (log(predicted step / measured step) / S)^2  +  sum over their parts
    ((predicted part - measured part) / measured step / P)^2  +  sum (x / width)^2

by Gauss-Newton steps, with Huber's loss instead of the squares of outliers. The last term is a ridge, which
is a normal prior around the profile (Bishop 2006, Pattern Recognition and Machine Learning, section 3.3): a
run moves only the factors that its parts depend on, and a single run moves them less than several that
agree. All runs of a calibration are fitted together, so
their order does not matter and a run that is added twice counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.estimate.types import StepEstimate
from toolkit.layout.axes import Axis
from toolkit.step_parts import BACKWARD, BUBBLE, FORWARD, communication

if TYPE_CHECKING:
    import numpy as np

STEP_SPREAD = 0.02  # S: relative difference of repeated runs on one cluster
PART_SPREAD = 0.03  # P: of a part relative to the step; the ledger's marks attribute some work to a neighbour
FACTOR_WIDTH = 0.5  # width of the prior of a factor: two thirds of clusters are within a factor of 1.65
OUTLIER = 3.0  # standard deviations beyond which a residual counts linearly
ITERATIONS = 50
MAX_STEP, SMALL_STEP = 0.5, 1e-6  # of a logarithm in one iteration
DIFFERENCE = 1e-3  # of a logarithm, for derivatives
LEAST_DEVIATION = 0.02  # of a calibrated prediction, however well the runs are reproduced

# Parts that are compared together: a wait for another pipeline stage is communication or bubble, depending on
# who is late, and torch's recomputation belongs to backward.
GROUPS = {FORWARD: "computing", BACKWARD: "computing", BUBBLE: "waiting"}

Factors = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """A measured run, to which factors are fitted.

    Attributes:
        name: the run's folder, for people.
        seconds: of the median step after warm-up, without evaluation, saving and logging.
        parts: seconds of the median rank by the names of the ledger's parts; empty without a ledger.
        estimate: predicts the run with factors.
    """

    name: str
    seconds: float
    parts: Mapping[str, float]
    estimate: Callable[[Factors], StepEstimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedFactors:
    """The result of a fit.

    Attributes:
        factors: by name; 1 leaves the profile as it is.
        deviation: standard deviation of the logarithm of a predicted step, from the runs' residuals.
    """

    factors: Factors
    deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResidual:
    """Seconds of a part, or of the whole step, of a run: measured, and predicted before and after the fit."""

    run: str
    part: str
    measured: float
    before: float
    after: float


def fit_factors(
    names: Sequence[str], runs: Sequence[CalibrationRun], width: float = FACTOR_WIDTH
) -> FittedFactors:
    """Fit the factors ``names`` to ``runs``; all are 1 without runs.

    Args:
        width: of the prior of a factor's logarithm.
    """

    def residuals(factors: Sequence[float]) -> list[float]:
        named = dict(zip(names, factors, strict=True))
        weighted = (value for run in runs for value in _weighted_residuals(run, run.estimate(named)))
        return [_huber(value) for value in weighted]

    found, _ = fit_positive(residuals, len(names), width)
    factors = dict(zip(names, found, strict=True))
    return FittedFactors(factors=factors, deviation=_deviation(runs, factors, len(names)))


def fit_positive(
    residuals: Callable[[Sequence[float]], Sequence[float]], count: int, width: float
) -> tuple[list[float], list[list[float]]]:
    """Minimise the squared residuals over ``count`` positive numbers near 1.

    Args:
        width: standard deviation of the prior of their logarithms.

    Returns:
        The numbers, and the covariance of their logarithms, ``[count][count]``.
    """
    import numpy as np

    def linearise(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        here = np.array(residuals(np.exp(logs).tolist()))
        columns = [
            np.array(residuals(np.exp(logs + DIFFERENCE * direction).tolist())) - here
            for direction in np.eye(count)
        ]
        return here, np.stack(columns, axis=1) / DIFFERENCE

    prior = np.eye(count) / width**2
    logs = np.zeros(count)
    here, jacobian = linearise(logs)
    for _ in range(ITERATIONS):
        step = np.linalg.solve(jacobian.T @ jacobian + prior, -(jacobian.T @ here) - prior @ logs)
        logs = logs + np.clip(step, -MAX_STEP, MAX_STEP)
        here, jacobian = linearise(logs)
        if np.abs(step).max() < SMALL_STEP:
            break
    return np.exp(logs).tolist(), np.linalg.inv(jacobian.T @ jacobian + prior).tolist()


def _weighted_residuals(run: CalibrationRun, estimate: StepEstimate) -> Iterator[float]:
    yield math.log(estimate.seconds / run.seconds) / STEP_SPREAD
    if run.parts:
        measured, predicted = grouped(run.parts), grouped(estimate.parts)
        for name in sorted({*measured, *predicted}):
            difference = predicted.get(name, 0.0) - measured.get(name, 0.0)
            yield difference / run.seconds / PART_SPREAD


def _huber(residual: float) -> float:
    """Return the number whose square is Huber's loss, linear for outliers such as a run on a busy machine."""
    size = abs(residual)
    if size <= OUTLIER:
        return residual
    return math.copysign(math.sqrt(2 * OUTLIER * size - OUTLIER**2), residual)


def grouped(parts: Mapping[str, float]) -> dict[str, float]:
    """Add up the parts that are compared together."""
    sums: dict[str, float] = {}
    for name, seconds in parts.items():
        group = "waiting" if name == communication(Axis.PIPELINE) else GROUPS.get(name, name)
        sums[group] = sums.get(group, 0.0) + seconds
    return sums


def _deviation(runs: Sequence[CalibrationRun], factors: Factors, free: int) -> float:
    """Return the root mean square residual of the steps, and LEAST_DEVIATION in addition.

    The ridge leaves the number of degrees of freedom open; at most half of the runs count as used up.
    """
    squares = [math.log(run.estimate(factors).seconds / run.seconds) ** 2 for run in runs]
    left = max(1.0, len(runs) - min(free, len(runs) / 2))
    return math.sqrt(LEAST_DEVIATION**2 + sum(squares) / left)


def run_residuals(runs: Sequence[CalibrationRun], fitted: Factors) -> Iterator[PartResidual]:
    """Yield each run's whole step (``part`` is empty) and its parts, the largest first."""
    for run in runs:
        before, after = run.estimate({}), run.estimate(fitted)
        yield PartResidual(
            run=run.name, part="", measured=run.seconds, before=before.seconds, after=after.seconds
        )
        names = {*run.parts, *before.parts} if run.parts else set()
        for part in sorted(names, key=lambda part: (-run.parts.get(part, 0.0), part)):
            yield PartResidual(
                run=run.name,
                part=part,
                measured=run.parts.get(part, 0.0),
                before=before.parts.get(part, 0.0),
                after=after.parts.get(part, 0.0),
            )
