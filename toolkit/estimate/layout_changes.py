"""Small changes of a layout, as typed overrides: a neighbouring size of one axis, micro-batch, ZeRO stage or
recomputation.

The engine, the precision and the global batch are the user's and never change, nor do the samples and their
order.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.config.recomputation import KEY as RECOMPUTATION
from toolkit.config.recomputation import RecomputationMode
from toolkit.config.schema import EngineName, RunConfig
from toolkit.plan.types import World

Changes = Mapping[str, int | str]  # values by configuration key, such as parallel.tensor

AXES = ("parallel.tensor", "parallel.pipeline", "parallel.context")
MICRO_BATCH, ZERO = "train.micro_batch", "zero.stage"
DOUBLINGS = 3  # an axis or micro-batch changes by up to this power of two
ZERO_STAGES = {EngineName.deepspeed: 4, EngineName.megatron: 2, EngineName.local: 1}


def apply_changes(config: RunConfig, changes: Changes) -> RunConfig:
    """Return ``config`` with the changed keys."""
    for key, value in changes.items():
        section, name = key.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def as_overrides(changes: Changes) -> tuple[str, ...]:
    """Return the changes as a user types them: ``parallel.tensor=4``."""
    return tuple(f"{key}={value}" for key, value in sorted(changes.items()))


def neighbours(config: RunConfig, changes: Changes, fixed: Container[str] = ()) -> Iterator[Changes]:
    """Yield ``changes`` with one more key, or another value of one.

    A change back to the value in ``config`` is removed from the changes.

    Args:
        fixed: keys that do not change.
    """
    now = apply_changes(config, changes)
    for key, values in _values(now).items():
        if key in fixed:
            continue
        for value in values:
            if value != get_key(now, key):
                yield {
                    name: new for name, new in {**changes, key: value}.items() if new != get_key(config, name)
                }


def can_divide(config: RunConfig, world: World) -> bool:
    """Return whether the ranks and the global batch can be divided, which is cheap to check before
    planning.
    """
    parallel = config.parallel
    data, rest = divmod(world.ranks, parallel.tensor * parallel.pipeline * parallel.context)
    return rest == 0 and config.train.global_batch % (data * (config.train.micro_batch or 1)) == 0


def get_key(config: RunConfig, key: str) -> Any:
    """Return the value of a key of two parts, such as ``parallel.tensor``."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _values(config: RunConfig) -> Mapping[str, Sequence[int | str]]:
    """Return the neighbouring values of each key."""
    factors = [2**power for power in range(1, DOUBLINGS + 1)]
    values: dict[str, Sequence[int | str]] = {}
    for key in (*AXES, MICRO_BATCH):
        value = get_key(config, key)
        if value is None:  # train.micro_batch=null: the whole share of a rank at once
            values[key] = [1, *factors]
        else:
            values[key] = [
                *(value * factor for factor in factors),
                *(value // factor for factor in factors if value % factor == 0),
            ]
    values[ZERO] = range(ZERO_STAGES[config.engine.name])
    values[RECOMPUTATION] = [mode.value for mode in RecomputationMode]
    return values
