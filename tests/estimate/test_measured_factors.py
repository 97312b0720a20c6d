"""The factors of measured runs, on runs made from known factors.

pytest tests/estimate/test_measured_factors.py
"""

from __future__ import annotations

import math

import pytest

from toolkit.estimate.measured_factors import (
    MeasuredEstimate,
    SpeedFactors,
    apply_factors,
    fit_speed_factors,
    log_spread,
    ratio_spread,
)
from toolkit.estimate.types import StepEstimate


def predicted(ranks: int) -> StepEstimate:
    """Computing that is divided by the ranks, and a ring."""
    computing, exchange = 8.0 / ranks, 0.5 * (ranks - 1) / ranks
    seconds = computing + exchange
    return StepEstimate(
        seconds=seconds,
        low=seconds / 1.5,
        high=seconds * 1.5,
        parts={"forward": computing / 3, "backward": computing * 2 / 3, "communication/data": exchange},
    )


def measured(ranks: int, computing: float, communication: float) -> MeasuredEstimate:
    """A run that takes ``computing`` and ``communication`` times as long as predicted."""
    estimate = predicted(ranks)
    exchange = estimate.parts["communication/data"]
    return MeasuredEstimate(
        name=f"run-{ranks}",
        layout="",
        ranks=ranks,
        global_batch=8,
        estimate=estimate,
        seconds=computing * (estimate.seconds - exchange) + communication * exchange,
    )


@pytest.mark.parametrize(("computing", "communication"), [(1.0, 1.0), (1.3, 1.8), (0.8, 0.7), (2.0, 1.0)])
def test_two_small_runs_give_the_factors_of_a_known_machine(computing: float, communication: float) -> None:
    factors = fit_speed_factors(
        [measured(2, computing, communication), measured(8, computing, communication)]
    )
    assert factors.computing == pytest.approx(computing, rel=0.01)
    for ranks in (16, 64, 1024):
        true = measured(ranks, computing, communication).seconds
        found = apply_factors(predicted(ranks), factors, ranks)
        assert found.seconds == pytest.approx(true, rel=0.01)
        assert found.low < true < found.high
        assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_control_two_runs_with_the_same_share_do_not_determine_communication() -> None:
    """Such runs are reproduced, but an extrapolation from them is not, and its interval says so."""
    runs = [measured(1, 1.0, 2.0), measured(1, 1.0, 2.0)]  # one rank does not communicate
    factors = fit_speed_factors(runs)
    assert factors.communication == pytest.approx(1.0)
    true = measured(64, 1.0, 2.0).seconds
    found = apply_factors(predicted(64), factors, 64)
    assert found.seconds < 0.8 * true
    determined = apply_factors(
        predicted(64), fit_speed_factors([measured(2, 1.0, 2.0), measured(8, 1.0, 2.0)]), 64
    )
    assert found.high / found.low > determined.high / determined.low


def test_one_run_moves_what_it_measured() -> None:
    alone = fit_speed_factors([measured(1, 1.3, 1.3)])
    assert alone.computing == pytest.approx(1.3, rel=0.01)
    assert alone.communication == pytest.approx(1.0, rel=0.01)


def test_runs_that_contradict_each_other_widen_the_interval() -> None:
    agree = fit_speed_factors([measured(2, 1.2, 1.2), measured(2, 1.2, 1.2)])
    contradict = fit_speed_factors([measured(2, 1.0, 1.0), measured(2, 1.4, 1.4)])
    assert contradict.covariance[0] > 10 * agree.covariance[0]


def test_the_interval_of_a_fit_is_wider_beyond_the_largest_run() -> None:
    factors = fit_speed_factors([measured(2, 1.1, 1.2), measured(8, 1.1, 1.2)])
    near, far = (apply_factors(predicted(64), factors, ranks) for ranks in (8, 64))
    assert near.seconds == far.seconds
    assert far.high / far.low > near.high / near.low > 1


def test_common_errors_cancel_in_an_efficiency() -> None:
    reference, other = predicted(1), predicted(64)
    assert ratio_spread(reference, reference, None, 1) == 0.0
    assert ratio_spread(other, reference, None, 64) > 0.0
    assert log_spread(other) == pytest.approx(math.log(1.5) / 1.2816)
    certain = SpeedFactors(
        computing=1.0, communication=1.0, covariance=(1e-6, 0.0, 1e-6), spread=0.1, ranks=64
    )
    assert ratio_spread(other, reference, certain, 64) < 0.01 < ratio_spread(other, reference, certain, 1024)
