"""Formulas for saves and failures.

The model is that of Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22 (2006): failures are independent and exponentially distributed, a
failure costs a restart and the work since the newest checkpoint, and may also happen during a save or a
restart. Spare nodes are servers of Erlang's loss system.
"""

from __future__ import annotations

from math import exp, expm1, isinf, sqrt


def useful_share(interval: float, save: float, restart: float, between_failures: float) -> float:
    """Useful time / wall time (Daly 2006, equation 20).

    Args:
        interval: seconds of training between two saves.
        save: seconds of a save, in which training stops.
        restart: seconds that a failure costs in addition to the work since the last save.
        between_failures: mean seconds between failures of the run; infinite without failures.
    """
    if isinf(between_failures):
        return interval / (interval + save)
    mean = between_failures
    if (interval + save) / mean > 500:  # exp overflows above 709
        return 0.0
    return interval / (mean * exp(restart / mean) * expm1((interval + save) / mean))


def optimal_interval(save: float, between_failures: float) -> float:
    """Seconds of training between two saves with the least wall time (Daly 2006, equation 37). It does not
    depend on the cost of a restart.

    For saves that are short compared with the time between failures it is about ``sqrt(2 save
    between_failures)``: Young, "A first order approximation to the optimum checkpoint interval", 1974.
    """
    if save >= 2 * between_failures:
        return between_failures
    ratio = save / (2 * between_failures)
    return sqrt(2 * save * between_failures) * (1 + sqrt(ratio) / 3 + ratio / 9) - save


def waiting_share(spares: int, repair: float, between_failures: float) -> float:
    """Share of the wall time in which a run waits for nodes because more than ``spares`` are under repair.

    A run that waits has no failures, so the nodes under repair are the busy servers of a loss system with
    ``spares + 1`` servers, which all are busy for the share that Erlang's formula B gives (Erlang 1917). It
    depends only on the mean of the repair times.

    Args:
        repair: mean seconds until a node that failed is repaired or replaced.
        between_failures: mean seconds between failures of the run while it does not wait.
    """
    if isinf(between_failures):
        return 0.0
    load, share = repair / between_failures, 1.0
    for servers in range(1, spares + 2):
        share = load * share / (servers + load * share)
    return share
