"""Refuse a start for which the budget of the run leaves no time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from statistics import median

from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, Problem
from toolkit.estimate.budget import HOUR, BudgetLimit, budget_limits
from toolkit.progress import duration
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import ended_by_budget
from toolkit.rundir.usage import AttemptUsage, device_hours, read_usage


def describe_limit(limit: BudgetLimit) -> str:
    """``budget.gpu_hours=2: 1.97 are used``."""
    text = f"{limit.key}={limit.value}"
    if limit.key != "budget.until":
        return f"{text}: {limit.used:.4g} are used"
    time = duration(abs(limit.limit) * HOUR)
    return f"{text}: in {time}" if limit.limit >= 0 else f"{text}: {time} ago"


def check_budget(config: RunConfig, ranks: int, directory: RunDirectory, now: datetime | None = None) -> None:
    """Check that the budget leaves time for another attempt: for its start and its first step, as long as
    they took before. If the same budget stopped the last attempt, it leaves none.

    Args:
        ranks: of the new attempt.
        now: None: the present.

    Raises:
        ConfigError: with a problem for each limit that leaves no time.
    """
    if not config.budget.is_set:
        return
    now, usage = now or datetime.now(UTC), read_usage(directory)
    limits = budget_limits(config, ranks=ranks, device_hours=device_hours(usage), now=now)
    needed = start_hours(usage)
    stopped = _stopped_limit(config, directory)
    problems = [
        Problem(
            limit.key,
            describe_limit(limit),
            "a run ends before it exceeds its budget, over all its attempts, and there is no time left for "
            "another one",
            _remedy(limit, needed, now),
        )
        for limit in limits
        if limit.hours_left <= needed or limit.key == stopped
    ]
    if problems:
        raise ConfigError(*problems)


def start_hours(usage: list[AttemptUsage]) -> float:
    """Return the hours from a start to the end of the first step, as measured; 0 before the first one."""
    measured = [seconds for each in usage if (seconds := each.attempt.times.start_seconds) is not None]
    return median(measured) / HOUR if measured else 0.0


def _stopped_limit(config: RunConfig, directory: RunDirectory) -> str | None:
    """Return the key of the limit that stopped the last attempt, if the budget is still the same."""
    from toolkit.config.compose import from_yaml

    status = directory.status()
    if status is None or status.reason is None or not ended_by_budget(status.state, status.reason):
        return None
    before = from_yaml(directory.config_file.read_text(encoding="utf-8"))
    same = before.budget == config.budget
    price = before.monitor.price_per_gpu_hour == config.monitor.price_per_gpu_hour
    return status.reason.partition("=")[0] if same and price else None


def _remedy(limit: BudgetLimit, needed: float, now: datetime) -> str:
    """Return a larger limit, which leaves at least as much again."""
    if limit.key == "budget.until":
        tomorrow = max(now, now + timedelta(hours=limit.limit)) + timedelta(days=1)
        return f"write a later time: budget.until={tomorrow.isoformat(timespec='seconds')}"
    enough = 2 * max(limit.limit, limit.used + needed * limit.per_hour)
    return f"raise the budget: {limit.key}={float(f'{enough:.3g}'):.12g}"
