"""The size of a checkpoint, an assumed write speed for the first save of a run, and whether saves are written
while training continues, from a copy in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from toolkit.config.schema import RunConfig
from toolkit.families.base import ParameterSpec
from toolkit.optimizers import get_optimizer
from toolkit.plan.memory_zero import FP32
from toolkit.plan.types import Device, MemoryPlan, RunPlan, SavePlan, World
from toolkit.progress import quantity

GIB = 2**30
HOST_SHARE = 0.5  # of a node's memory, for offloaded states and the copies of all its ranks


def plan_saves(config: RunConfig, world: World, size: int | None, memory: MemoryPlan | None) -> SavePlan:
    """Decide ``checkpoint.background=null``, and the size of the copy.

    On GPUs training continues while threads of the host write. On CPUs both need the same cores, so saves
    stay in the foreground. A rank that turns out to have more state than ``checkpoint.staging_gib`` writes it
    in the foreground.

    Args:
        size: bytes of a rank's state (:func:`rank_state_bytes`).
    """
    wanted, bound = config.checkpoint.background, int(config.checkpoint.staging_gib * GIB)

    def foreground(reason: str) -> SavePlan:
        return SavePlan(background=False, reason=reason, copy_bytes=0, staging_bytes=bound)

    if wanted is False:
        return foreground("checkpoint.background=false")
    if wanted is None and world.device is Device.CPU:
        return foreground("writing and training would share the CPU's cores")
    if size is not None and size > bound:
        return foreground(
            f"{quantity(size, 'B')} a rank exceed checkpoint.staging_gib={config.checkpoint.staging_gib:g}"
        )
    if wanted is None and size is not None and world.host_memory_bytes is not None:
        ranks = min(world.ranks, world.ranks_per_node)
        needed = ranks * (size + (memory.host if memory is not None else 0))
        if needed > HOST_SHARE * world.host_memory_bytes:
            return foreground(
                f"copies of all ranks of a node would need more than {HOST_SHARE:.0%} of its memory"
            )
    reason = "on GPUs" if wanted is None else "checkpoint.background=true"
    return SavePlan(background=True, reason=reason, copy_bytes=size or 0, staging_bytes=bound)


# Write speed of a node with a fast local disk, or with a good share of a parallel file system. The value is
# optimistic: trying a save that does not finish in time costs nothing.
NODE_BYTES_PER_SECOND = 2e9


def checkpoint_bytes(plan: RunPlan) -> int | None:
    """Bytes of the tensors of one checkpoint; the rest is some kilobytes. None for ``model.target``.

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
    """Bytes that one rank writes; None for ``model.target``."""
    return rank_state_bytes(plan.config, plan.world, plan.parameters)


def rank_state_bytes(config: RunConfig, world: World, parameters: Sequence[ParameterSpec]) -> int | None:
    """Compute :func:`rank_bytes` from the parts of a plan: replicas are written once, and the work is spread
    evenly.
    """
    return -(-state_bytes(config, parameters) // world.ranks) if parameters else None


def assumed_speed(world: World) -> float:
    """Bytes per second of one rank while all ranks of its node write."""
    return NODE_BYTES_PER_SECOND / min(world.ranks, world.ranks_per_node)
