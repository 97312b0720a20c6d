"""What DeepSpeed's ranks hold in common.

    weights           ZeRO 0 to 2: whole on all data and context ranks; what the tensor axis does not cut, on its ranks too; experts, on
                      the ranks that have the same ones; a weight tied over a pipeline, on its first and last stage
    optimizer state   ZeRO 0: as the weights. From ZeRO 1 on each data rank has a range of its own, which a tensor rank shares with the
                      others where the axis does not cut

Under ZeRO 1 and 2 the weights are written anew in each step, from the ranges: a flipped bit of a copy lasts until the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from toolkit.checkpoint.shard import WEIGHT
from toolkit.engine.deepspeed import state
from toolkit.engine.deepspeed.partitions import ParameterBox, ZeroPartition
from toolkit.engine.replicas import EXPERTS, STATE, TIED, WEIGHTS, replicated_over_tensor
from toolkit.layout.axes import Axes, Axis

ReplicaTensor = tuple[str, tuple[int, ...], str, torch.Tensor]  # as replicas.together takes it
ZERO_AXES = (Axis.CONTEXT, Axis.DATA)  # along which ZeRO's ranks differ


def weights(
    places: Mapping[torch.Tensor, ParameterBox], axes: Axes, rank: int, tied: Collection[torch.Tensor] = ()
) -> Iterator[ReplicaTensor]:
    """Of ZeRO 0 to 2.

    Args:
        tied: over a pipeline.
    """
    same, wider = axes.peers(rank, ZERO_AXES), axes.peers(rank, (*ZERO_AXES, Axis.TENSOR))
    experts = tuple(peer for peer in same if peer % axes.expert == rank % axes.expert)
    stages = axes.peers(rank, (Axis.PIPELINE,))
    ends = tuple(sorted({peer + end - rank for peer in same for end in (stages[0], stages[-1])}))
    shared = {id(parameter) for parameter in tied}
    for parameter, place in places.items():
        if id(parameter) in shared:
            yield TIED, ends, place.name, parameter
        elif getattr(parameter, "allreduce", True) is False:
            yield EXPERTS, experts, place.name, parameter
        elif place.replicas > 1:
            yield replicated_over_tensor(WEIGHTS), wider, place.name, parameter
        else:
            yield WEIGHTS, same, place.name, parameter


def optimizer_state(
    optimizer: Any,
    partitions: Sequence[ZeroPartition],
    axes: Axes,
    rank: int,
    *,
    stage: int,
    device: torch.device,
) -> Iterator[ReplicaTensor]:
    """Of what the optimizer keeps on ``device``: nothing that is offloaded, and not Muon's whole matrices, of which several ranges have
    a part."""
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
