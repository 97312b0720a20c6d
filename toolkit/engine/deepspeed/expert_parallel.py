"""The expert axis: a rank holds some experts of every layer, and tokens travel to theirs and back.

DeepSpeed's own layers do not fit: ``deepspeed.moe.MoE`` is another router with other weights, and AutoEP copies experts that every
rank holds whole, and does not start with the pinned transformers. What is taken from DeepSpeed is its groups, its all-to-all, and
ZeRO for experts: their gradients are added up over the ranks that hold the same experts, divided by all data ranks, and partitioned
over the former. The router and the experts' arithmetic are transformers', so canonical names and shapes are those of the family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import _AllToAllV
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn
from torch.nn import functional

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def apply_expert_parallel(module: nn.Module, ranks: int) -> None:
    """Leave of each layer's experts, which are tensors [experts, ...] on meta, this rank's consecutive ones."""
    groups._create_expert_and_data_parallel(ranks)
    name = f"ep_size_{ranks}"
    layers: list[Any] = [
        layer
        for layer in module.modules()
        if hasattr(layer, "gate_up_proj") and hasattr(layer, "num_experts")
    ]
    assert layers, "the plan's model has experts"
    for experts in layers:
        for key, parameter in list(experts.named_parameters(recurse=False)):
            mine = nn.Parameter(torch.empty_like(parameter[: experts.num_experts // ranks]))
            # How DeepSpeed tells an expert's parameter, and the ranks that hold it too.
            mine.allreduce, mine.group_name = False, name  # type: ignore[attr-defined]
            setattr(experts, key, mine)
        experts.exchange = ExpertExchange(
            experts.forward, experts.num_experts, groups._get_expert_parallel_group(name)
        )
        experts.forward = experts.exchange.forward
        experts.num_experts //= ranks


class ExpertExchange(MoE):
    """What stands between a router and its experts. By this type, which brings nothing else, DeepSpeed knows that there are experts."""

    def __init__(self, compute: Experts, num_experts: int, group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.num_experts = num_experts  # of the layer, over all ranks
        self._compute, self._group = compute, group

    def set_deepspeed_parallelism(self, *_: Any) -> None:
        """The groups exist already."""

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The experts' outputs, weighted and added up for each token.

        Args:
            hidden: [tokens, H]. index: [tokens, k], each token's experts. weights: [tokens, k], the router's.

        Returns:
            [tokens, H]
        """
        ranks = dist.get_world_size(self._group)
        order = index.flatten().argsort(stable=True)  # by expert, and so by rank
        counts = torch.bincount(index.flatten(), minlength=self.num_experts)
        arriving = torch.empty_like(counts)  # by sender, then by expert of this rank
        dist.all_to_all_single(arriving, counts, group=self._group)
        sent, received = counts.view(ranks, -1).sum(1).tolist(), arriving.view(ranks, -1).sum(1).tolist()
        rows = _AllToAllV.apply(self._group, hidden[order // index.shape[1]], sent, received)
        outputs = _AllToAllV.apply(self._group, self._at_home(rows, arriving.view(ranks, -1)), received, sent)
        # Back in the router's order; there are no two equal places, so the sum has one order too.
        own = torch.zeros_like(outputs).index_copy(0, order, outputs).view(*index.shape, -1)
        return (own * weights.unsqueeze(-1)).to(own.dtype).sum(1)

    def _at_home(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        """[rows, H] through their experts. arriving: [ranks, experts of this rank], how many rows each sender has for each."""
        local = torch.arange(arriving.shape[1], device=rows.device).repeat(arriving.shape[0])
        experts = local.repeat_interleave(arriving.flatten())
        here = rows.shape[0]
        if not here:
            # Every parameter needs a gradient, because ZeRO's ranks wait for each other's. The row of zeros is appended to what the
            # all-to-all returned: with new rows instead, autograd would skip the backward all-to-all on this rank only, and the
            # other ranks of the group would fail or wait for it without end.
            rows, experts = functional.pad(rows, (0, 0, 0, 1)), experts.new_zeros(1)
        found = self._compute(rows, experts.unsqueeze(1), torch.ones_like(rows[:, :1]))
        return found[:here]
