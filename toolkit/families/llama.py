"""Llama 2 and 3 (Touvron et al., 2307.09288; 2407.21783): grouped-query attention without biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from toolkit.config.model import ModelConfig
from toolkit.errors import PlanError
from toolkit.families import resolve_shape
from toolkit.families.base import ModelShape
from toolkit.families.decoder import Decoder


class Llama(Decoder):
    name = "llama"
    namespace = "llama/1"
    architecture = "LlamaForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": False,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    published: ClassVar[Mapping[str, ModelConfig]] = {
        "llama-2-7b": ModelConfig(
            family=name,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            vocab_size=32000,
            max_position_embeddings=4096,
        ),
        "llama-3-8b": ModelConfig(
            family=name,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=8192,
            rope_theta=500000.0,
        ),
        "llama-3.1-405b": ModelConfig(
            family=name,
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers=126,
            num_attention_heads=128,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=131072,
            rope_theta=500000.0,
        ),
    }
    tiny: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2}
    fixed: ClassVar[Mapping[str, Any]] = {"attention_bias": False, "mlp_bias": False}

    def resolve_shape(self, model: ModelConfig) -> ModelShape:
        shape = super().resolve_shape(model)
        if shape.hidden_size % shape.num_attention_heads:  # required by LlamaConfig
            raise PlanError(
                resolve_shape.indivisible_heads(
                    shape.hidden_size,
                    shape.num_attention_heads,
                    "transformers builds Llama only if model.num_attention_heads divides model.hidden_size "
                    "even with model.head_dim",
                )
            )
        return shape


LLAMA = Llama()
