"""Whether a run fits on its devices, and the nearest change with which it does.

The plan knows the bytes of states, activations and buffers to a few percent; how much torch's allocator loses
to fragmentation depends on the order of allocations, and it returns cached blocks to the driver before it
gives up. ``least_bytes`` therefore counts no fragmentation and DOUBT less of what is allocated in every step,
and ``most_bytes`` DOUBT more. A run is refused if even the least does not fit, and may not fit if only the
most does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from toolkit.config.schema import EngineName, OffloadDevice, Precision, RunConfig
from toolkit.plan.devices import memory_bytes
from toolkit.plan.types import Device, MemoryPlan, World

GB = 1e9
DOES_NOT_FIT = "states, activations and buffers of a rank fit on its device"
MAY_NOT_FIT = "a run may run out of memory if it needs nearly all that its device has"
DOUBT = 0.1  # share of the bytes that are allocated and freed in every step
# The driver keeps this share of a GPU's memory for itself: an A100 of 81,920 MiB offers 81,050 to processes.
USABLE = 0.99


class Fit(StrEnum):
    yes = "fits"
    unsure = "may not fit"
    no = "does not fit"


@dataclass(frozen=True, slots=True)
class MemoryVerdict:
    """Whether a run fits, and the ``spare`` bytes of the device: negative if the run needs more than that."""

    fit: Fit
    spare: int

    def __str__(self) -> str:
        if self.fit is Fit.yes:
            return f"fits with {self.spare / GB:.1f} GB to spare"
        if self.spare >= 0:
            return f"{self.fit}: only {self.spare / GB:.1f} GB to spare"
        return f"{self.fit}: {-self.spare / GB:.1f} GB too much"


def least_bytes(memory: MemoryPlan) -> int:
    return memory.device_total - memory.fragmentation - int(DOUBT * memory.working)


def most_bytes(memory: MemoryPlan) -> int:
    return memory.device_total + int(DOUBT * memory.working)


def judge_memory(memory: MemoryPlan | None, world: World) -> MemoryVerdict | None:
    """Compare the plan with the memory of a GPU.

    None on CPUs, if either is unknown, and if activations are unknown and the rest fits.
    """
    have = memory_bytes(world)
    if memory is None or have is None or world.device is not Device.CUDA:
        return None
    usable = int(USABLE * have)
    spare = usable - memory.device_total
    if least_bytes(memory) > usable:
        return MemoryVerdict(Fit.no, spare)
    if memory.activations is None:
        return None
    return MemoryVerdict(Fit.yes if most_bytes(memory) <= usable else Fit.unsure, spare)


def nearest_change(config: RunConfig, world: World, fits: Callable[[RunConfig], bool]) -> str | None:
    """Return the overrides of the first change with which ``config`` fits; None if none of them is enough.

    Changes are tried from those that cost least to those that cost most: a higher ZeRO stage, bf16, selective
    recomputation, smaller micro-batches, full recomputation, both, tensor and pipeline ranks, offload.

    Args:
        fits: whether a run with a changed configuration can be planned and fits.
    """
    return next((overrides for overrides, changed in _changes(config, world) if fits(changed)), None)


def _changes(config: RunConfig, world: World) -> Iterator[tuple[str, RunConfig]]:
    megatron = config.engine.name is EngineName.megatron
    if world.ranks > 1 and config.engine.name is not EngineName.local:
        for stage in range(config.zero.stage + 1, 2 if megatron else 4):
            yield f"zero=stage{stage}", replace(config, zero=replace(config.zero, stage=stage))
    if config.precision.name is Precision.fp32:
        yield "precision=bf16", replace(config, precision=replace(config.precision, name=Precision.bf16))
    yield from _smaller_activations(config)
    full = _recompute(config, "full")
    if megatron:
        for axis, most in (("tensor", min(8, world.ranks_per_node)), ("pipeline", world.ranks)):
            size = 2 * getattr(config.parallel, axis)
            while size <= most:
                for base, more in ((config, ""), (full, " train.activation_checkpointing=full")):
                    parallel = replace(base.parallel, **{axis: size})
                    yield f"parallel.{axis}={size}{more}", replace(base, parallel=parallel)
                size *= 2
    if config.engine.name is EngineName.deepspeed and config.offload.optimizer is OffloadDevice.none:
        sharded = replace(full, zero=replace(config.zero, stage=3))
        for base, more in ((config, ""), (sharded, " zero=stage3 train.activation_checkpointing=full")):
            offload = replace(base.offload, optimizer=OffloadDevice.cpu)
            yield f"offload=cpu_optimizer{more}", replace(base, offload=offload)
        offload = replace(sharded.offload, optimizer=OffloadDevice.cpu, parameters=OffloadDevice.cpu)
        yield "offload=cpu zero=stage3 train.activation_checkpointing=full", replace(sharded, offload=offload)


def _smaller_activations(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    none = not config.train.recomputation.full and not config.train.recomputation.selective
    if none:
        yield "train.activation_checkpointing=selective", _recompute(config, "selective")
    full = (_recompute(config, "full"), "train.activation_checkpointing=full")
    for base, added in ((config, ""), *([] if config.train.recomputation.full else [full])):
        if added:
            yield added, base
        size = (config.train.micro_batch or 1) // 2
        while size >= 1:
            smaller = replace(base, train=replace(base.train, micro_batch=size))
            yield f"train.micro_batch={size} {added}".strip(), smaller
            size //= 2


def _recompute(config: RunConfig, mode: str) -> RunConfig:
    return replace(config, train=replace(config.train, activation_checkpointing=mode))
