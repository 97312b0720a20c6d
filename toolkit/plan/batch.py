"""The samples of each optimizer step: ``global_batch = micro_batch * data_parallel * accumulation``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from toolkit.config.schema import BatchRampConfig, RunConfig, TrainConfig
from toolkit.errors import PlanError, Problem
from toolkit.plan.types import BatchPlan, RampStage


def plan_batch(config: RunConfig, data_parallel: int) -> BatchPlan:
    """Micro-batch, accumulation and ramp for ``data_parallel`` ranks.

    Raises:
        PlanError: the global batch is not divisible, or the ramp is invalid.
    """
    train = config.train
    problems = ramp_problems(train)
    micro = train.micro_batch
    if micro is None:
        if train.global_batch % data_parallel:
            problems.append(_identity(train, train.global_batch, 1, data_parallel))
        micro = max(1, train.global_batch // data_parallel)
    elif train.global_batch % (micro * data_parallel):
        problems.append(_identity(train, train.global_batch, micro, data_parallel))
    if problems:
        raise PlanError(*problems)
    stages = ramp_stages(train)
    uneven = [stage.size for stage in stages[:-1] if stage.size % (micro * data_parallel)]
    if uneven:
        unit = micro * data_parallel
        sizes = ", ".join(map(str, uneven[:3])) + (" ..." if len(uneven) > 3 else "")
        remedy = f"write train.batch_ramp.start and .increment as multiples of {unit}"
        if train.micro_batch is None:
            remedy += " or a smaller train.micro_batch"
        raise PlanError(
            Problem(
                "train.batch_ramp",
                f"global batches {sizes} with micro_batch={micro} and {data_parallel} data ranks",
                "every batch of the ramp must be divisible by micro_batch * data ranks",
                remedy,
            )
        )
    return BatchPlan(
        micro_batch=micro, global_batch=train.global_batch, data_parallel=data_parallel, stages=stages
    )


def continue_batch(
    batch: BatchPlan, train: TrainConfig, before: Sequence[RampStage], step: int, sample: int
) -> BatchPlan:
    """``batch`` for a run that continues at ``step`` from another run, after ``sample`` consumed samples.

    Args:
        before: the stages of the other run. If empty they are unknown, and all its batches are assumed to
            have one size.
        sample: the number of samples consumed before ``step``.
    """
    if not before:
        before = [RampStage(size=sample // max(1, step), first_step=0, first_sample=0, steps=None)]
    every = [*(stage for stage in before if stage.first_step < step), *ramp_stages(train, step, sample)]
    merged = every[:1] + [stage for last, stage in pairwise(every) if stage.size != last.size]
    steps = [following.first_step - stage.first_step for stage, following in pairwise(merged)]
    return replace(
        batch,
        stages=tuple(
            replace(stage, steps=length) for stage, length in zip(merged, [*steps, None], strict=True)
        ),
    )


def ramp_stages(train: TrainConfig, step: int = 0, sample: int = 0) -> tuple[RampStage, ...]:
    """Return the stages of the batch size ramp.

    The batch grows by ``increment`` after each equal part of ``samples``.

    A step that begins after ``c`` consumed samples has ``start + increment * min(n, c * n // samples)``
    sequences, where ``n`` is the number of increments. This is the rule of Megatron-LM's
    ``--rampup-batch-size`` in integers. A size is skipped if one step consumes its whole part.

    Args:
        step: the first step of the stages. It begins after ``sample`` consumed samples.
    """
    ramp, final = train.batch_ramp, train.global_batch
    if ramp.start is None:
        return (RampStage(size=final, first_step=step, first_sample=sample, steps=None),)
    assert ramp.increment, "ramp_problems found no problem"
    assert ramp.samples, "ramp_problems found no problem"
    increments = (final - ramp.start) // ramp.increment
    stages: list[RampStage] = []
    for index in range(increments):
        size = ramp.start + index * ramp.increment
        # the smallest number of consumed samples with a larger batch
        boundary = -(-(index + 1) * ramp.samples // increments)
        steps = max(0, -(-(boundary - sample) // size))
        if steps:
            stages.append(RampStage(size=size, first_step=step, first_sample=sample, steps=steps))
            step, sample = step + steps, sample + steps * size
    stages.append(RampStage(size=final, first_step=step, first_sample=sample, steps=None))
    assert all(a.first_step + (a.steps or 0) == b.first_step for a, b in pairwise(stages))
    return tuple(stages)


def ramp_problems(train: TrainConfig) -> list[Problem]:
    ramp, final = train.batch_ramp, train.global_batch
    given = {name: getattr(ramp, name) for name in ("start", "increment", "samples")}
    if all(value is None for value in given.values()):
        return []
    keys = "train.batch_ramp.start=8 train.batch_ramp.increment=8 train.batch_ramp.samples=10000"
    example = f"write {keys}, or none of the three"
    missing = [name for name, value in given.items() if value is None]
    if missing:
        return [
            _ramp(
                ramp, f"a ramp needs start, increment and samples; {', '.join(missing)} is missing", example
            )
        ]
    if any(value is not None and value < 1 for value in given.values()):
        return [_ramp(ramp, "start, increment and samples of a ramp are at least 1", example)]
    assert ramp.start is not None
    assert ramp.increment is not None
    if ramp.start >= final:
        return [
            _ramp(
                ramp,
                f"a ramp starts below train.global_batch={final}",
                f"write train.batch_ramp.start={max(1, final // 4)}",
            )
        ]
    if (final - ramp.start) % ramp.increment:
        return [
            _ramp(
                ramp,
                f"the ramp reaches train.global_batch={final} in whole increments",
                f"write a divisor of {final - ramp.start} as train.batch_ramp.increment",
            )
        ]
    return []


def _ramp(ramp: BatchRampConfig, rule: str, remedy: str) -> Problem:
    seen = ", ".join(
        f"train.batch_ramp.{name}={getattr(ramp, name)}" for name in ("start", "increment", "samples")
    )
    return Problem("train.batch_ramp", seen, rule, remedy)


def _identity(train: TrainConfig, size: int, micro: int, data_parallel: int) -> Problem:
    unit = micro * data_parallel
    below, above = size // unit * unit, -(-size // unit) * unit
    sizes = (
        f"train.global_batch={above}"
        if not below
        else f"train.global_batch={below} or train.global_batch={above}"
    )
    batches = f"train.global_batch={train.global_batch}, train.micro_batch={train.micro_batch}"
    seen = f"{batches}, {data_parallel} data ranks"
    rule = "train.global_batch = train.micro_batch x data ranks x a whole number of accumulation steps"
    return Problem(
        "train.global_batch", seen, rule, f"write {sizes}, or change train.micro_batch or the number of ranks"
    )
