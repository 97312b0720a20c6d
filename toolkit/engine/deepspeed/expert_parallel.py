"""Expert parallelism: a rank stores some experts of every layer, and tokens are exchanged with all-to-all.

DeepSpeed's own layers do not fit: ``deepspeed.moe.MoE`` has another router with other weights, and AutoEP
copies experts that every rank stores whole and does not support the pinned transformers. This module uses
DeepSpeed's groups, its all-to-all, and ZeRO for experts: gradients are summed over the ranks with the same
experts, divided by all data ranks, and partitioned over the former. Router and expert computation are
transformers', with the family's canonical names and shapes.
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
    """Keep this rank's consecutive experts of each layer. Parameters are [experts, ...] on meta."""
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
            # How DeepSpeed recognizes an expert's parameter and the group of ranks that store it.
            mine.allreduce, mine.group_name = False, name  # type: ignore[attr-defined]
            setattr(experts, key, mine)
        experts.exchange = ExpertExchange(
            experts.forward, experts.num_experts, groups._get_expert_parallel_group(name)
        )
        experts.forward = experts.exchange.forward
        experts.num_experts //= ranks


class ExpertExchange(MoE):
    """Sends tokens to the ranks of their experts.

    By its base class, which adds nothing else, DeepSpeed detects experts.
    """

    def __init__(self, compute: Experts, num_experts: int, group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.num_experts = num_experts  # of the layer, over all ranks
        self._compute, self._group = compute, group

    def set_deepspeed_parallelism(self, *_: Any) -> None:
        """The groups exist already."""

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs, weighted and summed for each token: [tokens, H].

        Args:
            hidden: [tokens, H].
            index: [tokens, k], the experts of each token.
            weights: [tokens, k], the router's weights.
        """
        ranks = dist.get_world_size(self._group)
        order = index.flatten().argsort(stable=True)  # by expert, and so by rank
        # Not ``bincount``, which reads the largest index from the device.
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=index.device)
        counts.scatter_add_(0, index.flatten(), torch.ones_like(index.flatten()))
        arriving = torch.empty_like(counts)  # by sender, then by expert of this rank
        dist.all_to_all_single(arriving, counts, group=self._group)
        # The host has to know how many rows the all-to-all exchanges: one read per layer and micro-batch.
        sent, received = torch.stack([counts, arriving]).view(2, ranks, -1).sum(2).tolist()
        rows = _AllToAllV.apply(self._group, hidden[order // index.shape[1]], sent, received)
        local = self._compute_local(rows, arriving.view(ranks, -1))
        outputs = _AllToAllV.apply(self._group, local, received, sent)
        # Restore the router's order, which also fixes the order of the sum.
        routed = torch.zeros_like(outputs).index_copy(0, order, outputs).view(*index.shape, -1)
        return (routed * weights.unsqueeze(-1)).to(routed.dtype).sum(1)

    def _compute_local(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        """Pass [rows, H] through their experts.

        Args:
            arriving: [ranks, experts of this rank], the number of rows from each sender for each expert.
        """
        local = torch.arange(arriving.shape[1], device=rows.device).repeat(arriving.shape[0])
        count = rows.shape[0]
        experts = local.repeat_interleave(arriving.flatten(), output_size=count)
        if not count:
            # Every parameter needs a gradient, because ZeRO's ranks wait for each other's. The row of zeros
            # is appended to the output of the all-to-all: with a new tensor instead, autograd would skip the
            # backward all-to-all on this rank only, and the other ranks would hang.
            rows, experts = functional.pad(rows, (0, 0, 0, 1)), experts.new_zeros(1)
        outputs = self._compute(rows, experts.unsqueeze(1), torch.ones_like(rows[:, :1]))
        return outputs[:count]
