"""Qwen 3, dense: Llama with normalized queries and keys in each head (Yang et al., 2505.09388).

Published models have ``head_dim=128``, which need not be hidden_size / num_attention_heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from toolkit.config.model import ModelConfig
from toolkit.families import megatron_tables, resolve_shape
from toolkit.families.base import FamilyTraits, ModelShape
from toolkit.families.decoder import Decoder
from toolkit.families.megatron import MegatronTensor


class Qwen3(Decoder):
    name = "qwen3"
    namespace = "qwen3/1"
    architecture = "Qwen3ForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": False,
        "norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    }
    traits = FamilyTraits(qk_norm=True)
    published: ClassVar[Mapping[str, ModelConfig]] = {
        "qwen3-0.6b": ModelConfig(
            family=name,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=40960,
            tie_word_embeddings=True,
        ),
        "qwen3-8b": ModelConfig(
            family=name,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=40960,
        ),
    }
    tiny: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    fixed: ClassVar[Mapping[str, Any]] = {"attention_bias": False, "use_sliding_window": False}

    def attention(self, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the parameters of every decoder, and norms [D] of queries and keys that all heads share."""
        yield from super().attention(shape)
        for letter in ("q", "k"):
            yield f"self_attn.{letter}_norm.weight", (shape.head_dim,)

    def megatron_attention(self, shape: ModelShape) -> Iterator[MegatronTensor]:
        yield from super().megatron_attention(shape)
        for letter in ("q", "k"):
            yield megatron_tables.renamed_tensor(
                f"self_attention.{letter}_layernorm.weight",
                f"self_attn.{letter}_norm.weight",
                (shape.head_dim,),
            )

    def hugging_face_config(self, shape: ModelShape) -> dict[str, Any]:
        return {**super().hugging_face_config(shape), **self.fixed}

    def from_hugging_face_config(self, config: Mapping[str, Any]) -> ModelConfig:
        resolve_shape.check_supported(
            {"layer_types": sorted(set(config.get("layer_types") or ["full_attention"]))},
            self.name,
            layer_types=["full_attention"],
        )
        return replace(super().from_hugging_face_config(config), head_dim=config.get("head_dim", 128))


QWEN3 = Qwen3()
