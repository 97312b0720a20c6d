"""The interval between saves with ``checkpoint.every=auto``, and what saves and failures cost.

The model is that of Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22 (2006): failures are independent and exponentially distributed, a
failure costs a restart and the work since the newest checkpoint, and may also happen during a save or a
restart. The interval is clamped where the model does not apply:

- at least a minute. Shorter intervals gain less than half a minute per failure, which is small compared with
  a restart, and burden the storage. And at least the time until a save is committed, because only one save
  is in flight at a time.
- at most an hour, or 100 times the seconds that a save stops training, if that is longer. The model knows the
  failures of machines only. An hour limits what any other end of a run may cost, as long as saves take no
  more than 1% of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, isinf, sqrt

from toolkit.estimate.interconnects import topology_of
from toolkit.plan.checkpoint_size import assumed_speed, rank_bytes
from toolkit.plan.types import Device, RunPlan

# 419 unexpected interruptions in 54 days on 2,048 nodes of eight H100: Llama Team, "The Llama 3 Herd of
# Models", 2407.21783, section 3.3.4.
NODE_MTBF_HOURS = 54 * 24 * 2048 / 419
# For saves on CPU ranks, for which no rate has been published; the plan's goodput assumes no failures there.
CPU_MTBF_HOURS = 24.0
# From a failure to the start of training, without reading the checkpoint. Finding the failure and testing the
# nodes takes "less than ten minutes" on average: Jiang et al., "MegaScale", 2402.15627.
RESTART_SECONDS = 600.0
# For which a save stops training however small it is: all ranks wait for each other and list their tensors.
# An assumption, which keeps the best interval from becoming absurdly short.
PAUSE_SECONDS = 1.0

MIN_SECONDS, MAX_SECONDS = 60.0, 3600.0
MAX_SHARE = 0.01  # of the time in saves, up to which MAX_SECONDS holds


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """Costs of saves and failures, in seconds.

    Attributes:
        save: for which a save stops training.
        commit: from the start of a save until it is complete.
        restart: from a failure to the next step, including reading the checkpoint.
        between_failures: mean time between failures of any node of the run; may be infinite.
    """

    save: float
    commit: float
    restart: float
    between_failures: float

    def share(self, interval: float) -> float:
        """Expected goodput with this interval."""
        # A failure while a save is written in the background also repeats what was trained meanwhile.
        lost = self.restart + max(0.0, self.commit - self.save)
        return useful_share(interval, self.save, lost, self.between_failures)


def choose_interval(costs: SaveCosts) -> float:
    """Return the seconds of training between two saves with ``checkpoint.every=auto``."""
    best = MAX_SECONDS
    if not isinf(costs.between_failures):
        best = optimal_interval(costs.save, costs.between_failures)
    most = max(MAX_SECONDS, costs.save / MAX_SHARE)
    return max(min(best, most), MIN_SECONDS, costs.commit)


def mean_between_failures(prior: float, observed: float, failures: int) -> float:
    """Return the mean seconds between failures after ``failures`` in ``observed`` seconds.

    The rate has a Gamma distribution that is worth one failure in ``prior`` seconds (shape 1, rate
    ``prior``). The mean of its posterior is (1 + failures) / (prior + observed) per second.
    """
    return (prior + observed) / (1 + failures)


def prior_between_failures(plan: RunPlan) -> float:
    """Return the seconds between failures of the run, as ``checkpoint.every=auto`` expects them before it has
    seen any.
    """
    hours = plan.config.cluster.node_mtbf_hours
    if hours is None:
        hours = NODE_MTBF_HOURS if plan.world.device is Device.CUDA else CPU_MTBF_HOURS
    return hours * 3600 / plan.world.nodes


def expected_costs(plan: RunPlan, between_failures: float) -> SaveCosts | None:
    """Predict the costs of saves and failures; return None if the size of a checkpoint is unknown."""
    size = rank_bytes(plan)
    if size is None:
        return None
    write = size / assumed_speed(plan.world)
    save = commit = PAUSE_SECONDS + write
    if plan.saves.background:
        copy = size / topology_of(plan.config.cluster, plan.world).host.bandwidth
        save = PAUSE_SECONDS + copy
        commit = save + write
    return SaveCosts(
        save=save,
        commit=commit,
        restart=restart_seconds(plan) + write,  # reading takes as long as writing
        between_failures=between_failures,
    )


def restart_seconds(plan: RunPlan) -> float:
    """Return the seconds from a failure to the start of training, without reading the checkpoint."""
    given = plan.config.cluster.restart_seconds
    return RESTART_SECONDS if given is None else given


def first_costs(plan: RunPlan) -> SaveCosts:
    """Return the costs that ``checkpoint.every=auto`` assumes before it has measured any.

    A checkpoint of unknown size is assumed to be small until the first save is measured.
    """
    mean = prior_between_failures(plan)
    small = SaveCosts(
        save=PAUSE_SECONDS, commit=PAUSE_SECONDS, restart=restart_seconds(plan), between_failures=mean
    )
    return expected_costs(plan, mean) or small


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
    """Return the seconds of training between two saves with the least wall time (Daly 2006, equation 37). It
    does not depend on the cost of a restart.

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
