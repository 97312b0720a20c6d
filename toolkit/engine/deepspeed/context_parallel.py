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

from toolkit.config.kernels import AttentionKernel
from toolkit.models.attention import attend, make_mask
from toolkit.models.attention_interface import MASK, POSITIONS, find_inputs

ATTENTION_NAME = "deepspeed_ulysses"


def apply_context_parallel(module: Any, kernel: AttentionKernel, *, ranks: int, index: int) -> None:
    """Let a transformers model process slice ``index`` of each sequence. Creates DeepSpeed's groups.

    Call it after ``use_kernel``, whose hook creates the mask of documents from the positions of the whole
    sequence, before the hook of this module slices them.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    parallel_state_sp.initialize_sequence_parallel(ranks)
    # No mask function is registered under this name, so transformers creates no mask; the attention is causal
    # itself.
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, partial(ulysses_attention, kernel=kernel))
    module.config._attn_implementation = ATTENTION_NAME
    set_positions = partial(_set_positions, kernel, ranks, index)
    module.base_model.register_forward_pre_hook(set_positions, with_kwargs=True)


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
    attention_mask: Any,
    *,
    kernel: AttentionKernel,
    pair_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention over whole sequences.

    Args:
        query: [batch, heads, slice, head_dim]; ``key`` and ``value`` have as many heads or fewer.
        attention_mask: not used.
        pair_mask: as ``mask`` in ``attend``, for whole sequences.

    Returns:
        [batch, slice, heads, head_dim]
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.sequence.layer import DistributedAttention

    group = parallel_state_sp.get_sequence_parallel_group()
    # a rank needs whole heads, so repeat them for each query head
    if key.shape[1] % dist.get_world_size(group):
        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    whole = DistributedAttention(_local_attention, group, scatter_idx=2, gather_idx=1)
    parts = (part.transpose(1, 2) for part in (query, key, value))
    settings = {"kernel": kernel, "mask": pair_mask, "dropout": dropout, "scale": scaling}
    return whole(*parts, 0, **settings), None


def _local_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any
) -> torch.Tensor:
    """All tensors are [batch, sequence, heads / ranks, head_dim]."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return attend(query, key, value, **settings).transpose(1, 2)


def _set_positions(
    kernel: AttentionKernel,
    ranks: int,
    index: int,
    module: nn.Module,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Set the positions of a slice's tokens in the whole sequence, or in its documents."""
    tokens, whole = find_inputs(arguments, named), named.get(POSITIONS)
    length = tokens.shape[1]
    if whole is None:
        whole = torch.arange(ranks * length, device=tokens.device).unsqueeze(0)
        if kernel is AttentionKernel.flex:
            named[MASK] = make_mask(kernel, whole.expand(len(tokens), -1))
    named[POSITIONS] = whole[:, index * length : (index + 1) * length]
    return arguments, named
