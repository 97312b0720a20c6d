"""Correct predicted step times by measured runs: one factor for computing and one for communication.

The estimate of a step is ``C + M``: seconds of computing (forward, backward, bubble, optimizer, transfers)
and seconds of exposed communication. A measured run took ``a C + b M``. The factors ``a`` and ``b`` are those
of the machine, so they hold at every number of ranks, and two runs with different shares of communication
determine both. The prior of their logarithms (estimate/calibration_fit.py) is as wide as the estimate's own
interval; so one run, or several with the same shares, moves only what it has measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.estimate.calibration_fit import fit_positive
from toolkit.estimate.types import INTERVAL_QUANTILE, StepEstimate
from toolkit.step_parts import COMMUNICATION

# Assumed relative difference between two runs of the same plan: other nodes, other neighbours.
RUN_TO_RUN = 0.01
LEAST_SPREAD = 0.02  # of a factor before a run was measured: no profile is more certain than that


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEstimate:
    """The estimate of a run that was also measured.

    Attributes:
        name: of the run, for people.
        layout: of the run, for people.
        ranks: of the run.
        global_batch: samples of a step.
        estimate: predicted without factors.
        seconds: measured median of a step.
    """

    name: str
    layout: str
    ranks: int
    global_batch: int
    estimate: StepEstimate
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFactors:
    """Measured over predicted seconds.

    Attributes:
        computing, communication: the factors.
        covariance: of their logarithms: variance of computing, covariance, variance of communication.
        spread: standard deviation of both logarithms before the runs were measured.
        ranks: of the largest measured run.
    """

    computing: float
    communication: float
    covariance: tuple[float, float, float]
    spread: float
    ranks: int


def split_seconds(estimate: StepEstimate) -> tuple[float, float]:
    """Return the seconds of computing and of communication, which add up to ``estimate.seconds``."""
    exposed = sum(seconds for name, seconds in estimate.parts.items() if name.startswith(COMMUNICATION))
    return estimate.seconds - exposed, exposed


def log_spread(estimate: StepEstimate) -> float:
    """Return the standard deviation of the logarithm of the predicted seconds."""
    return max(LEAST_SPREAD, math.log(estimate.high / estimate.low) / (2 * INTERVAL_QUANTILE))


def fit_speed_factors(runs: Sequence[MeasuredEstimate]) -> SpeedFactors:
    """Fit both factors to at least one run.

    The covariance grows where the runs contradict each other, or the interval of the estimates.
    """
    assert runs, "a fit needs a measured run"
    prior = sum(log_spread(run.estimate) for run in runs) / len(runs)

    def residuals(factors: Sequence[float]) -> list[float]:
        a, b = factors
        parts = [(run.seconds, *split_seconds(run.estimate)) for run in runs]
        return [
            math.log((a * computing + b * communication) / seconds) / RUN_TO_RUN
            for seconds, computing, communication in parts
        ]

    found, covariance = fit_positive(residuals, 2, prior)
    left = [*residuals(found), *(math.log(factor) / prior for factor in found)]
    scale = max(1.0, math.fsum(value**2 for value in left) / len(runs))
    return SpeedFactors(
        computing=found[0],
        communication=found[1],
        covariance=(covariance[0][0] * scale, covariance[0][1] * scale, covariance[1][1] * scale),
        spread=prior,
        ranks=max(run.ranks for run in runs),
    )


def apply_factors(estimate: StepEstimate, factors: SpeedFactors, ranks: int) -> StepEstimate:
    """Return ``estimate`` of a run on ``ranks`` multiplied by the factors, with the interval of the fit."""
    parts = {
        name: seconds * (factors.communication if name.startswith(COMMUNICATION) else factors.computing)
        for name, seconds in estimate.parts.items()
    }
    seconds = sum(parts.values())
    share = communication_share(replace(estimate, seconds=seconds, parts=parts))
    deviation = math.sqrt(_variance(factors, ranks, 1 - share, share) + RUN_TO_RUN**2)
    return replace(
        estimate,
        seconds=seconds,
        low=seconds * math.exp(-INTERVAL_QUANTILE * deviation),
        high=seconds * math.exp(INTERVAL_QUANTILE * deviation),
        parts=parts,
    )


def communication_share(estimate: StepEstimate) -> float:
    return split_seconds(estimate)[1] / estimate.seconds


def ratio_spread(
    estimate: StepEstimate, reference: StepEstimate, factors: SpeedFactors | None, ranks: int
) -> float:
    """Return the standard deviation of the logarithm of ``estimate.seconds / reference.seconds``.

    What both have in common, such as a GPU that is slower than its data sheet, cancels; so only the
    difference of their shares of communication counts.

    Args:
        factors: those that both estimates are multiplied by; None: both have the profile's own interval.
        ranks: of the run of ``estimate``.
    """
    difference = communication_share(estimate) - communication_share(reference)
    if factors is None:
        return math.sqrt(2) * log_spread(estimate) * abs(difference)
    return math.sqrt(_variance(factors, ranks, -difference, difference))


def _variance(factors: SpeedFactors, ranks: int, computing: float, communication: float) -> float:
    """Return the variance of a logarithm with these derivatives by the logarithms of the factors.

    Beyond the largest measured run, the network is again as uncertain as its profile: more switches, links
    and neighbours than in any measurement.
    """
    var_a, covariance, var_b = factors.covariance
    var_b += factors.spread**2 * max(0.0, 1 - factors.ranks / ranks)
    return computing**2 * var_a + 2 * computing * communication * covariance + communication**2 * var_b
