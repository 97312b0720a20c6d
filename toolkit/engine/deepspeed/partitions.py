"""Where DeepSpeed keeps a rank's share of weights and optimizer state, as views under canonical names.

ZeRO 1 and 2 flatten each parameter group in the order of ``round_robin_bit16_groups``, pad it, and cut it into one range a
rank: a parameter may lie on several ranks, and a rank's range may start in the middle of one. ZeRO 3 cuts each parameter
into ``ceil(numel / ranks)`` elements a rank and lays a sub-group's pieces one after another. Either way a rank holds a flat
range of a row-major parameter, which is a few boxes; padding belongs to no parameter and so never becomes a shard.

    ZeRO 1/2, two ranks, a [2, 3] and b [4]          ZeRO 3
    rank 0   a0 a1 a2 a3 a4 a5                       a0 a1 a2  b0 b1
    rank 1   b0 b1 b2 b3 pad pad                     a3 a4 a5  b2 b3

What a parameter is to this rank, its ``ParameterBox`` says: a whole canonical tensor, or the box of one that an axis cut off for it.
ZeRO's ranks are those that hold the same box: data and context ranks, and of an expert its data ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.checkpoint.shard import (
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTUM,
    WEIGHT,
    Box,
    Shard,
    TensorKey,
    flat_boxes,
)


@dataclass(frozen=True, slots=True)
class ParameterBox:
    """What a parameter of this rank is: ``box`` of the canonical tensor ``name`` of ``shape``.

    ``replica, replicas``: as in Shard, of the ranks that hold the same box and are not ZeRO's (tensor ranks, of what is not cut).
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    replica: int = 0
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class FlatRange:
    """The elements ``start .. start + numel`` of the parameter at ``place``, which lie at ``at .. at + numel`` of a flat tensor.

    ``replica, replicas`` as in Shard, of ZeRO's ranks.
    """

    place: ParameterBox
    start: int
    at: int
    numel: int
    replica: int = 0
    replicas: int = 1

    def shards(self, state: str, flat: torch.Tensor) -> Iterator[Shard]:
        """Views of ``flat``, the whole flat tensor: a few boxes, in the canonical tensor's coordinates."""
        place, at = self.place, self.at
        for box in flat_boxes(place.box.shape, self.start, self.start + self.numel):
            offset = tuple(low + first for low, first in zip(box.offset, place.box.offset, strict=True))
            yield Shard(
                TensorKey(state, place.name),
                place.shape,
                Box(offset, box.shape),
                flat.narrow(0, at, box.numel).view(box.shape),
                self.replica * place.replicas + place.replica,
                self.replicas * place.replicas,
            )
            at += box.numel


@dataclass(frozen=True, slots=True)
class ZeroPartition:
    """One flat fp32 range of this rank and what belongs to it.

    Attributes:
        number: of the group (ZeRO 1, 2) or sub-group (ZeRO 3) in DeepSpeed's lists.
        group: the optimizer's parameter group, for its settings.
        pieces: in flat order, without padding.
        master: fp32 [elements with padding]; what the optimizer updates, and the key of its state.
        bit16: the weights in the run's precision, laid out as ``master``; None where the master is the weight (fp32).
        whole: Muon under ZeRO 1 and 2 keeps momentum of whole matrices, not of this range: where they lie in that buffer.
    """

    number: int
    group: Mapping[str, Any]
    pieces: tuple[FlatRange, ...]
    master: torch.Tensor
    bit16: torch.Tensor | None
    whole: tuple[FlatRange, ...] = ()

    @property
    def moments(self) -> tuple[str, ...]:
        """States of parameter shape that the optimizer keeps for this group."""
        if self.group.get("use_muon"):
            return (MOMENTUM,)
        if "betas" in self.group:
            return (EXP_AVG, EXP_AVG_SQ)
        return (MOMENTUM,) if self.group.get("momentum") else ()

    def shards(self, state: str, flat: torch.Tensor) -> Iterator[Shard]:
        """Views of ``flat``, which is laid out as the master (or as ``whole``)."""
        flat = flat.detach().view(-1)
        for piece in self.whole if state == MOMENTUM and self.whole else self.pieces:
            yield from piece.shards(state, flat)

    def weights(self, master: torch.Tensor) -> Iterator[Shard]:
        """The weight and, under 16 bits, the master that it is rounded from."""
        if self.bit16 is None:
            yield from self.shards(WEIGHT, master)
        else:
            yield from self.shards(WEIGHT, self.bit16)
            yield from self.shards(MASTER, master)


def read_partitions(
    optimizer: Any, places: Mapping[torch.Tensor, ParameterBox], *, rank: int, ranks: int
) -> list[ZeroPartition]:
    """This rank's share, read from DeepSpeed's own optimizer wrapper (or a plain torch optimizer: stage 0).

    ``places`` is each parameter's; a tied parameter is one tensor and has one place. ``rank, ranks``: among ZeRO's ranks.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _stage3(optimizer, places, rank)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return _stage12(optimizer, places)
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return _bf16(optimizer, places)
    return _stage0(optimizer, places, rank, ranks)


def _intersect(place: ParameterBox, offset: int, low: int, high: int) -> Iterator[FlatRange]:
    """What of a parameter at ``offset`` of a flat group lies in ``low .. high``; nothing if it does not."""
    first, last = max(offset, low), min(offset + place.box.numel, high)
    if first < last:
        yield FlatRange(place, first - offset, first - low, last - first)


def _stage12(optimizer: Any, places: Mapping[torch.Tensor, ParameterBox]) -> list[ZeroPartition]:
    found = []
    for number, master in enumerate(optimizer.single_partition_of_fp32_groups):
        group, size = optimizer.param_groups[number], master.numel()
        rank = dist.get_rank(
            optimizer.real_dp_process_group[number]
        )  # a group of experts has fewer ranks than the others
        pieces: list[FlatRange] = []
        whole: list[FlatRange] = []
        # The flat order, which differs from the group's under round_robin_gradients; the offsets include any alignment.
        for parameter, offset in zip(
            optimizer.round_robin_bit16_groups[number],
            optimizer.round_robin_bit16_offsets[number],
            strict=True,
        ):
            here = list(_intersect(places[parameter], offset, rank * size, (rank + 1) * size))
            pieces += here
            if here and group.get("use_muon"):
                first, last = offset // size, (offset + parameter.numel() - 1) // size
                at = whole[-1].at + whole[-1].numel if whole else 0
                whole.append(
                    FlatRange(places[parameter], 0, at, parameter.numel(), rank - first, last - first + 1)
                )
        # In fp32 ZeRO still keeps a second copy of the weights; the partition is the one that the optimizer updates.
        bit16 = optimizer.parallel_partitioned_bit16_groups[number][rank]
        found.append(
            ZeroPartition(number, group, tuple(pieces), master, _sixteen_bit_or_none(bit16), tuple(whole))
        )
    return found


def _bf16(optimizer: Any, places: Mapping[torch.Tensor, ParameterBox]) -> list[ZeroPartition]:
    """``BF16_Optimizer``: what DeepSpeed makes of ZeRO 1 in bf16 with gradients accumulated in fp32."""
    found = []
    for number, master in enumerate(optimizer.fp32_groups_flat_partition):
        rank = dist.get_rank(optimizer.real_dp_process_group[number])
        low, offset = rank * master.numel(), 0
        pieces: list[FlatRange] = []
        for parameter in optimizer.bf16_groups[number]:
            pieces += _intersect(places[parameter], offset, low, low + master.numel())
            offset += parameter.numel()
        bit16 = optimizer.bf16_partitioned_groups[number][rank]
        found.append(ZeroPartition(number, optimizer.param_groups[number], tuple(pieces), master, bit16))
    return found


def _stage3(optimizer: Any, places: Mapping[torch.Tensor, ParameterBox], rank: int) -> list[ZeroPartition]:
    found = []
    for number, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        pieces: list[FlatRange] = []
        at = 0
        for parameter in optimizer.fp16_groups[number]:
            pieces += _own_range(parameter, places[parameter], rank, at)
            at += parameter.partition_numel()
        group = optimizer.param_groups[optimizer.sub_group_to_group_id[number]]
        # In fp32 there is a second copy of the weights too, refreshed after each step.
        bit16 = optimizer.fp16_partitioned_groups_flat[number]
        found.append(ZeroPartition(number, group, tuple(pieces), master, _sixteen_bit_or_none(bit16)))
    return found


def _own_range(parameter: Any, place: ParameterBox, rank: int, at: int) -> Iterator[FlatRange]:
    """This rank's part of a parameter that ZeRO 3 has cut; nothing where the part is padding."""
    length = parameter.partition_numel()
    numel = min(length, parameter.ds_numel - rank * length)
    if numel > 0:
        yield FlatRange(place, rank * length, at, numel)


def _stage0(
    optimizer: Any, places: Mapping[torch.Tensor, ParameterBox], rank: int, ranks: int
) -> list[ZeroPartition]:
    found: list[ZeroPartition] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            piece = FlatRange(places[parameter], 0, 0, parameter.numel(), rank, ranks)
            found.append(ZeroPartition(len(found), group, (piece,), parameter, None))
    return found


def _sixteen_bit_or_none(weights: torch.Tensor | None) -> torch.Tensor | None:
    return None if weights is None or weights.dtype == torch.float32 else weights


def frozen_shards(
    module: nn.Module, places: Mapping[torch.Tensor, ParameterBox], *, rank: int, ranks: int
) -> Iterator[Shard]:
    """Weights that no optimizer holds: ``requires_grad=False`` in a model of the user's own."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_tensor"):
            for piece in _own_range(parameter, places[parameter], rank, 0):
                yield from piece.shards(WEIGHT, parameter.ds_tensor.detach())
        else:
            yield from FlatRange(places[parameter], 0, 0, parameter.numel(), rank, ranks).shards(
                WEIGHT, parameter.detach().view(-1)
            )
