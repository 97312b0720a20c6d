"""Predict the goodput of a run under failures from the figures of another run. Pure.

``predict`` uses the planner's functions (``toolkit/estimate/save_interval.py``), which know the mean time
between failures. ``replay`` moves the same figures through one schedule of failures. So chance in the number
and the moments of failures does not separate its result from that of a run under this schedule.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf

from toolkit.cluster.supervisor import FIRST_DELAY_SECONDS, Restart, decide_restart
from toolkit.errors import ExitCode
from toolkit.estimate.save_interval import SaveCosts

LIMIT = 1000  # cluster.restarts


@dataclass(frozen=True, slots=True)
class Failure:
    """The death of a rank, ``at`` seconds after the beginning of the measurement."""

    at: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the calibration measured, in seconds unless stated.

    Attributes:
        step: of a step, as far as it counts as useful.
        every: steps between two saves from which a restart can continue.
        pause: of the time of ``every`` steps, what is not useful: saves, and what exceeds ``step`` in each.
        lag: from the end of the pause until the save is complete.
        restart: from a failure to training at its usual pace, without repeated steps.
        unready_restart: the same if the standbys were not ready.
        rearm: from a failure until the standbys are ready again; 0 without standbys.
    """

    step: float
    every: int
    pause: float
    lag: float
    restart: float
    unready_restart: float
    rearm: float


def draw_failures(mean: float, seconds: float, *, ranks: int, seed: int) -> list[Failure]:
    """Return failures of random ranks, independent and ``mean`` seconds apart on average, within
    ``seconds``.
    """
    rng, now, found = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(1 / mean)) < seconds:
        found.append(Failure(now, rng.randrange(ranks)))
    return found


def mean_restart(figures: Figures, mean: float) -> float:
    """Return the mean seconds of a restart if failures are ``mean`` seconds apart.

    Failures that follow each other soon find no ready standby, and the supervisor delays the restart of an
    attempt that made no new step.
    """
    ready = exp(-figures.rearm / mean)
    restart = ready * figures.restart + (1 - ready) * figures.unready_restart
    until_new_step = restart + figures.every * figures.step / 2
    return restart + FIRST_DELAY_SECONDS * (1 - exp(-until_new_step / mean))


def predict(figures: Figures, mean: float) -> float:
    """Return the goodput by Daly's formula, as the planner computes it, with failures ``mean`` seconds
    apart; infinite: there are none.
    """
    costs = SaveCosts(
        save=figures.pause,
        commit=figures.pause + figures.lag,
        restart=figures.restart if mean == inf else mean_restart(figures, mean),
        between_failures=mean,
    )
    return costs.share(figures.every * figures.step)


def replay(figures: Figures, failures: Sequence[Failure], seconds: float) -> float:
    """Return the goodput of the first ``seconds`` with these failures. The run begins with ready standbys.

    The last attempt's steps are useful although they may not be saved, as in the run's own record.
    """
    interval = figures.every * figures.step + figures.pause  # seconds
    saved, reached, streak = 0, 0, 0  # intervals; steps; failures in a row without a newer save
    trains, ready = 0.0, 0.0  # when the attempt begins to train, and when its standbys are ready
    starts = 0.0  # when its ranks start
    for failure in failures:
        at = failure.at
        if at < starts:  # no rank exists that could fail
            continue
        if at >= seconds:
            break
        trained = max(0.0, at - trains)
        intervals = int(max(0.0, trained - figures.lag) // interval)
        within = min(trained % interval, figures.every * figures.step)
        steps = (saved + int(trained // interval)) * figures.every + int(within / figures.step)
        decision = decide_restart(
            ExitCode.FAILURE,
            stop_requested=False,
            failed_early=False,
            progressed=steps > reached,
            before=saved,
            saved=saved + intervals,
            failures=streak,
            limit=LIMIT,
        )
        assert isinstance(decision, Restart), "the run has as many restarts as it needs"
        saved, reached, streak = saved + intervals, max(reached, steps), decision.failures
        took = figures.restart if at >= ready else figures.unready_restart
        starts = at + decision.seconds
        trains = starts + took
        ready = trains - figures.restart + figures.rearm
    trained = max(0.0, seconds - trains)
    within = min(trained % interval, figures.every * figures.step)
    last = int(trained // interval) * figures.every * figures.step + within
    return (saved * figures.every * figures.step + last) / seconds


def spread(figures: Figures, mean: float, seconds: float, *, runs: int = 1000) -> tuple[float, float]:
    """Return mean and standard deviation of the goodput over as many random schedules of failures."""
    shares = [
        replay(figures, draw_failures(mean, seconds, ranks=1, seed=seed), seconds) for seed in range(runs)
    ]
    return statistics.mean(shares), statistics.stdev(shares)
