"""Helpers with which families define Megatron-core tensors, named relative to a block at first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from toolkit.families.base import FamilyTraits, ModelShape
from toolkit.families.megatron import MegatronTensor, TensorCut, TensorPart


def renamed_tensor(
    name: str,
    canonical: str,
    shape: tuple[int, ...],
    cut: TensorCut = TensorCut.whole,
    *,
    transposed: bool = False,
) -> MegatronTensor:
    """Return one canonical tensor under another name; ``shape`` is that of the Megatron-core tensor."""
    extent = shape[::-1] if transposed else shape
    return MegatronTensor(
        name, shape, (TensorPart(canonical, (0,) * len(shape), extent, (0,) * len(shape), transposed),), cut
    )


def stacked_rows(
    name: str, canonical: tuple[str, ...], shape: tuple[int, int], cut: TensorCut
) -> MegatronTensor:
    """Canonical tensors, each of ``shape``, stacked by rows."""
    rows, columns = shape
    parts = tuple(TensorPart(name, (0, 0), shape, (index * rows, 0)) for index, name in enumerate(canonical))
    return MegatronTensor(name, (len(canonical) * rows, columns), parts, cut)


def expert_tensor(
    name: str, canonical: str, shape: tuple[int, int], cut: TensorCut, number: int
) -> MegatronTensor:
    """Expert ``number`` of a canonical tensor ``[E, *shape]``."""
    return MegatronTensor(
        name, shape, (TensorPart(canonical, (number, 0, 0), (1, *shape), (0, 0)),), cut, expert=number
    )


def query_groups(shape: ModelShape) -> Iterator[tuple[str, int, int, int]]:
    """Yield the parts of linear_qkv: (q, k or v; first row in its projection; rows; row in linear_qkv).

    A group belongs to one key-value head: the queries that attend to it, its key, its value.
    """
    row = 0
    for group in range(shape.num_key_value_heads):
        queries = shape.num_attention_heads // shape.num_key_value_heads * shape.head_dim
        for letter, rows in (("q", queries), ("k", shape.head_dim), ("v", shape.head_dim)):
            yield letter, group * rows, rows, row
            row += rows


def at_layer(tensor: MegatronTensor, layer: int, prefix: str) -> MegatronTensor:
    """Return ``tensor``, named within a block, as that of block ``layer``.

    Args:
        prefix: the block's canonical name.
    """
    parts = tuple(replace(part, canonical=prefix + part.canonical) for part in tensor.parts)
    return replace(tensor, name=f"decoder.layers.{layer}.{tensor.name}", parts=parts, layer=layer)


def transformer_config(shape: ModelShape, traits: FamilyTraits) -> dict[str, Any]:
    """Return the fields of ``Family.megatron_config``."""
    fields: dict[str, Any] = {
        "normalization": traits.norm.value,
        "gated_linear_unit": traits.gated,
        "activation_func": "silu" if traits.gated else "gelu_tanh",
        "add_bias_linear": traits.biases,
        "add_qkv_bias": traits.qkv_bias,
        "qk_layernorm": traits.qk_norm,
        "num_query_groups": shape.num_key_value_heads,
        "attention_dropout": shape.dropout,
        "hidden_dropout": shape.dropout if traits.hidden_dropout else 0.0,
        "position_embedding_type": "rope" if traits.rotary else "learned_absolute",
        "rotary_base": shape.rope_theta,
    }
    if traits.experts:
        fields |= {
            "num_moe_experts": shape.num_local_experts,
            "moe_router_topk": shape.num_experts_per_tok,
            "moe_router_pre_softmax": False,  # softmax over the chosen experts equals renormalizing over them
            "moe_ffn_hidden_size": shape.intermediate_size,
            "moe_router_load_balancing_type": "aux_loss",
            # Megatron-core divides by the experts per token and sums over layers; the run's coefficient is
            # for the mean over layers.
            "moe_aux_loss_coeff": shape.router_aux_loss_coef
            * shape.num_experts_per_tok
            / shape.num_hidden_layers,
        }
    return fields
