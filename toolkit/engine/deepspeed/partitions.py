"""Find a rank's share of weights and optimizer state in DeepSpeed's buffers, as views under canonical names.

ZeRO 1 and 2 flatten each parameter group in the order of ``round_robin_bit16_groups``, pad it, and split it
into one range per rank: a parameter may lie on several ranks, and a range may start in the middle of a
parameter. ZeRO 3 splits each parameter into ``ceil(numel / ranks)`` elements per rank and concatenates the
ranges of a sub-group. In both cases a rank stores flat ranges of row-major parameters, each of which is a few
boxes. Padding never becomes a shard.

    ZeRO 1/2, two ranks, a [2, 3] and b [4]          ZeRO 3
    rank 0   a0 a1 a2 a3 a4 a5                       a0 a1 a2  b0 b1
    rank 1   b0 b1 b2 b3 pad pad                     a3 a4 a5  b2 b3

A ``ParameterBox`` maps a parameter of this rank to a canonical tensor, or to the box of it that belongs to
this rank under tensor or expert parallelism. ZeRO partitions over the ranks with the same box: data and
context ranks, and for experts the data ranks that share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.checkpoint.shard import MASTER, MOMENTUM, WEIGHT, Box, Shard, TensorKey, flat_boxes
from toolkit.config.optim import OptimConfig
from toolkit.optimizers.base import OptimizerSpec, StateLayout


@dataclass(frozen=True, slots=True)
class ParameterBox:
    """A parameter of this rank: ``box`` of the canonical tensor ``name`` of ``shape``.

    ``replica, replicas`` are those of ``Shard`` among tensor ranks that store the same box, over which ZeRO
    does not partition.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    replica: int = 0
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements ``start .. start + numel`` of a parameter, stored at ``at .. at + numel`` of a flat tensor.

    ``replica, replicas`` are those of ``Shard`` among the ranks over which ZeRO partitions.
    """

    parameter_box: ParameterBox
    start: int
    at: int
    numel: int
    replica: int = 0
    replicas: int = 1

    def shards(self, state: str, flat: torch.Tensor) -> Iterator[Shard]:
        """Yield views of ``flat``, the whole flat tensor, as boxes of the canonical tensor."""
        parameter_box, at = self.parameter_box, self.at
        for box in flat_boxes(parameter_box.box.shape, self.start, self.start + self.numel):
            offset = tuple(
                low + first for low, first in zip(box.offset, parameter_box.box.offset, strict=True)
            )
            yield Shard(
                TensorKey(state, parameter_box.name),
                parameter_box.shape,
                Box(offset, box.shape),
                flat.narrow(0, at, box.numel).view(box.shape),
                self.replica * parameter_box.replicas + parameter_box.replica,
                self.replicas * parameter_box.replicas,
            )
            at += box.numel


@dataclass(frozen=True, slots=True)
class ZeroPartition:
    """One flat fp32 buffer of this rank.

    Attributes:
        number: index of the group (ZeRO 1, 2) or sub-group (ZeRO 3) in DeepSpeed's lists.
        group: the optimizer's parameter group, for its settings.
        states: the states of this group.
        ranges: in flat order, without padding.
        master: fp32 [elements with padding]; the tensor that the optimizer updates, and the key of its state.
        bit16: the weights in the run's precision with the layout of ``master``; None if the master is the
            weight (fp32).
        whole: under ZeRO 1 and 2 Muon stores the momentum of whole matrices: their positions in that buffer.
    """

    number: int
    group: Mapping[str, Any]
    states: StateLayout
    ranges: tuple[FlatRange, ...]
    master: torch.Tensor
    bit16: torch.Tensor | None
    whole: tuple[FlatRange, ...] = ()

    def shards(self, state: str, flat: torch.Tensor) -> Iterator[Shard]:
        """Yield views of ``flat``, which has the layout of the master (or of ``whole``)."""
        if state in self.states.whole:
            yield self._whole_shard(state, flat)
            return
        flat = flat.detach().view(-1)
        for flat_range in self.whole if state == MOMENTUM and self.whole else self.ranges:
            yield from flat_range.shards(state, flat)

    def _whole_shard(self, state: str, tensor: torch.Tensor) -> Shard:
        """Return the shard of a run without ZeRO, whose partition is one parameter. Its states may have
        shapes of their own.
        """
        (only,) = self.ranges
        shape = tuple(tensor.shape)
        key = TensorKey(state, only.parameter_box.name)
        return Shard(key, shape, Box.whole(shape), tensor.detach(), only.replica, only.replicas)

    def weights(self, master: torch.Tensor) -> Iterator[Shard]:
        """Yield the weights and, in 16 bits, the masters that they are rounded from."""
        if self.bit16 is None:
            yield from self.shards(WEIGHT, master)
        else:
            yield from self.shards(WEIGHT, self.bit16)
            yield from self.shards(MASTER, master)


GroupStates = Callable[[Mapping[str, Any]], StateLayout]


def group_states(spec: OptimizerSpec, optim: OptimConfig, group: Mapping[str, Any]) -> StateLayout:
    """Return the states of a parameter group of DeepSpeed's optimizer."""
    return spec.states(optim, spec.group_kind(group))


def read_partitions(
    optimizer: Any, boxes: Mapping[torch.Tensor, ParameterBox], states: GroupStates, *, rank: int, ranks: int
) -> list[ZeroPartition]:
    """Read this rank's partitions from DeepSpeed's optimizer wrapper (stage 0: a plain torch optimizer).

    ``rank, ranks`` count the ranks over which ZeRO partitions.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _stage3(optimizer, boxes, states, rank)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return _stage12(optimizer, boxes, states)
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return _bf16(optimizer, boxes, states)
    return _stage0(optimizer, boxes, states, rank, ranks)


def _intersect(parameter_box: ParameterBox, offset: int, low: int, high: int) -> Iterator[FlatRange]:
    """Yield the range of a parameter at ``offset`` of a flat group that lies in ``low .. high``, if any."""
    first, last = max(offset, low), min(offset + parameter_box.box.numel, high)
    if first < last:
        yield FlatRange(parameter_box, first - offset, first - low, last - first)


def _stage12(
    optimizer: Any, boxes: Mapping[torch.Tensor, ParameterBox], states: GroupStates
) -> list[ZeroPartition]:
    partitions = []
    for number, master in enumerate(optimizer.single_partition_of_fp32_groups):
        group, size = optimizer.param_groups[number], master.numel()
        rank = dist.get_rank(optimizer.real_dp_process_group[number])  # fewer ranks for experts
        ranges: list[FlatRange] = []
        whole: list[FlatRange] = []
        # The flat order differs from the group's under round_robin_gradients; the offsets include alignment.
        for parameter, offset in zip(
            optimizer.round_robin_bit16_groups[number],
            optimizer.round_robin_bit16_offsets[number],
            strict=True,
        ):
            here = list(_intersect(boxes[parameter], offset, rank * size, (rank + 1) * size))
            ranges += here
            if here and group.get("use_muon"):
                first, last = offset // size, (offset + parameter.numel() - 1) // size
                at = whole[-1].at + whole[-1].numel if whole else 0
                whole.append(
                    FlatRange(boxes[parameter], 0, at, parameter.numel(), rank - first, last - first + 1)
                )
        # In fp32 ZeRO stores a second copy of the weights; the optimizer updates the partition.
        bit16 = optimizer.parallel_partitioned_bit16_groups[number][rank]
        partitions.append(
            ZeroPartition(
                number, group, states(group), tuple(ranges), master, _sixteen_bit_or_none(bit16), tuple(whole)
            )
        )
    return partitions


def _bf16(
    optimizer: Any, boxes: Mapping[torch.Tensor, ParameterBox], states: GroupStates
) -> list[ZeroPartition]:
    """Partitions of ``BF16_Optimizer``, which DeepSpeed uses for bf16 ZeRO 1 with fp32 accumulation."""
    partitions = []
    for number, master in enumerate(optimizer.fp32_groups_flat_partition):
        rank = dist.get_rank(optimizer.real_dp_process_group[number])
        low, offset = rank * master.numel(), 0
        ranges: list[FlatRange] = []
        for parameter in optimizer.bf16_groups[number]:
            ranges += _intersect(boxes[parameter], offset, low, low + master.numel())
            offset += parameter.numel()
        bit16 = optimizer.bf16_partitioned_groups[number][rank]
        group = optimizer.param_groups[number]
        partitions.append(ZeroPartition(number, group, states(group), tuple(ranges), master, bit16))
    return partitions


def _stage3(
    optimizer: Any, boxes: Mapping[torch.Tensor, ParameterBox], states: GroupStates, rank: int
) -> list[ZeroPartition]:
    partitions = []
    for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        ranges: list[FlatRange] = []
        at = 0
        for parameter in optimizer.fp16_groups[number]:
            ranges += _own_range(parameter, boxes[parameter], rank, at)
            at += parameter.partition_numel()
        group = optimizer.param_groups[optimizer.sub_group_to_group_id[number]]
        # In fp32 too there is a second copy of the weights, refreshed after each step.
        bit16 = optimizer.fp16_partitioned_groups_flat[number]
        partitions.append(
            ZeroPartition(number, group, states(group), tuple(ranges), master, _sixteen_bit_or_none(bit16))
        )
    return partitions


def _own_range(parameter: Any, parameter_box: ParameterBox, rank: int, at: int) -> Iterator[FlatRange]:
    """Yield this rank's range of a parameter that ZeRO 3 has partitioned; nothing if it is padding."""
    length = parameter.partition_numel()
    numel = min(length, parameter.ds_numel - rank * length)
    if numel > 0:
        yield FlatRange(parameter_box, rank * length, at, numel)


def _stage0(
    optimizer: Any, boxes: Mapping[torch.Tensor, ParameterBox], states: GroupStates, rank: int, ranks: int
) -> list[ZeroPartition]:
    partitions: list[ZeroPartition] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            flat_range = FlatRange(boxes[parameter], 0, 0, parameter.numel(), rank, ranks)
            partitions.append(
                ZeroPartition(len(partitions), group, states(group), (flat_range,), parameter, None)
            )
    return partitions


def _sixteen_bit_or_none(weights: torch.Tensor | None) -> torch.Tensor | None:
    return None if weights is None or weights.dtype == torch.float32 else weights


def frozen_shards(
    module: nn.Module, boxes: Mapping[torch.Tensor, ParameterBox], *, rank: int, ranks: int
) -> Iterator[Shard]:
    """Yield weights without an optimizer: those with ``requires_grad=False`` in a ``model.target``."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_tensor"):
            for flat_range in _own_range(parameter, boxes[parameter], rank, 0):
                yield from flat_range.shards(WEIGHT, parameter.ds_tensor.detach())
        else:
            yield from FlatRange(boxes[parameter], 0, 0, parameter.numel(), rank, ranks).shards(
                WEIGHT, parameter.detach().view(-1)
            )
