"""The learning rate of each step: a pure function of the plan and the step, and so of the samples consumed."""

from __future__ import annotations

import math

from toolkit.config.schema import LrScaling, OptimConfig, RunConfig, ScheduleConfig, ScheduleName
from toolkit.plan.types import RunPlan


def learning_rate(plan: RunPlan, step: int) -> float:
    """The rate with which optimizer step ``step`` (the first is 0) updates the weights."""
    return rate(plan.config, step)


def peak(optim: OptimConfig, global_batch: int) -> float:
    """``optim.lr`` scaled from its reference batch to the run's (final) global batch.

    Linear: Goyal et al., 1706.02677. Square root: Hoffer et al., 1705.08741; for Adam, Malladi et al., 2205.10287.
    """
    if optim.lr_scaling is LrScaling.none or not optim.lr_reference_batch:
        return optim.lr
    ratio = global_batch / optim.lr_reference_batch
    return optim.lr * (ratio if optim.lr_scaling is LrScaling.linear else math.sqrt(ratio))


def decay_span(schedule: ScheduleConfig, steps: int) -> tuple[int, int]:
    """First step of the decay and its length. The last step of it has the last rate before ``min_lr``."""
    if schedule.name is ScheduleName.wsd:
        length = schedule.decay if schedule.decay is not None else steps - schedule.warmup
        return steps - length, length
    return schedule.warmup, schedule.decay if schedule.decay is not None else max(1, steps - schedule.warmup)


def rate(config: RunConfig, step: int) -> float:
    """Warm-up to the peak, ``(step + 1) / warmup`` of it (so no step is lost at 0), then the named schedule down to ``min_lr``.

    A run that is made longer follows the new curve from where it resumes, unless ``schedule.decay`` fixes the old one.
    """
    schedule, steps = config.schedule, config.train.steps
    top, low = peak(config.optim, config.train.global_batch), schedule.min_lr
    if step < schedule.warmup:
        return top * (step + 1) / schedule.warmup
    if schedule.name is ScheduleName.constant:
        return top
    first, length = decay_span(schedule, steps)
    done = min(1.0, max(0.0, (step - first) / length))
    if schedule.name is ScheduleName.cosine:
        done = (1.0 - math.cos(math.pi * done)) / 2.0
    return top * (1.0 - done) + low * done
