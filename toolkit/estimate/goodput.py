"""The share of a run's wall time that saves and failures leave for training.

The model is that of Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22 (2006): failures are independent and exponentially distributed, a
failure costs a restart and the work since the newest checkpoint, and may also happen during a save or a
restart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import exp, expm1, inf, isinf, sqrt
from typing import Any

from toolkit.config.checkpoint import parse_cadence
from toolkit.estimate.cost import full_steps
from toolkit.estimate.interconnects import topology_of
from toolkit.estimate.types import StepEstimate
from toolkit.plan.checkpoint_size import assumed_speed, rank_bytes
from toolkit.plan.types import Device, RunPlan
from toolkit.progress import duration

# 419 unexpected interruptions in 54 days on 2,048 nodes of eight H100: Llama Team, "The Llama 3 Herd of
# Models", 2407.21783, section 3.3.4.
NODE_MTBF_HOURS = 54 * 24 * 2048 / 419
# From a failure to the start of training, without reading the checkpoint. Finding the failure and testing the
# nodes takes "less than ten minutes" on average: Jiang et al., "MegaScale", 2402.15627.
RESTART_SECONDS = 600.0
# For which a save stops training however small it is: all ranks wait for each other and list their tensors.
# An assumption, which keeps the best interval from becoming absurdly short.
PAUSE_SECONDS = 1.0
# The table has a line if less than this share of the time is useful, and more than these seconds are lost.
STATED_GOODPUT, STATED_SECONDS = 0.99, 600.0
CLEARLY_BETTER = 0.005  # gain of another interval, above which the table names it


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputEstimate:
    """Expected goodput, and the figures from which it follows. Times are seconds.

    Attributes:
        goodput: useful time / wall time, between 0 and 1.
        wall: of the whole run; infinite if it is not expected to end.
        between_failures: mean time between failures of any node of the run; None: failures are not expected.
        restart: from a failure to the first step, including reading the checkpoint.
        save: for which a save stops training.
        write: of a save in the background; 0 in the foreground.
        interval: of training between two saves; the whole run if it saves only at its end.
        best_interval: with the highest goodput; None without failures.
        best_goodput: with it; None without failures.
        assumptions: one sentence each.
    """

    goodput: float
    wall: float
    between_failures: float | None
    restart: float
    save: float
    write: float
    interval: float
    best_interval: float | None
    best_goodput: float | None
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """All attributes as JSON types; an infinite wall time is null."""
        wall = None if isinf(self.wall) else self.wall
        return {**asdict(self), "wall": wall, "assumptions": list(self.assumptions)}


def estimate_goodput(plan: RunPlan, step: StepEstimate) -> GoodputEstimate | None:
    """Return the expected goodput of the whole run; None if the size of its checkpoints is not known."""
    size = rank_bytes(plan)
    if size is None:
        return None
    write = size / assumed_speed(plan.world)
    save = PAUSE_SECONDS + write
    if plan.saves.background:
        save = PAUSE_SECONDS + size / topology_of(plan.config.cluster, plan.world).host.bandwidth
    cadence = parse_cadence(plan.config.checkpoint.every)
    total = interval = full_steps(plan) * step.seconds
    if cadence.steps is not None:
        interval = min(interval, cadence.steps * step.seconds)
    if cadence.seconds is not None:
        interval = min(interval, cadence.seconds)
    hours = plan.config.cluster.node_mtbf_hours
    if hours is None:
        hours = NODE_MTBF_HOURS if plan.world.device is Device.CUDA else inf
    mean = hours * 3600 / plan.world.nodes
    restart = RESTART_SECONDS + write  # reading takes as long as writing
    # A failure while a save is written in the background also repeats what was trained meanwhile.
    background = write if plan.saves.background else 0.0
    lost = restart + background
    best = None if isinf(mean) else max(optimal_interval(save, mean), background, step.seconds)
    goodput = useful_share(interval, save, lost, mean)
    return GoodputEstimate(
        goodput=goodput,
        wall=total / goodput if goodput else inf,
        between_failures=None if isinf(mean) else mean,
        restart=restart,
        save=save,
        write=background,
        interval=interval,
        best_interval=best,
        best_goodput=None if best is None else useful_share(best, save, lost, mean),
        assumptions=tuple(_assumptions(plan, hours)),
    )


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
    """Seconds of training between two saves with the least wall time (Daly 2006, equation 37).

    For saves that are short compared with the time between failures it is about ``sqrt(2 save
    between_failures)``: Young, "A first order approximation to the optimum checkpoint interval", 1974.
    """
    if save >= 2 * between_failures:
        return between_failures
    ratio = save / (2 * between_failures)
    return sqrt(2 * save * between_failures) * (1 + sqrt(ratio) / 3 + ratio / 9) - save


def format_goodput(estimate: GoodputEstimate) -> Iterator[tuple[str, str]]:
    """Yield a row of the plan's table, if saves and failures take a noticeable share of the time."""
    if estimate.goodput >= STATED_GOODPUT or (1 - estimate.goodput) * estimate.wall < STATED_SECONDS:
        return
    wall = "never ends" if isinf(estimate.wall) else f"takes {duration(estimate.wall)}"
    text = f"about {estimate.goodput:.0%}, so the run {wall}: a save after {duration(estimate.interval)} of "
    text += f"steps stops them for {estimate.save:.2g} s"
    if estimate.between_failures is not None:
        text += f", a failure every {duration(estimate.between_failures)}"
        text += f" costs {duration(estimate.restart)} and the work since the last save"
    best, goodput = estimate.best_interval, estimate.best_goodput
    if best is not None and goodput is not None and goodput > estimate.goodput + CLEARLY_BETTER:
        text += f"; {goodput:.0%} with checkpoint.every={max(1, round(best / 60))}min"
    yield "goodput", text


def _assumptions(plan: RunPlan, node_mtbf_hours: float) -> Iterator[str]:
    if isinf(node_mtbf_hours):
        yield "no failures; cluster.node_mtbf_hours sets their rate"
    else:
        given = plan.config.cluster.node_mtbf_hours is not None
        source = "cluster.node_mtbf_hours" if given else "as in the training of Llama 3 (2407.21783)"
        yield f"a failure of a node every {node_mtbf_hours:,.0f} hours, {source}"
        yield f"{RESTART_SECONDS:,.0f} s to find a failure and restart (2402.15627), and a restart at once"
    speed = assumed_speed(plan.world) * min(plan.world.ranks, plan.world.ranks_per_node)
    yield f"a save stops training for {PAUSE_SECONDS:g} s in addition to copying or writing"
    yield f"a node writes and reads checkpoints at {speed / 1e9:g} GB/s"
    yield "samples are read while the devices compute, and there is no evaluation"
