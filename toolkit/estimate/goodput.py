"""The share of a run's wall time that saves, failures and waiting for nodes leave for training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import inf, isinf
from typing import Any

from toolkit.config.checkpoint import parse_cadence
from toolkit.estimate.cost import full_steps
from toolkit.estimate.save_interval import (
    NODE_MTBF_HOURS,
    PAUSE_SECONDS,
    choose_interval,
    expected_costs,
    first_costs,
    optimal_interval,
    restart_seconds,
    waiting_share,
)
from toolkit.estimate.types import StepEstimate
from toolkit.plan.checkpoint_size import assumed_speed
from toolkit.plan.types import Device, RunPlan
from toolkit.progress import duration

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
        waiting: share of the wall time in which the run waits for a node, with ``cluster.repair_hours``.
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
    waiting: float
    best_interval: float | None
    best_goodput: float | None
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all attributes as JSON types; an infinite wall time is null."""
        wall = None if isinf(self.wall) else self.wall
        return {**asdict(self), "wall": wall, "assumptions": list(self.assumptions)}


def estimate_goodput(plan: RunPlan, step: StepEstimate) -> GoodputEstimate | None:
    """Return the expected goodput of the whole run; None if the size of its checkpoints is not known."""
    cluster = plan.config.cluster
    hours = cluster.node_mtbf_hours
    if hours is None:
        hours = NODE_MTBF_HOURS if plan.world.device is Device.CUDA else inf
    mean = hours * 3600 / plan.world.nodes
    costs = expected_costs(plan, mean)
    if costs is None:
        return None
    total = full_steps(plan) * step.seconds
    interval = min(total, save_interval(plan, step))
    background = max(0.0, costs.commit - costs.save)
    best = None if isinf(mean) else max(optimal_interval(costs.save, mean), background, step.seconds)
    waiting = 0.0
    if cluster.repair_hours is not None:
        waiting = waiting_share(cluster.spare_nodes, cluster.repair_hours * 3600, mean)
    goodput = costs.share(interval) * (1 - waiting)
    return GoodputEstimate(
        goodput=goodput,
        wall=total / goodput if goodput else inf,
        between_failures=None if isinf(mean) else mean,
        restart=costs.restart,
        save=costs.save,
        write=background,
        interval=interval,
        waiting=waiting,
        best_interval=best,
        best_goodput=None if best is None else costs.share(best) * (1 - waiting),
        assumptions=tuple(_assumptions(plan, hours)),
    )


def save_interval(plan: RunPlan, step: StepEstimate) -> float:
    """Return the seconds of training between two saves by ``checkpoint.every``; infinite if there are
    none.
    """
    cadence = parse_cadence(plan.config.checkpoint.every)
    if cadence.auto:
        return choose_interval(first_costs(plan))
    if cadence.steps is not None:
        return cadence.steps * step.seconds
    return inf if cadence.seconds is None else cadence.seconds


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
    if estimate.waiting >= CLEARLY_BETTER:
        text += f"; it waits for a repaired node {estimate.waiting:.1%} of the time"
    best, goodput = estimate.best_interval, estimate.best_goodput
    if best is not None and goodput is not None and goodput > estimate.goodput + CLEARLY_BETTER:
        text += f"; {goodput:.0%} with checkpoint.every={max(1, round(best / 60))}min"
    yield "goodput", text


def _assumptions(plan: RunPlan, node_mtbf_hours: float) -> Iterator[str]:
    cluster = plan.config.cluster
    if isinf(node_mtbf_hours):
        yield "no failures; cluster.node_mtbf_hours sets their rate"
    else:
        given = cluster.node_mtbf_hours is not None
        source = "cluster.node_mtbf_hours" if given else "as in the training of Llama 3 (2407.21783)"
        yield f"a failure of a node every {node_mtbf_hours:,.0f} hours, {source}"
        source = "2402.15627" if cluster.restart_seconds is None else "cluster.restart_seconds"
        yield f"{restart_seconds(plan):,.0f} s to find a failure and restart ({source})"
        if cluster.repair_hours is None:
            yield "a node that failed is replaced at once"
        else:
            spares = cluster.spare_nodes
            yield f"a node is repaired in {cluster.repair_hours:g} hours; spare nodes: {spares}"
    speed = assumed_speed(plan.world) * min(plan.world.ranks, plan.world.ranks_per_node)
    yield f"a save stops training for {PAUSE_SECONDS:g} s in addition to copying or writing"
    yield f"a node writes and reads checkpoints at {speed / 1e9:g} GB/s"
    yield "samples are read while the devices compute, and there is no evaluation"
