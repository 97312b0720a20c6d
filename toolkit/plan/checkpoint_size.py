"""Size of a checkpoint, and an assumed write speed for the first save of a run."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from toolkit.config.schema import RunConfig
from toolkit.families.base import ParameterSpec
from toolkit.optimizers import get_optimizer
from toolkit.plan.memory_zero import FP32
from toolkit.plan.types import RunPlan, World

# Write speed of a node with a fast local disk, or with a good share of a parallel file system. The value is
# optimistic: trying a save that does not finish in time costs nothing.
NODE_BYTES_PER_SECOND = 2e9


def checkpoint_bytes(plan: RunPlan) -> int | None:
    """Return the bytes of the tensors of one checkpoint; the rest is some kilobytes. None for
    ``model.target``.

    A checkpoint has the weights, their fp32 master copy if they have 16 bits, and the optimizer's tensors,
    each once whatever the layout.
    """
    return state_bytes(plan.config, plan.parameters) if plan.parameters else None


def state_bytes(config: RunConfig, parameters: Sequence[ParameterSpec]) -> int:
    """Compute :func:`checkpoint_bytes` from the parts of a plan."""
    weight = config.precision.element_bytes
    master = FP32 if weight < FP32 else 0
    optimizer = get_optimizer(config.optim.name)
    # Layers repeat the same parameters, and a search plans thousands of layouts.
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for spec in parameters:
        kind = optimizer.parameter_kind(spec.name, len(spec.shape))
        alike.setdefault((kind, spec.shape), []).append(spec.name)
    return sum(
        len(names)
        * (prod(shape) * (weight + master) + optimizer.parameter_bytes(config.optim, names[0], shape))
        for (_, shape), names in alike.items()
    )


def rank_bytes(plan: RunPlan) -> int | None:
    """Return the bytes that one rank writes; None for ``model.target``."""
    return rank_state_bytes(plan.config, plan.world, plan.parameters)


def rank_state_bytes(config: RunConfig, world: World, parameters: Sequence[ParameterSpec]) -> int | None:
    """Compute :func:`rank_bytes` from the parts of a plan: replicas are written once, and the work is spread
    evenly.
    """
    return -(-state_bytes(config, parameters) // world.ranks) if parameters else None


def assumed_speed(world: World) -> float:
    """Return the bytes per second of one rank while all ranks of its node write."""
    return NODE_BYTES_PER_SECOND / min(world.ranks, world.ranks_per_node)
