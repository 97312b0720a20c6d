"""Attention of the families' models of transformers: the run's kernel instead of transformers' own functions.

transformers finds packed documents by reading a tensor on the host in every forward pass, creates a matrix of
all pairs for them, and restricts no kernel. With a function of its own, which has no function for masks,
transformers does none of this.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from toolkit.config.kernels import AttentionKernel
from toolkit.models.attention import attend, make_mask

# transformers treats a name with "flash" in it as one of the flash-attn package.
NAMES = {
    AttentionKernel.sdpa: "toolkit_sdpa",
    AttentionKernel.flash: "toolkit_fused",
    AttentionKernel.flex: "toolkit_blocks",
    AttentionKernel.eager: "toolkit_matmul",
}
POSITIONS, CACHE = "position_ids", "past_key_values"
# Layers pass further arguments on to attention. It is not attention_mask, because gpt2 only takes tensors.
MASK = "pair_mask"


def use_kernel(module: Any, kernel: AttentionKernel, *, documents: bool) -> None:
    """Let a causal language model of transformers compute attention with ``kernel``.

    Args:
        documents: ``position_ids`` are 0 at the first token of each document, and documents are separate.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAMES[kernel], partial(_attention, kernel=kernel))
    module.config._attn_implementation = NAMES[kernel]
    # The base model, because some callers need its hidden states only.
    module.base_model.register_forward_pre_hook(partial(_set_mask, kernel, documents), with_kwargs=True)


def _attention(
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
    """Attention as transformers calls it, with the mask of ``attend`` in ``pair_mask``.

    Args:
        query: [batch, heads, queries, head_dim]; ``key`` and ``value`` have as many heads or fewer.
        attention_mask: a mask of four dims that the caller of the model gave.

    Returns:
        [batch, queries, heads, head_dim]
    """
    mask = attention_mask if pair_mask is None else pair_mask
    attended = attend(query, key, value, kernel=kernel, mask=mask, dropout=dropout, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def _set_mask(
    kernel: AttentionKernel,
    documents: bool,
    module: nn.Module,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Create the mask of documents and padding.

    Raises:
        TypeError: more than the token ids was given by position, or the kernel does not support padding.
    """
    if len(arguments) > 1:
        raise TypeError(f"pass all arguments of {type(module).__name__} but input_ids by name")
    given, positions = named.get("attention_mask"), named.get(POSITIONS)
    if given is not None and given.dim() != 2:
        return arguments, named
    mask = None
    continues = named.get(CACHE) is not None  # text is generated, and position_ids count in the whole text
    if not continues and documents and positions is not None:
        mask = make_mask(kernel, positions)
    elif not continues and kernel is AttentionKernel.flex:
        mask = make_mask(kernel, _running_positions(find_inputs(arguments, named)))
    if given is not None and not bool(given.all()):
        mask = _with_padding(kernel, mask, given.bool(), find_inputs(arguments, named).shape[1])
    return arguments, {**named, "attention_mask": None, MASK: mask}


def _with_padding(kernel: AttentionKernel, mask: Any, tokens: torch.Tensor, queries: int) -> torch.Tensor:
    """``mask`` without the keys that are padding: ``tokens`` is bool [batch, keys], False for padding."""
    if kernel not in (AttentionKernel.sdpa, AttentionKernel.eager):
        raise TypeError(
            f"the batch has an attention_mask with padding, which attention={kernel.value} does not support: "
            "write model.attention=sdpa"
        )
    keys = torch.arange(tokens.shape[1], device=tokens.device)
    causal: torch.Tensor = keys <= keys[-queries:, None] if mask is None else mask
    return causal & tokens[:, None, None]


def _running_positions(inputs: torch.Tensor) -> torch.Tensor:
    """int64 [batch, tokens], counting from 0 in each row of the inputs."""
    return torch.arange(inputs.shape[1], device=inputs.device).expand(inputs.shape[:2])


def find_inputs(arguments: tuple[Any, ...], named: dict[str, Any]) -> torch.Tensor:
    """Return a base model's inputs: token ids [batch, tokens], or embeddings [batch, tokens, hidden]."""
    inputs = arguments[0] if arguments else named.get("input_ids")
    found: torch.Tensor = named["inputs_embeds"] if inputs is None else inputs
    return found
