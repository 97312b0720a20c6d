"""Build this rank's chunks of the model with Megatron-core, with uninitialized weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from toolkit.config.data import DocumentMasking
from toolkit.config.engine_keys import show
from toolkit.config.engine_keys_megatron import TRANSFORMER_ENGINE
from toolkit.engine.megatron.attention import TorchAttention, TorchNorm
from toolkit.errors import PlanError, Problem
from toolkit.plan.types import Device, RunPlan

ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}


class PaddedVocabularyGPT(GPTModel):
    """``GPTModel`` that excludes padded vocabulary rows, whose logits of zero would raise the loss."""

    real_vocabulary: int

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` [sequence, batch, this rank's vocabulary] -> losses [batch, sequence]."""
        first = self.pg_collection.tp.rank() * logits.shape[-1]
        if first + logits.shape[-1] > self.real_vocabulary:
            logits[..., max(self.real_vocabulary - first, 0) :] = torch.finfo(logits.dtype).min
        losses: torch.Tensor = super().compute_language_model_loss(labels, logits)
        return losses


def transformer_config(plan: RunPlan) -> TransformerConfig:
    """The plan's section ``transformer`` as a ``TransformerConfig`` that does not initialize weights."""
    assert plan.megatron is not None, "the plan of a megatron run has Megatron-core's settings"
    found = dict(plan.megatron["transformer"])
    found["activation_func"] = ACTIVATIONS[found["activation_func"]]
    for key in ("params_dtype", "pipeline_dtype"):
        found[key] = getattr(torch, found[key])
    # Initialization cannot be disabled, because its code also marks tensor-parallel parameters.
    names = ("init_method", "output_layer_init_method", "embedding_init_method")
    return TransformerConfig(**found, **dict.fromkeys(names, _leave_uninitialized))


def _leave_uninitialized(weight: torch.Tensor) -> torch.Tensor:
    return weight


def build_chunks(plan: RunPlan, config: TransformerConfig) -> list[PaddedVocabularyGPT]:
    """Build this pipeline rank's stages: one, or several with virtual stages."""
    stages = config.virtual_pipeline_model_parallel_size
    return [_build_chunk(plan, config, None if stages is None else stage) for stage in range(stages or 1)]


def _build_chunk(plan: RunPlan, config: TransformerConfig, stage: int | None) -> PaddedVocabularyGPT:
    assert plan.megatron is not None
    assert plan.shape is not None
    arguments: Mapping[str, Any] = plan.megatron["model"]
    model = PaddedVocabularyGPT(
        config,
        layer_spec(plan, config, stage),
        parallel_output=True,
        vp_stage=stage,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
        **arguments,
    )
    model.real_vocabulary = plan.shape.vocab_size
    return model.train()


def layer_spec(plan: RunPlan, config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """Transformer Engine's layers if they are installed, otherwise Megatron-core's with torch's attention.

    With ``data.documents=separate`` attention is always torch's: Transformer Engine's fast kernels support
    documents only as one long packed row, which neither stages nor context ranks could split.
    """
    if uses_transformer_engine(plan):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
        if plan.config.data.documents is DocumentMasking.separate:
            spec = copy.deepcopy(spec)  # its layers are one object
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = TorchAttention
        return spec
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=stage
    )
    spec = copy.deepcopy(spec)  # its layers are one object
    spec.layer_norm = TorchNorm
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
        attention = parts.self_attention.submodules
        attention.core_attention = TorchAttention
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name) not in (None, IdentityOp):
                setattr(attention, name, TorchNorm)
    return spec


def check_transformer_engine_settings(plan: RunPlan) -> None:
    """Refuse settings that need Transformer Engine if it is not installed, which the plan cannot know.

    Raises:
        PlanError: the run has settings that other layers silently ignore.
    """
    if uses_transformer_engine(plan):
        return
    problems = [
        Problem(
            f"engine.megatron.{name}",
            f"engine.megatron.{name}={show(value)}, and Transformer Engine is not installed",
            "only Transformer Engine's layers implement it; other layers ignore it silently",
            "install transformer-engine, or leave it out",
        )
        for name, value in plan.config.engine.megatron.items()
        if name in TRANSFORMER_ENGINE
    ]
    if problems:
        raise PlanError(*problems)


def uses_transformer_engine(plan: RunPlan) -> bool:
    if plan.world.device is not Device.CUDA:
        return False
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)
