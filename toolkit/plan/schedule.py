"""The learning rate of each step: a pure function of the plan and the step.

With ``schedule=custom`` it is ``optim.lr`` (after ``optim.lr_scaling``) times ``factor(step, samples)``:
``step`` is the number of completed optimizer steps, so the first step has 0, and ``samples`` the number of
samples consumed before it.
"""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any

from toolkit.config.optim import LrScaling, OptimConfig, ScheduleConfig, ScheduleName
from toolkit.config.schema import RunConfig
from toolkit.plan.types import RunPlan
from toolkit.user_code import UserObject, describe_source, error_location, load_target

FACTOR_RULE = "schedule.target is a function of (step, samples) that returns the factor of optim.lr"


def learning_rate(plan: RunPlan, step: int) -> float:
    """Return the learning rate of optimizer step ``step``; the first step is 0.

    Raises:
        ConfigError: ``schedule.target`` raises an error, or returns something else than a finite number >= 0.
    """
    config = plan.config
    if config.schedule.name is not ScheduleName.custom:
        return scheduled_rate(config, step)
    factor = _factor(_user_object(config.schedule), step, plan.batch.at(step).first_sample)
    return peak_rate(config.optim, config.train.global_batch) * factor


def check_schedule(plan: RunPlan) -> None:
    """Import ``schedule.target`` and evaluate it at steps all over the run, before a process starts.

    Raises:
        ConfigError: it cannot be imported, does not accept its arguments, is not a pure function, raises an
            error, or returns something else than a finite number >= 0.
    """
    if plan.config.schedule.name is not ScheduleName.custom:
        return
    given = _user_object(plan.config.schedule)
    _check_signature(given, _load_function(given.target))
    steps = shown_steps(plan.config)
    if [learning_rate(plan, step) for step in steps] != [learning_rate(plan, step) for step in steps]:
        raise given.problem(
            f"two calls for the same step return different factors "
            f"({describe_source(_load_function(given.target))})",
            "the factor depends on step, samples and arguments alone, because resumed runs and all ranks "
            "compute it again",
            "leave out random numbers, time and global state",
        )


def _user_object(schedule: ScheduleConfig) -> UserObject:
    assert schedule.target is not None, "a rule requires schedule.target"
    return UserObject("schedule", schedule.target, schedule.arguments)


def _factor(given: UserObject, step: int, samples: int) -> float:
    function = _load_function(given.target)
    at = f"for step {step} after {samples} samples"
    try:
        factor = function(step, samples, **given.arguments)
    except Exception as error:
        raise given.problem(
            f"it raises {type(error).__name__}: {error} {at} ({error_location(error)})",
            FACTOR_RULE,
            "correct that line",
        ) from error
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not number or not math.isfinite(factor) or factor < 0:
        raise given.problem(
            f"it returns {factor!r} {at} ({describe_source(function)})",
            "the factor of optim.lr is a finite number, and not negative",
            "correct the function",
        )
    return float(factor)


@cache
def _load_function(target: str) -> Any:
    return load_target(UserObject("schedule", target))


def _check_signature(given: UserObject, function: Any) -> None:
    if not callable(function) or isinstance(function, type):
        raise given.problem(f"it is a {type(function).__name__}", FACTOR_RULE, "name a function")
    try:
        inspect.signature(function).bind(0, 0, **given.arguments)
    except TypeError as error:
        names = "".join(f", {name}" for name in given.arguments)
        raise given.problem(
            f"it is called with (step, samples{names}): {error} ({describe_source(function)})",
            FACTOR_RULE,
            "write def factor(step, samples, NAME=...), and +schedule.arguments.NAME=VALUE for further "
            "arguments",
        ) from error


def peak_rate(optim: OptimConfig, global_batch: int) -> float:
    """``optim.lr`` scaled from its reference batch to the run's (final) global batch.

    Linear: Goyal et al., 1706.02677. Square root: Hoffer et al., 1705.08741; for Adam, Malladi et al.,
    2205.10287.
    """
    if optim.lr_scaling is LrScaling.none or not optim.lr_reference_batch:
        return optim.lr
    ratio = global_batch / optim.lr_reference_batch
    return optim.lr * (ratio if optim.lr_scaling is LrScaling.linear else math.sqrt(ratio))


def decay_span(schedule: ScheduleConfig, steps: int) -> tuple[int, int]:
    """First step and length of the decay. Its last step has the last rate before ``min_lr``."""
    if schedule.name is ScheduleName.wsd:
        length = schedule.decay if schedule.decay is not None else steps - schedule.warmup_steps
        return steps - length, length
    return schedule.warmup_steps, schedule.decay if schedule.decay is not None else max(
        1, steps - schedule.warmup_steps
    )


def scheduled_rate(config: RunConfig, step: int) -> float:
    """Return the rate of a schedule that is not custom.

    Warm-up by ``(step + 1) / warmup`` to the peak, then the schedule down to ``min_lr``.

    A run with more ``train.steps`` follows the new curve after it resumes, unless ``schedule.decay`` is set.
    """
    schedule, steps = config.schedule, config.train.steps
    assert schedule.name is not ScheduleName.custom, "its rate depends on the plan: learning_rate(plan, step)"
    top, low = peak_rate(config.optim, config.train.global_batch), schedule.min_lr
    if step < schedule.warmup_steps:
        return top * (step + 1) / schedule.warmup_steps
    if schedule.name is ScheduleName.constant:
        return top
    first, length = decay_span(schedule, steps)
    fraction = min(1.0, max(0.0, (step - first) / length))
    if schedule.name is ScheduleName.cosine:
        fraction = (1.0 - math.cos(math.pi * fraction)) / 2.0
    return top * (1.0 - fraction) + low * fraction


def shown_steps(config: RunConfig) -> list[int]:
    """Return the steps at which a plan shows the learning rate: the ends of its parts.

    Of a custom schedule the first two, the last, and others at equal distances.
    """
    schedule, steps = config.schedule, config.train.steps
    points = {0, steps - 1}
    if schedule.name is ScheduleName.custom:
        points |= {min(1, steps - 1), *(steps * part // 8 for part in range(1, 8))}
        return sorted(points)
    points.add(min(schedule.warmup_steps, steps - 1))
    if schedule.name is not ScheduleName.constant:
        first, length = decay_span(schedule, steps)
        points |= {min(max(first, 0), steps - 1), min(max(first + length // 2, 0), steps - 1)}
    return sorted(points)
