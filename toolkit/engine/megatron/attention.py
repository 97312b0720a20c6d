"""Norm and attention for runs without Transformer Engine, with sequence and context parallelism."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from toolkit.engine.attention_mask import document_causal_mask


class TorchNorm:
    """torch's norm for Megatron-core's local layer spec.

    Under sequence parallelism each rank normalizes its own tokens, and ``finalize_model_grads`` sums the
    gradients of the weights that have the attribute ``sequence_parallel``.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(
            hidden_size,
            eps=eps,
            dtype=config.params_dtype,
            device=torch.device("cuda") if torch.cuda.is_available() else "cpu",
        )
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class TorchAttention(MegatronModule):
    """Attention with torch's ``scaled_dot_product_attention``.

    Under context parallelism keys and values are gathered, and each rank computes its own queries: the
    all-gather form of Llama 3 (2407.21783, section 3.3.2).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self._group = groups.cp if config.context_parallel_size > 1 else None
        self._scale = softmax_scale
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Causal attention over this rank's part of the sequence.

        Args:
            query: [sequence, batch, heads, head_dim]; ``key`` and ``value`` have the key-value heads.
            attention_mask: None, or bool from ``document_mask``, True if a query sees a key. (In
                Megatron-core's own attention True masks out; all layers of a model with a mask use this
                attention.)

        Returns:
            [sequence, batch, heads * head_dim]
        """
        assert attention_bias is None, "this attention does not support a bias"
        assert packed_seq_params is None, "this attention does not support packed sequences"
        length, batch, heads, _ = query.shape
        mask = attention_mask
        if self._group is not None:
            mask = self._mask(length, query.device) if mask is None else mask
            key, value = _GatherSequence.apply(key, self._group), _GatherSequence.apply(value, self._group)
        if mask is not None and heads != key.shape[2]:  # no fused GPU kernel supports a mask and grouped keys
            key, value = (part.repeat_interleave(heads // part.shape[2], dim=2) for part in (key, value))
        dropout = self._dropout if self.training else 0.0
        # Tensor ranks have different heads and need different masks; with sequence parallelism the caller has
        # forked.
        rng = (
            nullcontext() if dropout == 0 or self.config.sequence_parallel else get_cuda_rng_tracker().fork()
        )
        with rng:
            output = functional.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=mask,
                is_causal=mask is None,
                dropout_p=dropout,
                scale=self._scale,
                enable_gqa=heads != key.shape[2],
            )
        return output.permute(2, 0, 1, 3).reshape(length, batch, -1)

    def _mask(self, length: int, device: torch.device) -> torch.Tensor:
        """bool [length, whole sequence]: True if a query sees a key."""
        assert self._group is not None
        queries, keys = _query_and_key_positions(length, self._group, device)
        return keys[None, :] <= queries[:, None]


def document_mask(position_ids: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """bool [batch, 1, this rank's part, whole sequence]: True if a query sees a key.

    Args:
        position_ids: int64 [batch, whole sequence], 0 at the first token of each document.
        group: the context ranks; keys are in the order in which ``TorchAttention`` gathers them.
    """
    if group is None:
        return document_causal_mask(position_ids)
    return document_causal_mask(
        position_ids,
        *_query_and_key_positions(position_ids.shape[1] // group.size(), group, position_ids.device),
    )


def _query_and_key_positions(
    length: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in the whole sequence of this rank's ``length`` tokens, and of the gathered tokens."""
    size = group.size()
    every = [_rank_positions(length, peer, size, device) for peer in range(size)]
    return every[group.rank()], torch.cat(every)


def _rank_positions(length: int, rank: int, size: int, device: torch.device) -> torch.Tensor:
    """Positions in the whole sequence of a context rank's tokens.

    Of ``2 * size`` chunks a rank has one and its mirror image from the end, which balances causal attention.
    """
    chunk = torch.arange(length // 2, device=device)
    return torch.cat([rank * (length // 2) + chunk, (2 * size - 1 - rank) * (length // 2) + chunk])


class _GatherSequence(torch.autograd.Function):
    """All-gather along dim 0; backward reduce-scatters the gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        part = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(part, gradient.contiguous(), group=ctx.group)
        return part, None
