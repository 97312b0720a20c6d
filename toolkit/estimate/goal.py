"""What an advice minimizes: the time of a step, or GPU-hours within a deadline or a budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from toolkit.config.schema import RunConfig
from toolkit.errors import PlanError, Problem
from toolkit.estimate.cost import full_steps
from toolkit.plan.make import draft_plan
from toolkit.plan.types import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is best, and what a layout must satisfy. Times are those of a step.

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


def make_goal(config: RunConfig, world: World, budget: float | None, hours: float | None) -> Goal:
    """The fastest layout, the fastest within ``budget``, or the cheapest that ends within ``hours``.

    Args:
        budget: in the currency of ``monitor.price_per_gpu_hour``.
        hours: for all steps.

    Raises:
        PlanError: there is no price for the budget, or the deadline is past.
    """
    if hours is not None:
        if hours <= 0:
            raise PlanError(
                Problem(
                    "deadline",
                    f"the deadline was {-hours:.3g} hours ago",
                    "a deadline is in the future",
                    "write a later one: deadline=36h",
                )
            )
        return Goal(cheapest=True, most_seconds=hours * 3600 / _full_steps(config, world))
    if budget is not None:
        price = config.monitor.price_per_gpu_hour
        if not price:
            raise PlanError(
                Problem(
                    "budget.usd",
                    f"budget.usd={budget:g}, monitor.price_per_gpu_hour={'null' if price is None else price}",
                    "a budget is compared with the price of GPU-hours, which is never assumed",
                    "write monitor.price_per_gpu_hour=2.5, your price",
                )
            )
        return Goal(most_gpu_seconds=budget / price * 3600 / _full_steps(config, world))
    return Goal()


def _full_steps(config: RunConfig, world: World) -> float:
    """As :func:`full_steps`, of one rank: no layout changes the samples of a run."""
    train = replace(config.train, micro_batch=1)
    parallel = replace(config.parallel, tensor=1, pipeline=1, context=1, expert=1)
    alone = draft_plan(replace(config, train=train, parallel=parallel), replace(world, ranks=1)).plan
    return config.train.steps if alone is None else full_steps(alone)
