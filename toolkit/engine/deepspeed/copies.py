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
from toolkit.engine.copies import EXPERTS, STATE, TIED, WEIGHTS, uncut
from toolkit.engine.deepspeed import load as moving
from toolkit.engine.deepspeed.state import Partition, Place
from toolkit.layout.axes import Axes, Axis

Found = tuple[str, tuple[int, ...], str, torch.Tensor]  # as copies.together takes it
ZEROS = (Axis.CONTEXT, Axis.DATA)  # along which ZeRO's ranks differ


def weights(
    places: Mapping[torch.Tensor, Place], axes: Axes, rank: int, tied: Collection[torch.Tensor] = ()
) -> Iterator[Found]:
    """Of ZeRO 0 to 2.

    Args:
        tied: over a pipeline.
    """
    same, wider = axes.peers(rank, ZEROS), axes.peers(rank, (*ZEROS, Axis.TENSOR))
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
            yield uncut(WEIGHTS), wider, place.name, parameter
        else:
            yield WEIGHTS, same, place.name, parameter


def state(
    optimizer: Any,
    partitions: Sequence[Partition],
    axes: Axes,
    rank: int,
    *,
    stage: int,
    device: torch.device,
) -> Iterator[Found]:
    """Of what the optimizer keeps on ``device``: nothing that is offloaded, and not Muon's whole matrices, of which several ranges have
    a part."""
    if any(partition.whole for partition in partitions):
        return
    along = ZEROS if stage == 0 else ()
    same, wider = axes.peers(rank, along), axes.peers(rank, (*along, Axis.TENSOR))
    for shard in moving.shards(optimizer, partitions):
        if shard.data.device != device or (stage < 3 and shard.key.state == WEIGHT):
            continue
        name = (
            str(shard.key)
            if shard.box.shape == shard.global_shape
            else f"{shard.key} from {list(shard.box.offset)}"
        )
        if shard.replicas == len(wider) and axes.tensor > 1:
            yield uncut(STATE), wider, name, shard.data
        elif shard.replicas == len(same):
            yield STATE, same, name, shard.data
