"""The goal of an advice: the shortest step, or the fewest GPU-hours within a deadline or a budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from toolkit.config.schema import RunConfig
from toolkit.errors import PlanError, Problem
from toolkit.estimate.cost import full_steps
from toolkit.plan.make import draft_plan
from toolkit.plan.rules_machine import missing_price
from toolkit.plan.types import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The quantity that an advice minimizes, and the limits of a layout. Times are those of a step.

    Attributes:
        cheapest: fewest GPU-seconds instead of fewest seconds.
        most_seconds: a limit for the upper end of the predicted interval.
        most_gpu_seconds: likewise, for the seconds times the ranks.
    """

    cheapest: bool = False
    most_seconds: float = inf
    most_gpu_seconds: float = inf

    def cost(self, seconds: float, ranks: int) -> float:
        """Return what is minimized."""
        return seconds * ranks if self.cheapest else seconds

    def allows(self, seconds: float, ranks: int) -> bool:
        return seconds <= self.most_seconds and seconds * ranks <= self.most_gpu_seconds


def make_goal(config: RunConfig, world: World, hours: float | None) -> Goal:
    """Return the fastest layout, or the cheapest that ends within ``hours``; both within ``config.budget``.

    Args:
        hours: for all steps.

    Raises:
        PlanError: there is no price for the budget, or the deadline is past.
    """
    if hours is not None and hours <= 0:
        raise PlanError(
            Problem(
                "deadline",
                f"the deadline was {-hours:.3g} hours ago",
                "a deadline must be in the future",
                "write a later one: deadline=36h, or a later budget.until",
            )
        )
    steps = _full_steps(config, world)
    most = most_gpu_hours(config)
    return Goal(
        cheapest=hours is not None,
        most_seconds=inf if hours is None else hours * 3600 / steps,
        most_gpu_seconds=inf if most is None else most * 3600 / steps,
    )


def most_gpu_hours(config: RunConfig) -> float | None:
    """GPU-hours that ``config.budget`` allows; None without ``budget.usd`` and ``budget.gpu_hours``.

    Raises:
        PlanError: there is no price for ``budget.usd``.
    """
    budget, price = config.budget, config.monitor.price_per_gpu_hour
    limits = [] if budget.gpu_hours is None else [budget.gpu_hours]
    if budget.usd is not None:
        if not price:
            raise PlanError(missing_price(config))
        limits.append(budget.usd / price)
    return min(limits, default=None)


def _full_steps(config: RunConfig, world: World) -> float:
    """Return :func:`full_steps` of one rank: no layout changes the samples of a run."""
    train = replace(config.train, micro_batch=1)
    parallel = replace(config.parallel, tensor=1, pipeline=1, context=1, expert=1)
    alone = draft_plan(replace(config, train=train, parallel=parallel), replace(world, ranks=1)).plan
    return config.train.steps if alone is None else full_steps(alone)
