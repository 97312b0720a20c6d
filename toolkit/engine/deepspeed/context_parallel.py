"""The context axis: DeepSpeed's Ulysses (Jacobs et al., 2309.14509).

A rank has one piece of every sequence: its tokens go through everything but attention there. Before attention an all-to-all trades
pieces for heads, so that a rank has whole sequences of some heads, and another one trades back. Parameters are whole on every rank,
so to ZeRO a context rank is one more data rank, and the loss needs no factor: each rank adds its own tokens' losses.

DeepSpeed's attention for transformers (``UlyssesSPAttentionHF``) replaces SDPA for the whole process, knows no gpt2, and gathers
positions in every layer; what stands here instead is its ``DistributedAttention`` in transformers' attention interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from toolkit.engine.attention_mask import document_causal_mask

ATTENTION_NAME = "deepspeed_ulysses"
POSITIONS = "position_ids"


def apply_context_parallel(module: Any, *, ranks: int, index: int) -> None:
    """Let a transformers model take piece ``index`` of each sequence. Makes DeepSpeed's sequence groups, of neighbouring ranks."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parallel_state_sp.initialize_sequence_parallel(ranks)
    # Without a mask function of this name transformers makes no mask: causality is of the whole sequence, which no rank has outside.
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ulysses_attention)
    module.config._attn_implementation = ATTENTION_NAME
    module.register_forward_pre_hook(partial(_set_positions, index), with_kwargs=True)


def slice_sequence(batch: Mapping[str, torch.Tensor], *, ranks: int, index: int) -> dict[str, torch.Tensor]:
    """Piece ``index`` of ``ranks`` of a micro-batch whose tensors are [micro_batch, sequence, ...]. Positions stay whole: where
    documents begin in the whole sequence is what attention needs of them, and ``_set_positions`` takes the piece's."""
    return {
        name: tensor if name == POSITIONS else tensor.chunk(ranks, dim=1)[index]
        for name, tensor in batch.items()
    }


def ulysses_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention over the whole sequences.

    Args:
        query: [batch, heads, piece, head_dim]; ``key`` and ``value`` have as many heads or fewer.
        attention_mask: bool [batch, 1, sequence, sequence], True where a query sees a key; None: all that is not after it.

    Returns:
        [batch, piece, heads, head_dim]
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.sequence.layer import DistributedAttention

    group = parallel_state_sp.get_sequence_parallel_group()
    if key.shape[1] % dist.get_world_size(
        group
    ):  # a rank gets whole heads: each query head brings its own key and value
        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    whole = DistributedAttention(_local_attention, group, scatter_idx=2, gather_idx=1)
    parts = (part.transpose(1, 2) for part in (query, key, value))
    return whole(*parts, 0, mask=attention_mask, dropout=dropout, scaling=scaling), None


def _local_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """[batch, sequence, heads / ranks, head_dim] each, and so the result."""
    if (
        mask is not None and key.shape[2] != query.shape[2]
    ):  # on GPUs no fused kernel takes a mask and grouped keys
        key, value = (part.repeat_interleave(query.shape[2] // part.shape[2], dim=2) for part in (key, value))
    grouped = key.shape[2] != query.shape[2]
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    found = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=grouped,
    )
    return found.transpose(1, 2)


def _set_positions(
    index: int, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A piece's tokens have their positions in the whole sequence, or in the documents that it is made of."""
    tokens, whole = named["input_ids"], named.get(POSITIONS)
    length = tokens.shape[1]
    mine = slice(index * length, (index + 1) * length)
    if whole is None:
        named[POSITIONS] = torch.arange(mine.start, mine.stop, device=tokens.device).unsqueeze(0)
    else:
        named |= {
            POSITIONS: whole[:, mine],
            "attention_mask": document_causal_mask(whole),
        }  # four-dimensional: transformers hands it on as it is
    return arguments, named
