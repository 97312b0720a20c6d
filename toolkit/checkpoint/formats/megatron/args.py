"""Derive the model from Megatron-LM's arguments, which it saves in ``common.pt``; Megatron-core alone does
not.

Source: Megatron-LM's ``megatron/training/arguments.py`` (``core_transformer_config_from_args``, names of
arguments). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config.model import ModelConfig
from toolkit.errors import PlanError
from toolkit.families import FAMILIES
from toolkit.families.base import ModelShape

# Fields of TransformerConfig that distinguish families -> Megatron-LM's argument.
_TRAITS = {
    "normalization": "normalization",
    "gated_linear_unit": "swiglu",
    "add_bias_linear": "add_bias_linear",
    "add_qkv_bias": "add_qkv_bias",
    "qk_layernorm": "qk_layernorm",
    "position_embedding_type": "position_embedding_type",
    "num_moe_experts": "num_experts",
}
# Our key -> Megatron-LM's argument.
_SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "num_local_experts": "num_experts",
    "norm_eps": "norm_epsilon",
}


def read_model_shape(args: Mapping[str, Any]) -> ModelShape | None:
    """Return the model's shape, or None if the arguments are incomplete (the unpadded vocabulary may be
    missing) or fit no family.
    """
    sizes: dict[str, Any] = {key: args.get(name) for key, name in _SIZES.items()}
    if sizes["vocab_size"] is None or "untie_embeddings_and_output_weights" not in args:
        return None
    if args.get("num_experts"):
        sizes |= {
            "intermediate_size": args.get("moe_ffn_hidden_size") or sizes["intermediate_size"],
            "num_experts_per_tok": args.get("moe_router_topk"),
            "router_aux_loss_coef": _router_coefficient(args),
        }
    if args.get("group_query_attention"):
        sizes["num_key_value_heads"] = args.get("num_query_groups")
    if args.get("position_embedding_type") == "rope":
        sizes["rope_theta"] = float(args.get("rotary_base") or 10000.0)
    for family in FAMILIES.values():
        try:
            shape = family.resolve_shape(
                ModelConfig(
                    family=family.name,
                    tie_word_embeddings=not args["untie_embeddings_and_output_weights"],
                    initializer_range=args.get("init_method_std") or 0.02,
                    dropout=args.get("attention_dropout") or 0.0,
                    **sizes,
                )
            )
        except PlanError:
            continue
        config = family.megatron_config(shape)
        if all(_same(config.get(trait), args.get(name)) for trait, name in _TRAITS.items()):
            return shape
    return None


def _router_coefficient(args: Mapping[str, Any]) -> float:
    """Return ``model.router_aux_loss_coef``: averaged over layers, with an expert's share not divided by the
    experts per token.

    ``families/megatron_tables.py`` converts in the other direction.
    """
    coefficient, visited = args.get("moe_aux_loss_coeff"), args.get("moe_router_topk")
    if not isinstance(coefficient, int | float) or not visited:
        return 0.0
    return float(coefficient) * int(args.get("num_layers") or 0) / int(visited)


def _same(ours: object, theirs: object) -> bool:
    """An absent switch is off."""
    return bool(ours) == bool(theirs) if isinstance(ours, bool) or ours is None else ours == theirs
