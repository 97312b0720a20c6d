"""Correct predicted step times by measured runs: one factor for computing and one for communication.

The estimate of a step is ``C + M``: seconds of computing (forward, backward, bubble, optimizer, transfers)
and seconds of exposed communication. A measured run took ``a C + b M``. The factors ``a`` and ``b`` are those
of the machine, so they hold at every number of ranks, and two runs with different shares of communication
determine both. They are fitted in logarithms by Gauss-Newton with a ridge towards 1, whose width is that of
the estimate's own interval; so one run, or several with the same shares, moves only what it has measured
(Bishop 2006, Pattern Recognition and Machine Learning, section 3.3: ridge regression as a normal prior).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.estimate.types import INTERVAL_QUANTILE, StepEstimate
from toolkit.step_parts import COMMUNICATION

# Assumed relative difference between two runs of the same plan: other nodes, other neighbours.
RUN_TO_RUN = 0.01
LEAST_SPREAD = 0.02  # of a factor before a run was measured: no profile is more certain than that
WEIGHT = RUN_TO_RUN**-2
ITERATIONS = 50


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


def fit_factors(runs: Sequence[MeasuredEstimate]) -> SpeedFactors:
    """Fit both factors to at least one run.

    The covariance grows where the runs contradict each other, or the interval of the estimates.
    """
    assert runs, "a fit needs a measured run"
    prior = sum(log_spread(run.estimate) for run in runs) / len(runs)
    a = b = 0.0  # logarithms of the factors
    aa = ab = bb = residuals = 0.0
    for _ in range(ITERATIONS):
        # Normal equations of the ridge: (J'WJ + I / prior^2) step = J'Wr - factors / prior^2.
        aa, ab, bb = prior**-2, 0.0, prior**-2
        right_a, right_b = -a / prior**2, -b / prior**2
        residuals = (a / prior) ** 2 + (b / prior) ** 2
        for run in runs:
            computing, communication = split_seconds(run.estimate)
            computing, communication = math.exp(a) * computing, math.exp(b) * communication
            predicted = computing + communication
            share = communication / predicted
            residual = math.log(run.seconds / predicted)
            aa += WEIGHT * (1 - share) ** 2
            ab += WEIGHT * (1 - share) * share
            bb += WEIGHT * share**2
            right_a += WEIGHT * (1 - share) * residual
            right_b += WEIGHT * share * residual
            residuals += WEIGHT * residual**2
        determinant = aa * bb - ab * ab
        step_a = (bb * right_a - ab * right_b) / determinant
        step_b = (aa * right_b - ab * right_a) / determinant
        a, b = a + step_a, b + step_b
        if abs(step_a) + abs(step_b) < 1e-10:
            break
    scale = max(1.0, residuals / len(runs)) / (aa * bb - ab * ab)
    return SpeedFactors(
        computing=math.exp(a),
        communication=math.exp(b),
        covariance=(bb * scale, -ab * scale, aa * scale),
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
