"""List the tensors that several Megatron-core ranks store.

    weights           on all data and context ranks; unsharded ones also on all tensor ranks; experts on the
                      ranks with the same experts; a tied embedding on the first and the last stage
    optimizer state   like the weights; with the distributed optimizer each data rank has its own range, which
                      tensor ranks share if tensor parallelism does not shard the parameter

With the distributed optimizer each step rewrites the weights from the ranges, so a flipped bit in a copy
lasts until the next step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from toolkit.engine.megatron.state import EXPERT, LocalParameter, MegatronState
from toolkit.engine.replicas import (
    EXPERT_STATE,
    EXPERTS,
    STATE,
    TIED,
    WEIGHTS,
    ReplicaTensor,
    replicated_over_tensor,
)
from toolkit.layout.axes import Axes, Axis


def weights(state: MegatronState, axes: Axes, rank: int) -> Iterator[ReplicaTensor]:
    stages = axes.peers(rank, (Axis.PIPELINE,))
    for local in state.parameters:
        ranks = _all_holders(local, rank)
        if local.tied:
            ends = tuple(sorted({peer + end - rank for peer in ranks for end in (stages[0], stages[-1])}))
            yield TIED, ends, local.name, local.tensor
        else:
            yield _kind(EXPERTS if _is_expert(local) else WEIGHTS, local), ranks, local.name, local.tensor


def optimizer_state(state: MegatronState, rank: int, device: torch.device) -> Iterator[ReplicaTensor]:
    """Yield the replicated optimizer state on ``device``."""
    for master in state.masters:
        local = master.parameter
        ranks = local.tensor_ranks if master.ranged else _all_holders(local, rank)
        # In fp32 the master is the weight, or a range of it.
        same = master.tensor.untyped_storage().data_ptr() == local.tensor.untyped_storage().data_ptr()
        own = {} if same else {"master": master.tensor}
        moments = {
            name: tensor
            for name, tensor in master.inner.state.get(master.tensor, {}).items()
            if isinstance(tensor, torch.Tensor) and tensor.numel() == master.tensor.numel() and tensor.dim()
        }
        for name, tensor in (own | moments).items():
            if tensor.device == device:
                what = _kind(EXPERT_STATE if _is_expert(local) else STATE, local)
                yield (
                    what,
                    ranks,
                    f"{name} of {local.name}" + (f" from {master.start}" if master.ranged else ""),
                    tensor,
                )


def _all_holders(local: LocalParameter, rank: int) -> tuple[int, ...]:
    """Return all ranks along both axes: ranks are linear in their coordinates, so offsets along two axes add
    up.
    """
    return tuple(sorted(data + tensor - rank for data in local.data_ranks for tensor in local.tensor_ranks))


def _kind(what: str, local: LocalParameter) -> str:
    return replicated_over_tensor(what) if len(local.tensor_ranks) > 1 else what


def _is_expert(local: LocalParameter) -> bool:
    return EXPERT.search(local.name) is not None
