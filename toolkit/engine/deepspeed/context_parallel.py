"""Context parallelism with DeepSpeed's Ulysses (Jacobs et al., 2309.14509).

A rank processes one slice of every sequence. Before attention an all-to-all exchanges slices for heads, so
that a rank has whole sequences of some heads, and after it another one exchanges back. Parameters are
replicated, so ZeRO treats a context rank like a data rank, and the loss needs no factor: each rank sums its
own tokens' losses.

DeepSpeed's attention for transformers (``UlyssesSPAttentionHF``) replaces SDPA for the whole process, does
not support gpt2, and gathers positions in every layer. This module uses its ``DistributedAttention`` in
transformers' attention interface instead.
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
    """Let a transformers model process slice ``index`` of each sequence. Creates DeepSpeed's groups."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parallel_state_sp.initialize_sequence_parallel(ranks)
    # No mask function is registered under this name, so transformers creates no mask; the attention is causal
    # itself.
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ulysses_attention)
    module.config._attn_implementation = ATTENTION_NAME
    module.register_forward_pre_hook(partial(_set_positions, index), with_kwargs=True)


def slice_sequence(batch: Mapping[str, torch.Tensor], *, ranks: int, index: int) -> dict[str, torch.Tensor]:
    """Slice ``index`` of ``ranks`` of a micro-batch whose tensors are [micro_batch, sequence, ...].

    Positions stay whole, because attention needs the document boundaries of the whole sequence;
    ``_set_positions`` slices them.
    """
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
    """Causal attention over whole sequences.

    Args:
        query: [batch, heads, slice, head_dim]; ``key`` and ``value`` have as many heads or fewer.
        attention_mask: bool [batch, 1, sequence, sequence], True if a query sees a key; None: causal.

    Returns:
        [batch, slice, heads, head_dim]
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.sequence.layer import DistributedAttention

    group = parallel_state_sp.get_sequence_parallel_group()
    if key.shape[1] % dist.get_world_size(
        group
    ):  # a rank needs whole heads, so repeat them for each query head
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
    """All tensors are [batch, sequence, heads / ranks, head_dim]."""
    grouped = key.shape[2] != query.shape[2]
    if mask is not None and grouped:  # no fused GPU kernel supports both a mask and grouped keys
        key, value = (part.repeat_interleave(query.shape[2] // part.shape[2], dim=2) for part in (key, value))
        grouped = False
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
    """Set the positions of a slice's tokens in the whole sequence, or in its documents."""
    tokens, whole = named["input_ids"], named.get(POSITIONS)
    length = tokens.shape[1]
    mine = slice(index * length, (index + 1) * length)
    if whole is None:
        named[POSITIONS] = torch.arange(mine.start, mine.stop, device=tokens.device).unsqueeze(0)
    else:
        # transformers passes a four-dimensional mask on unchanged.
        named |= {POSITIONS: whole[:, mine], "attention_mask": document_causal_mask(whole)}
    return arguments, named
