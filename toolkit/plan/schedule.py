"""The learning rate of each step: a pure function of the plan and the step."""

from __future__ import annotations

import math

from toolkit.config.schema import LrScaling, OptimConfig, RunConfig, ScheduleConfig, ScheduleName
from toolkit.plan.types import RunPlan


def learning_rate(plan: RunPlan, step: int) -> float:
    """The learning rate of optimizer step ``step``; the first step is 0."""
    return scheduled_rate(plan.config, step)


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
        length = schedule.decay if schedule.decay is not None else steps - schedule.warmup
        return steps - length, length
    return schedule.warmup, schedule.decay if schedule.decay is not None else max(1, steps - schedule.warmup)


def scheduled_rate(config: RunConfig, step: int) -> float:
    """Warm-up by ``(step + 1) / warmup`` to the peak, then the schedule down to ``min_lr``.

    A run with more ``train.steps`` follows the new curve after it resumes, unless ``schedule.decay`` is set.
    """
    schedule, steps = config.schedule, config.train.steps
    top, low = peak_rate(config.optim, config.train.global_batch), schedule.min_lr
    if step < schedule.warmup:
        return top * (step + 1) / schedule.warmup
    if schedule.name is ScheduleName.constant:
        return top
    first, length = decay_span(schedule, steps)
    fraction = min(1.0, max(0.0, (step - first) / length))
    if schedule.name is ScheduleName.cosine:
        fraction = (1.0 - math.cos(math.pi * fraction)) / 2.0
    return top * (1.0 - fraction) + low * fraction
