"""Qwen 3 with experts (Yang et al., 2505.09388): the attention of Qwen 3 and the experts of Mixtral.

In memory the tensors are those of Mixtral; the hub stores ``gate_proj`` [F, H], ``up_proj`` [F, H] and
``down_proj`` [H, F] of each expert. Every layer has experts. As in Mixtral, the router's weights are divided
by their sum over the experts that a token visits (``norm_topk_prob``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from toolkit.config.model import ModelConfig
from toolkit.families import resolve_shape
from toolkit.families.base import FamilyTraits, HubTensor, ModelShape, ParameterSpec
from toolkit.families.decoder import Decoder
from toolkit.families.mixtral import Mixtral
from toolkit.families.qwen3 import Qwen3


class Qwen3Moe(Qwen3, Mixtral):
    name = "qwen3_moe"
    namespace = "qwen3_moe/1"
    architecture = "Qwen3MoeForCausalLM"
    traits = FamilyTraits(
        qk_norm=True,
        experts=True,
        unsupported_optimizers={
            "muon": "DeepSpeed's Muon covers matrices, and qwen3_moe's experts are three-dimensional"
        },
    )
    published: ClassVar[Mapping[str, ModelConfig]] = {
        "qwen3-30b-a3b": ModelConfig(
            family=name,
            hidden_size=2048,
            intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            max_position_embeddings=40960,
            num_local_experts=128,
            num_experts_per_tok=8,
        )
    }
    tiny: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    fixed: ClassVar[Mapping[str, Any]] = {
        **Qwen3.fixed,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    published_norm_eps = 1e-6

    def feed_forward(self, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the parameters of Mixtral's feed-forward, with the router last."""
        router, *experts = super().feed_forward(shape)
        yield from (*experts, router)

    def split_for_hub(self, spec: ParameterSpec, shape: ModelShape) -> Iterator[HubTensor]:
        prefix, experts, rest = spec.name.partition(".experts.")
        if not experts:
            yield from Decoder.split_for_hub(self, spec, shape)
            return
        hidden, inner = shape.hidden_size, shape.intermediate_size
        matrices = (("gate", 0), ("up", inner)) if rest == "gate_up_proj" else (("down", 0),)
        size = (inner, hidden) if rest == "gate_up_proj" else (hidden, inner)
        for expert in range(shape.num_local_experts):
            for matrix, row in matrices:
                name = f"{prefix}.experts.{expert}.{matrix}_proj.weight"
                yield HubTensor(name, size, spec.name, (expert, row, 0), (1, *size))

    def hugging_face_config(self, shape: ModelShape) -> dict[str, Any]:
        found = super().hugging_face_config(shape)
        return found | {
            "moe_intermediate_size": shape.intermediate_size,
            "num_experts": found.pop("num_local_experts"),
        }

    def from_hugging_face_config(self, config: Mapping[str, Any]) -> ModelConfig:
        """``intermediate_size`` of a ``config.json`` is that of layers without experts, of which there are
        none.
        """
        resolve_shape.check_supported(
            {"norm_topk_prob": config.get("norm_topk_prob", False)}, self.name, norm_topk_prob=True
        )
        return super().from_hugging_face_config(
            {
                **config,
                "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                "intermediate_size": config["moe_intermediate_size"],
                "num_local_experts": config.get("num_experts", config.get("num_local_experts")),
                "mlp_only_layers": config.get("mlp_only_layers") or [],
                "sliding_window": None,  # use_sliding_window decides
            }
        )


QWEN3_MOE = Qwen3Moe()
