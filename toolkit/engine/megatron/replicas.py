"""What Megatron-core's ranks hold in common.

    weights           whole on all data and context ranks; what the tensor axis does not cut, on its ranks too; experts, on the ranks that
                      have the same ones; a tied embedding, on the first and the last stage
    optimizer state   as the weights; with the distributed optimizer each data rank has a range of its own, which a tensor rank shares
                      with the others where the axis does not cut

With the distributed optimizer the weights are written anew in each step, from the ranges: a flipped bit of a copy lasts until the next.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from toolkit.engine.megatron.state import EXPERT, LocalParameter, MegatronState
from toolkit.engine.replicas import EXPERT_STATE, EXPERTS, STATE, TIED, WEIGHTS, replicated_over_tensor
from toolkit.layout.axes import Axes, Axis

ReplicaTensor = tuple[str, tuple[int, ...], str, torch.Tensor]  # as copies.together takes it


def weights(state: MegatronState, axes: Axes, rank: int) -> Iterator[ReplicaTensor]:
    stages = axes.peers(rank, (Axis.PIPELINE,))
    for held in state.held:
        ranks = _all_holders(held, rank)
        if held.tied:
            ends = tuple(sorted({peer + end - rank for peer in ranks for end in (stages[0], stages[-1])}))
            yield TIED, ends, held.name, held.parameter
        else:
            yield _kind(EXPERTS if _is_expert(held) else WEIGHTS, held), ranks, held.name, held.parameter


def optimizer_state(state: MegatronState, rank: int, device: torch.device) -> Iterator[ReplicaTensor]:
    """Of what the optimizer keeps on ``device``."""
    for master in state.masters:
        held = master.held
        ranks = held.tensor_ranks if master.ranged else _all_holders(held, rank)
        # In fp32 the master is the weight, or a range of it.
        same = master.tensor.untyped_storage().data_ptr() == held.parameter.untyped_storage().data_ptr()
        own = {} if same else {"master": master.tensor}
        moments = {
            name: tensor
            for name, tensor in master.inner.state.get(master.tensor, {}).items()
            if isinstance(tensor, torch.Tensor) and tensor.numel() == master.tensor.numel() and tensor.dim()
        }
        for name, tensor in (own | moments).items():
            if tensor.device == device:
                what = _kind(EXPERT_STATE if _is_expert(held) else STATE, held)
                yield (
                    what,
                    ranks,
                    f"{name} of {held.name}" + (f" from {master.start}" if master.ranged else ""),
                    tensor,
                )


def _all_holders(held: LocalParameter, rank: int) -> tuple[int, ...]:
    """Ranks are linear in their coordinates, so those along two axes are all sums of a step along each."""
    return tuple(sorted(data + tensor - rank for data in held.data_ranks for tensor in held.tensor_ranks))


def _kind(what: str, held: LocalParameter) -> str:
    return replicated_over_tensor(what) if len(held.tensor_ranks) > 1 else what


def _is_expert(held: LocalParameter) -> bool:
    return EXPERT.search(held.name) is not None
