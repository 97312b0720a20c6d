"""Mixtral (Jiang et al., 2401.04088): Llama with a router and experts as feed-forward.

In memory a layer's experts are two tensors: ``gate_up_proj`` [E, 2F, H] (gate above up) and ``down_proj`` [E,
H, F]. The hub stores three matrices per expert under ``block_sparse_moe``: ``w1`` (gate) [F, H], ``w2``
(down) [H, F] and ``w3`` (up) [F, H]. transformers converts between the two in its ``conversion_mapping``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from toolkit.config.model import ModelConfig
from toolkit.errors import PlanError, Problem
from toolkit.families import megatron_tables
from toolkit.families.base import FamilyTraits, HubTensor, ModelShape, ParameterSpec
from toolkit.families.decoder import Decoder
from toolkit.families.megatron import MegatronTensor, TensorCut


class Mixtral(Decoder):
    name = "mixtral"
    namespace = "mixtral/1"
    architecture = "MixtralForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "tie_word_embeddings": False,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    }
    traits = FamilyTraits(
        experts=True,
        unsupported_optimizers={
            "muon": "DeepSpeed's Muon covers matrices, and mixtral's experts are three-dimensional"
        },
    )
    published: ClassVar[Mapping[str, ModelConfig]] = {
        "mixtral-8x7b": ModelConfig(
            family=name,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=32000,
            max_position_embeddings=32768,
            num_local_experts=8,
            num_experts_per_tok=2,
        )
    }
    tiny: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    required = ("intermediate_size", "num_local_experts", "num_experts_per_tok")
    fixed: ClassVar[Mapping[str, Any]] = {"sliding_window": None, "router_jitter_noise": 0.0}
    published_norm_eps = 1e-5
    published_rope_theta = 1_000_000.0

    def resolve_shape(self, model: ModelConfig) -> ModelShape:
        shape = super().resolve_shape(model)
        if shape.num_experts_per_tok > shape.num_local_experts:
            raise PlanError(
                Problem(
                    "model.num_experts_per_tok",
                    f"model.num_experts_per_tok={shape.num_experts_per_tok}, "
                    f"model.num_local_experts={shape.num_local_experts}",
                    "a token visits at most as many experts as a layer has",
                    f"write model.num_experts_per_tok={min(2, shape.num_local_experts)}",
                )
            )
        return shape

    def feed_forward(self, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Router [E, H], gate_up_proj [E, 2F, H], down_proj [E, H, F]."""
        experts, hidden, inner = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
        yield "mlp.gate.weight", (experts, hidden)
        yield "mlp.experts.gate_up_proj", (experts, 2 * inner, hidden)
        yield "mlp.experts.down_proj", (experts, hidden, inner)

    def feed_forward_weights_used(self, shape: ModelShape) -> tuple[int, int]:
        """Return the weights of the experts that a token visits, and of the router."""
        up, down = super().feed_forward_weights_used(shape)
        return (
            shape.num_experts_per_tok * up + shape.num_local_experts * shape.hidden_size,
            shape.num_experts_per_tok * down,
        )

    def megatron_feed_forward(self, shape: ModelShape) -> Iterator[MegatronTensor]:
        """Yield the names within a block: router [E, H]; per expert linear_fc1 [2F, H], linear_fc2 [H, F]."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        yield megatron_tables.renamed_tensor(
            "mlp.router.weight", "mlp.gate.weight", (shape.num_local_experts, hidden)
        )
        for number in range(shape.num_local_experts):
            prefix = f"mlp.experts.local_experts.{number}"
            yield megatron_tables.expert_tensor(
                f"{prefix}.linear_fc1.weight",
                "mlp.experts.gate_up_proj",
                (2 * inner, hidden),
                TensorCut.gated,
                number,
            )
            yield megatron_tables.expert_tensor(
                f"{prefix}.linear_fc2.weight",
                "mlp.experts.down_proj",
                (hidden, inner),
                TensorCut.columns,
                number,
            )

    def split_for_hub(self, spec: ParameterSpec, shape: ModelShape) -> Iterator[HubTensor]:
        prefix, block, rest = spec.name.partition(".mlp.")
        if not block:
            yield from super().split_for_hub(spec, shape)
        elif rest == "gate.weight":
            yield HubTensor(
                f"{prefix}.block_sparse_moe.gate.weight", spec.shape, spec.name, (0, 0), spec.shape
            )
        else:
            hidden, inner = shape.hidden_size, shape.intermediate_size
            matrices = (("w1", 0), ("w3", inner)) if rest == "experts.gate_up_proj" else (("w2", 0),)
            size = (inner, hidden) if rest == "experts.gate_up_proj" else (hidden, inner)
            for expert in range(shape.num_local_experts):
                for matrix, row in matrices:
                    name = f"{prefix}.block_sparse_moe.experts.{expert}.{matrix}.weight"
                    yield HubTensor(name, size, spec.name, (expert, row, 0), (1, *size))

    def hugging_face_config(self, shape: ModelShape) -> dict[str, Any]:
        return super().hugging_face_config(shape) | {
            "num_local_experts": shape.num_local_experts,
            "num_experts_per_tok": shape.num_experts_per_tok,
            "router_aux_loss_coef": shape.router_aux_loss_coef,
            "sliding_window": None,
        }

    def from_hugging_face_config(self, config: Mapping[str, Any]) -> ModelConfig:
        return replace(
            super().from_hugging_face_config(config),
            num_local_experts=config["num_local_experts"],
            num_experts_per_tok=config["num_experts_per_tok"],
            router_aux_loss_coef=config.get("router_aux_loss_coef", 0.001),
        )


MIXTRAL = Mixtral()
