"""List the tensors that several DeepSpeed ranks store.

    weights           ZeRO 0 to 2: on all data and context ranks; unsharded ones also on all tensor ranks;
                      experts on the ranks with the same experts; a weight tied over a pipeline on its first
                      and last stage
    optimizer state   ZeRO 0: like the weights. From ZeRO 1 on each data rank has its own range, which tensor
                      ranks share if tensor parallelism does not shard the parameter

Under ZeRO 1 and 2 each step rewrites the weights from the ranges, so a flipped bit in a copy lasts until the
next step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from toolkit.checkpoint.shard import WEIGHT
from toolkit.engine.deepspeed import state
from toolkit.engine.deepspeed.partitions import ParameterBox, ZeroPartition
from toolkit.engine.replicas import EXPERTS, STATE, TIED, WEIGHTS, ReplicaTensor, replicated_over_tensor
from toolkit.layout.axes import Axes, Axis

ZERO_AXES = (Axis.CONTEXT, Axis.DATA)  # the axes over which ZeRO partitions


def weights(
    boxes: Mapping[torch.Tensor, ParameterBox], axes: Axes, rank: int, tied: Collection[torch.Tensor] = ()
) -> Iterator[ReplicaTensor]:
    """Yield the replicated weights under ZeRO 0 to 2.

    Args:
        tied: parameters tied over a pipeline.
    """
    same, wider = axes.peers(rank, ZERO_AXES), axes.peers(rank, (*ZERO_AXES, Axis.TENSOR))
    experts = tuple(peer for peer in same if peer % axes.expert == rank % axes.expert)
    stages = axes.peers(rank, (Axis.PIPELINE,))
    ends = tuple(sorted({peer + end - rank for peer in same for end in (stages[0], stages[-1])}))
    shared = {id(parameter) for parameter in tied}
    for parameter, parameter_box in boxes.items():
        if id(parameter) in shared:
            yield TIED, ends, parameter_box.name, parameter
        elif getattr(parameter, "allreduce", True) is False:
            yield EXPERTS, experts, parameter_box.name, parameter
        elif parameter_box.replicas > 1:
            yield replicated_over_tensor(WEIGHTS), wider, parameter_box.name, parameter
        else:
            yield WEIGHTS, same, parameter_box.name, parameter


def optimizer_state(
    optimizer: Any,
    partitions: Sequence[ZeroPartition],
    axes: Axes,
    rank: int,
    *,
    stage: int,
    device: torch.device,
) -> Iterator[ReplicaTensor]:
    """Yield the replicated optimizer state on ``device``.

    Offloaded state is left out, and so are Muon's whole matrices, which overlap with several ranges.
    """
    if any(partition.whole for partition in partitions):
        return
    along = ZERO_AXES if stage == 0 else ()
    same, wider = axes.peers(rank, along), axes.peers(rank, (*along, Axis.TENSOR))
    for shard in state.shards(optimizer, partitions):
        if shard.data.device != device or (stage < 3 and shard.key.state == WEIGHT):
            continue
        name = (
            str(shard.key)
            if shard.box.shape == shard.global_shape
            else f"{shard.key} from {list(shard.box.offset)}"
        )
        if shard.replicas == len(wider) and axes.tensor > 1:
            yield replicated_over_tensor(STATE), wider, name, shard.data
        elif shard.replicas == len(same):
            yield STATE, same, name, shard.data
