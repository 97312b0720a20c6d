"""Qwen 2 and 2.5, dense: Llama with biases on query, key and value projections (Yang et al., 2407.10671)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from toolkit.config.model import ModelConfig
from toolkit.families import resolve_shape
from toolkit.families.base import FamilyTraits, ModelShape
from toolkit.families.decoder import Decoder


class Qwen2(Decoder):
    name = "qwen2"
    namespace = "qwen2/1"
    architecture = "Qwen2ForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": False,
        "norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    }
    traits = FamilyTraits(qkv_bias=True)
    published: ClassVar[Mapping[str, ModelConfig]] = {
        "qwen2-7b": ModelConfig(
            family=name,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            vocab_size=152064,
            max_position_embeddings=131072,
        )
    }
    tiny: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    fixed: ClassVar[Mapping[str, Any]] = {"use_sliding_window": False}

    def hugging_face_config(self, shape: ModelShape) -> dict[str, Any]:
        return super().hugging_face_config(shape) | {"use_sliding_window": False}

    def from_hugging_face_config(self, config: Mapping[str, Any]) -> ModelConfig:
        resolve_shape.check_supported(
            {"layer_types": sorted(set(config.get("layer_types") or ["full_attention"]))},
            self.name,
            layer_types=["full_attention"],
        )
        return super().from_hugging_face_config(config)


QWEN2 = Qwen2()
