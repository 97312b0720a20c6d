"""Compare the predicted time and cost of a run with its budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import isinf
from typing import Any

from toolkit.config.schema import RunConfig
from toolkit.errors import Problem, Severity
from toolkit.estimate.cost import full_steps
from toolkit.estimate.goodput import estimate_goodput
from toolkit.estimate.types import StepEstimate
from toolkit.plan.types import Device, RunPlan
from toolkit.progress import duration

HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLimit:
    """One limit of a budget, with what is used of it. Money is in the currency of
    ``monitor.price_per_gpu_hour``, time in hours.

    Attributes:
        key: ``budget.usd``, ``budget.gpu_hours`` or ``budget.until``.
        value: as the user typed it.
        limit, used: dollars or GPU-hours of the whole run. Of ``budget.until``, the hours from now on, and 0.
        per_hour: of wall time.
    """

    key: str
    value: str
    limit: float
    used: float
    per_hour: float

    @property
    def hours_left(self) -> float:
        """Hours of wall time until the limit; negative if it is exceeded."""
        return (self.limit - self.used) / self.per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetForecast:
    """One limit compared with the prediction.

    Attributes:
        limit: see :class:`BudgetLimit`.
        needed: that all remaining steps take in the unit of the limit, with saves and failures; infinite if
            the run is not expected to end.
        steps: completed when the limit ends the run; ``train.steps`` if it does not.
    """

    limit: BudgetLimit
    needed: float
    steps: int

    @property
    def exceeded(self) -> bool:
        return self.needed > self.limit.limit - self.limit.used

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON types; an infinite one is null."""
        needed = None if isinf(self.needed) else self.needed
        return {**asdict(self.limit), "needed": needed, "steps": self.steps}


def budget_limits(config: RunConfig, *, ranks: int, device_hours: float, now: datetime) -> list[BudgetLimit]:
    """Return the limits of ``config.budget``.

    Args:
        ranks: of the attempt that is or would be running.
        device_hours: of all attempts so far: hours of GPUs, or of ranks on CPUs.
        now: with a time zone.
    """
    budget, price = config.budget, config.monitor.price_per_gpu_hour
    limits = []
    if budget.usd is not None and price:
        limits.append(
            BudgetLimit(
                key="budget.usd",
                value=f"{budget.usd:.12g}",
                limit=budget.usd,
                used=device_hours * price,
                per_hour=ranks * price,
            )
        )
    if budget.gpu_hours is not None:
        limits.append(
            BudgetLimit(
                key="budget.gpu_hours",
                value=f"{budget.gpu_hours:.12g}",
                limit=budget.gpu_hours,
                used=device_hours,
                per_hour=ranks,
            )
        )
    if (deadline := budget.deadline) is not None:
        hours = (deadline - now).total_seconds() / HOUR
        limits.append(
            BudgetLimit(key="budget.until", value=budget.until or "", limit=hours, used=0.0, per_hour=1.0)
        )
    return limits


def forecast_budget(
    plan: RunPlan,
    step: StepEstimate,
    *,
    device_hours: float = 0.0,
    completed: int = 0,
    now: datetime | None = None,
) -> list[BudgetForecast]:
    """Compare each limit of the budget with the prediction.

    Args:
        device_hours: that earlier attempts have taken.
        completed: steps that the newest checkpoint preserves.
        now: None: the present.
    """
    config, total = plan.config, plan.config.train.steps
    goodput = estimate_goodput(plan, step)
    share = 1.0 if goodput is None else goodput.goodput
    done = plan.batch.at(completed).first_sample / plan.batch.global_batch
    hours = (full_steps(plan) - done) * step.seconds / HOUR / share if share else float("inf")
    found = []
    for limit in budget_limits(
        config, ranks=plan.world.ranks, device_hours=device_hours, now=now or datetime.now(UTC)
    ):
        part = max(0.0, limit.hours_left) / hours if hours else 1.0
        steps = completed + int((total - completed) * min(1.0, part))
        found.append(BudgetForecast(limit=limit, needed=hours * limit.per_hour, steps=steps))
    return found


def budget_warning(plan: RunPlan, forecasts: list[BudgetForecast]) -> Problem | None:
    """Return a warning if the budget is predicted to end the run before ``train.steps``."""
    exceeded = [forecast for forecast in forecasts if forecast.exceeded]
    if not exceeded:
        return None
    first = min(exceeded, key=lambda forecast: forecast.steps)
    total, limit = plan.config.train.steps, first.limit
    return Problem(
        limit.key,
        f"{limit.key}={limit.value}, train.steps={total}",
        f"the budget is predicted to end the run after about {first.steps:,} steps",
        f"write train.steps={max(1, first.steps)} to end the schedule there, or a larger budget",
        Severity.WARNING,
    )


def format_budget(plan: RunPlan, forecasts: list[BudgetForecast]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the plan's table."""
    unit = "GPU-hours" if plan.world.device is Device.CUDA else "hours of CPU ranks"
    for forecast in forecasts:
        limit, needed = forecast.limit, forecast.needed
        if limit.key == "budget.until":
            text = f"{limit.value}, in {duration(max(0.0, limit.limit) * HOUR)}: the run takes "
            text += "longer than can be predicted" if isinf(needed) else duration(needed * HOUR)
        else:
            takes = f"{needed:,.0f}" if needed >= 100 else f"{needed:.3g}"
            if limit.key == "budget.gpu_hours":
                text = f"{limit.value} {unit}: the run takes {takes}"
            else:
                text = f"{limit.value}: the run costs {takes}, with saves and failures"
        if forecast.exceeded:
            text += f", so it ends after about {forecast.steps:,} steps"
        yield limit.key, text
