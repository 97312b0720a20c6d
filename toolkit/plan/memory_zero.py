"""Bytes of parameters, gradients and optimizer states on a rank under DeepSpeed 0.19.8 and the local engine.

Each figure is defined so that it can be measured:

- Parameters: the weights that the forward pass uses, in flat buffers with padding. Under ZeRO 3 this rank's
  partition, and all of each persistent parameter (numel <= stage3_param_persistence_threshold), which stays
  gathered.
- Gradients: the peak of the gradient tensors at the end of a micro-batch's backward pass, before the
  reduction.
- Optimizer: master weights and the optimizer's tensors of parameter shape, after the first step.
- Host and NVMe: the offloaded part of these three, and the extra copies that offload needs.
- Buffers: reduction buckets, and the parameters that ZeRO 3 has gathered at a time: upper bounds.

Notation: N parameters, d data ranks, e bytes per element in the run's precision (4 or 2). ZeRO 1 and 2
flatten each optimizer group and pad it to a multiple of 2d: P is the sum of the groups' partitions. ZeRO 3
pads each parameter to a multiple of d: P is the sum of the parameters' partitions. Adam has moments of M = 8
bytes per element, SGD 4 with momentum and 0 without.

                        parameters   gradients         optimizer      on the host
    stage 0, fp32       4 N          4 N               M N
    stage 0, 16 bits    2 N          (2 + 4) N         (4 + M) N      (local engine only: fp32 sums)
    stage 1             e N          e N               (4 + M) P
    stage 2             e N          e T, or 4 P (1)   (4 + M) P
    stage 3             e P + pers.  e P, or 4 P (2)   (4 + M) P

T is the full size of the parameters that overlap the rank's partition. (1) and (2) hold if bf16 gradients
accumulate in fp32. On the host, stages 1 and 2 with the optimizer on the CPU have the optimizer, e P, and 4 P
of gradients, and stage 2 has e T more during gradient accumulation. On the device, stage 1 keeps its
gradients. Stage 3 with the optimizer on the CPU has the optimizer, 4 P and the gradients on the host.

Two facts are surprising. In fp32, ZeRO 1 to 3 store the weights *and* a master copy. Accumulating in fp32
under stage 1 (a DeepSpeed key of the user) makes DeepSpeed use BF16_Optimizer, with (2 + 4) N bytes of
gradients.

Sources: Rajbhandari et al., 1910.02054, section 3.1; DeepSpeed 0.19.8: runtime/zero/stage_1_and_2.py
(__init__, copy_grads_in_partition, async_accumulate_grad_in_cpu_via_gpu), runtime/zero/stage3.py
(_create_fp32_partitions, _setup_for_real_optimizer), runtime/bf16_optimizer.py. All figures were measured at
1 and 2 ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from toolkit.config.optim import OptimConfig
from toolkit.config.schema import OffloadDevice, Precision
from toolkit.families.base import ParameterSpec
from toolkit.optimizers import get_optimizer
from toolkit.optimizers.base import FP32
from toolkit.plan.deepspeed import BUCKET, LIVE, PERSISTENCE, PREFETCH
from toolkit.plan.rank_parameters import is_expert_parameter


@dataclass(frozen=True, slots=True)
class OptimizerGroup:
    """One parameter group of the optimizer, in the order in which DeepSpeed flattens it."""

    sizes: tuple[int, ...]  # elements of each parameter
    element_bytes: int  # of the optimizer's tensors, per element, in partitions of the group
    state_bytes: int  # of the optimizer's tensors of all parameters, whole
    ranks: int  # that share the group; fewer for experts
    whole: bool = False  # ZeRO 1 and 2 store the states of whole parameters

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def partition(self) -> int:
        """Elements of one rank's range of the flat group, which is padded to a multiple of 2 x ranks."""
        return _padded(self.numel, 2 * self.ranks) // self.ranks

    @property
    def touched(self) -> list[int]:
        """For each rank, the total elements of the parameters that overlap its range."""
        length = self.partition
        change = [0] * (self.ranks + 1)
        offset = 0
        for size in self.sizes:
            change[offset // length] += size
            offset += size
            change[(offset - 1) // length + 1] -= size
        return list(accumulate(change[:-1]))


def optimizer_groups(
    parameters: Iterable[ParameterSpec], optim: OptimConfig, ranks: int, expert: int = 1
) -> tuple[OptimizerGroup, ...]:
    """Parameter groups with and without weight decay, as DeepSpeed flattens them.

    The kinds of parameters that the optimizer distinguishes are in groups of their own. Expert parallelism
    over ``expert`` ranks splits off experts, which fewer ranks share.
    """
    optimizer = get_optimizer(optim.name)
    members: dict[tuple[bool, str, bool], list[ParameterSpec]] = {}
    for spec in parameters:
        kind = optimizer.parameter_kind(spec.name, len(spec.shape))
        members.setdefault((spec.decays, kind, expert > 1 and is_expert_parameter(spec)), []).append(spec)
    return tuple(
        OptimizerGroup(
            sizes=tuple(spec.numel for spec in specs),
            element_bytes=optimizer.element_bytes(optim, kind),
            state_bytes=sum(optimizer.parameter_bytes(optim, spec.name, spec.shape) for spec in specs),
            ranks=max(1, ranks // expert) if apart else ranks,
            whole=kind in optimizer.whole_parameter_kinds,
        )
        for (_, kind, apart), specs in members.items()
    )


@dataclass(frozen=True, slots=True)
class ZeroRun:
    """Inputs of the formulas."""

    parameters: Sequence[ParameterSpec]
    groups: tuple[OptimizerGroup, ...]
    ranks: int
    element: int
    accumulates: bool  # several micro-batches per step
    fp32_accumulation: bool
    precision: Precision
    optimizer_device: OffloadDevice
    parameter_device: OffloadDevice
    settings: Mapping[str, Any]  # zero_optimization as DeepSpeed gets it

    @property
    def numel(self) -> int:
        return sum(group.numel for group in self.groups)

    @property
    def offloaded(self) -> bool:
        return self.optimizer_device is not OffloadDevice.none


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of each kind of state on a rank. ``host`` and ``nvme`` are what is offloaded there."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0
    nvme: int = 0
    buffers: int = 0


def zero0_bytes(run: ZeroRun) -> StateBytes:
    """Plain data parallelism and the local engine: everything is replicated.

    fp32 weights are their own master copy. In 16 bits (local engine only) gradients accumulate in fp32.
    """
    master = 0 if run.element == FP32 else FP32
    optimizer = sum(group.state_bytes + group.numel * master for group in run.groups)
    return StateBytes(run.numel * run.element, run.numel * (run.element + master), optimizer)


def zero1_bytes(run: ZeroRun) -> StateBytes:
    return _zero12_bytes(run, partitioned_gradients=False)


def zero2_bytes(run: ZeroRun) -> StateBytes:
    return _zero12_bytes(run, partitioned_gradients=True)


def _zero12_bytes(run: ZeroRun, *, partitioned_gradients: bool) -> StateBytes:
    partitions = [group.partition for group in run.groups]
    total = sum(partitions)
    whole = sum(group.partition * group.ranks for group in run.groups)
    weights = whole * run.element
    optimizer = total * FP32 + sum(
        _zero12_moment_bytes(group, size, run) for group, size in zip(run.groups, partitions, strict=True)
    )
    touched = max(map(sum, zip(*(_by_rank(group, run.ranks) for group in run.groups), strict=True)))
    # overlap_comm doubles the reduction buckets.
    bucket = min(int(run.settings.get("reduce_bucket_size", BUCKET)), run.numel)
    buffers = bucket * run.element * (2 if run.settings.get("overlap_comm") else 1)
    separate = run.fp32_accumulation and run.element != FP32
    if not partitioned_gradients and separate and not run.offloaded and run.precision is Precision.bf16:
        # BF16_Optimizer keeps bf16 gradients and a copy of all of them in fp32, and reduces in place.
        return StateBytes(weights, run.numel * run.element + whole * FP32, optimizer)
    if run.offloaded:
        host = optimizer + total * FP32 + total * run.element
        if not partitioned_gradients:
            gradients = run.numel * (FP32 if separate else run.element)
        elif separate:
            gradients = total * FP32
        else:
            gradients = 0
            host += touched * run.element if run.accumulates else 0
        return StateBytes(weights, gradients, 0, host=host, buffers=buffers)
    if not partitioned_gradients:
        gradients = run.numel * (FP32 if separate else run.element)
    elif separate:
        gradients = total * FP32
    else:
        gradients = touched * run.element
    return StateBytes(weights, gradients, optimizer, buffers=buffers)


def _by_rank(group: OptimizerGroup, ranks: int) -> list[int]:
    """``group.touched`` for all ``ranks``, of which several may have the same range."""
    return [size for size in group.touched for _ in range(ranks // group.ranks)]


def _zero12_moment_bytes(group: OptimizerGroup, partition: int, run: ZeroRun) -> int:
    """Return the bytes of moments of a group. Muon stores the momentum of full parameters in the gradients'
    dtype.
    """
    if group.whole and not run.offloaded:
        return max(group.touched) * run.element
    return partition * group.element_bytes


def zero3_bytes(run: ZeroRun) -> StateBytes:
    partitions = [sum(-(-size // run.ranks) for size in group.sizes) for group in run.groups]
    total = sum(partitions)
    threshold = int(zero3_setting(run.settings, "param_persistence_threshold", PERSISTENCE))
    # A single rank gathers without copying.
    persistent = (
        0
        if run.ranks == 1
        else sum(_padded(spec.numel, run.ranks) for spec in run.parameters if spec.numel <= threshold)
    )
    optimizer = sum(
        size * (FP32 + group.element_bytes) for group, size in zip(run.groups, partitions, strict=True)
    )
    gradients = total * (FP32 if run.fp32_accumulation else run.element)
    weights = (total + _secondary(run)) * run.element
    bucket = min(int(run.settings.get("reduce_bucket_size", BUCKET)), run.numel)
    buffers = (
        bucket + (_live(run) if run.ranks > 1 or run.parameter_device is not OffloadDevice.none else 0)
    ) * run.element
    host = nvme = 0
    if run.optimizer_device is OffloadDevice.cpu:
        host += optimizer + total * FP32 + gradients
        optimizer = gradients = 0
    elif run.optimizer_device is OffloadDevice.nvme:
        host += gradients
        nvme += optimizer + total * FP32
        optimizer = gradients = 0
    if run.parameter_device is OffloadDevice.cpu:
        host, weights = host + weights, 0
    elif run.parameter_device is OffloadDevice.nvme:
        nvme, weights = nvme + weights, 0
    return StateBytes(
        weights + persistent * run.element, gradients, optimizer, host=host, nvme=nvme, buffers=buffers
    )


def _secondary(run: ZeroRun) -> int:
    """Return the elements of ZeRO++'s secondary partition (hpZ).

    From the first use of a parameter to the end of the step, a rank stores its part of a second copy of the
    parameter, which ``zero_hpz_partition_size`` ranks share.
    """
    size = int(run.settings.get("zero_hpz_partition_size", 1))
    return sum(_padded(spec.numel, run.ranks) // size for spec in run.parameters) if size > 1 else 0


def _live(run: ZeroRun) -> int:
    """Return the elements gathered at a time, at most: DeepSpeed prefetches until
    ``stage3_max_live_parameters`` are gathered, always gathers what runs now (at most one block, or the
    largest other parameter), and keeps what is used again within ``stage3_max_reuse_distance``
    (partitioned_param_coordinator.py).
    """
    blocks: dict[int, int] = {}
    largest = 0
    for spec in run.parameters:
        if spec.layer is None:
            largest = max(largest, spec.numel)
        else:
            blocks[spec.layer] = blocks.get(spec.layer, 0) + spec.numel
    ahead = int(zero3_setting(run.settings, "prefetch_bucket_size", PREFETCH))
    kept = int(zero3_setting(run.settings, "max_live_parameters", LIVE))
    return min(run.numel, max([largest, *blocks.values(), kept]) + ahead)


def zero3_setting(settings: Mapping[str, Any], name: str, default: int) -> Any:
    """Return the value of a ZeRO 3 key, which DeepSpeed reads with and without its prefix."""
    return settings.get(f"stage3_{name}", settings.get(name, default))


def _padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


BYTES_BY_ZERO_STAGE: dict[int, Callable[[ZeroRun], StateBytes]] = {
    0: zero0_bytes,
    1: zero1_bytes,
    2: zero2_bytes,
    3: zero3_bytes,
}
