"""The number of steps of a run, from ``train.tokens``, ``train.epochs`` and ``schedule.warmup=3%``.

A plan has only steps, so that two ways to write a run give the same plan, identity and run directory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from fractions import Fraction

from toolkit.config.numbers import parse_count, parse_percent
from toolkit.config.schema import RunConfig, TrainConfig
from toolkit.errors import PlanError, Problem
from toolkit.plan.batch import ramp_problems, ramp_stages


def resolve_train_steps(config: RunConfig) -> RunConfig:
    """Return ``config`` with ``train.steps`` and the steps of its warm-up.

    Raises:
        PlanError: ``train.tokens`` is not a whole number of global batches, or ``train.epochs`` is not
            resolved yet (:func:`resolve_epochs`).
    """
    train = config.train
    if train.epochs is not None:
        raise PlanError(
            Problem(
                "train.epochs",
                f"train.epochs={train.epochs:g}",
                "the plan derives the steps of an epoch from the size of the data",
                f"write train.steps={train.steps}",
            )
        )
    if train.tokens is not None:
        config = _with_steps(config, _steps_of_tokens(config, train.tokens))
    if isinstance(config.schedule.warmup, str):
        share = parse_percent(config.schedule.warmup)
        assert share is not None, "the schema checks the percentage"
        warmup = math.ceil(Fraction(share) * config.train.steps)  # as Hugging Face's Trainer rounds
        config = replace(config, schedule=replace(config.schedule, warmup=warmup))
    return config


def resolve_epochs(config: RunConfig, samples: int) -> RunConfig:
    """Replace ``train.epochs`` by the smallest number of steps that reads so many times ``samples`` samples.

    Args:
        samples: samples of one epoch (toolkit/data/size.py).
    """
    if config.train.epochs is None or ramp_problems(config.train):
        return config
    wanted = math.ceil(Fraction(str(config.train.epochs)) * samples)
    steps = first_step_after(config.train, wanted)
    return _with_steps(config, steps)


def first_step_after(train: TrainConfig, samples: int) -> int:
    """Return the smallest number of steps that reads at least ``samples`` samples, at least 1."""
    stages = ramp_stages(train)
    stage = stages[bisect_right([stage.first_sample for stage in stages], samples - 1) - 1]
    return max(1, stage.first_step + -(-(samples - stage.first_sample) // stage.size))


def samples_after(train: TrainConfig, steps: int) -> int:
    """Return the samples that the first ``steps`` steps read."""
    stage = next(stage for stage in reversed(ramp_stages(train)) if stage.first_step <= steps)
    return stage.first_sample + (steps - stage.first_step) * stage.size


def _steps_of_tokens(config: RunConfig, text: str) -> int:
    train = config.train
    if config.data.is_arrays:
        raise _refusal(
            f"train.tokens={text}, data.name={config.data.name}",
            "only text has tokens",
            "write train.epochs=1 or train.steps=1000",
        )
    if ramp_problems(train):
        return train.steps  # plan_batch reports them
    tokens = parse_count(text)
    assert tokens is not None, "the schema checks the number"
    length = train.sequence_length
    steps = first_step_after(train, -(-tokens // length))
    above, below = (samples_after(train, count) * length for count in (steps, steps - 1))
    if above == tokens:
        return steps
    near = [f"train.tokens={count}" for count in (below, above) if count]
    raise _refusal(
        f"train.tokens={text}, train.global_batch={train.global_batch}, train.sequence_length={length}",
        f"a run ends after a whole step; {tokens:,} tokens are between {steps - 1:,} and {steps:,} steps",
        f"write {' or '.join(near)}, or train.steps={steps}",
    )


def _refusal(seen: str, rule: str, remedy: str) -> PlanError:
    return PlanError(Problem("train.tokens", seen, rule, remedy))


def _with_steps(config: RunConfig, steps: int) -> RunConfig:
    return replace(config, train=replace(config.train, steps=steps, tokens=None, epochs=None))
