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
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from toolkit.config.kernels import AttentionKernel
from toolkit.config.schema import OffloadDevice
from toolkit.engine.megatron.attention import TorchAttention, TorchNorm
from toolkit.models.activation_offload import saved_on_host
from toolkit.models.fused_loss import linear_cross_entropy
from toolkit.plan.attention import TRANSFORMER_ENGINE_ATTENTION
from toolkit.plan.kernels import FUSED, TRANSFORMER_ENGINE, loss_backend, loss_chunk
from toolkit.plan.types import RunPlan

ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}


class PaddedVocabularyGPT(GPTModel):
    """``GPTModel`` that excludes padded vocabulary rows, whose logits of zero would raise the loss.

    Attributes:
        loss_chunk: tokens of a chunk of the fused loss; None: losses are computed from logits. The output
            layer then passes hidden states on, and the loss multiplies them by its weight.
        loss_backend: as of :func:`linear_cross_entropy`.
    """

    real_vocabulary: int
    loss_chunk: int | None = None
    loss_backend: str | None = None

    def fuse_loss(self, chunk: int, backend: str | None) -> None:
        self.loss_chunk, self.loss_backend = chunk, backend
        if self.post_process:
            self.output_layer.forward = lambda hidden, **_: (hidden, None)

    def forward(self, *arguments: Any, loss_mask: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
        """Return losses [batch, sequence], or their sum if they are fused; hidden states on other stages.

        Args:
            loss_mask: fp32 [batch, sequence], multiplies the losses if they are fused.
        """
        self._loss_weights = loss_mask
        output: torch.Tensor = super().forward(*arguments, **named)
        return output

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """``logits`` [sequence, batch, this rank's vocabulary] -> losses [batch, sequence].

        With a fused loss ``logits`` are hidden states [sequence, batch, hidden_size], with sequence
        parallelism of this rank's part of the sequence, and the result is the sum of the losses.
        """
        if self.loss_chunk is not None:
            return self._fused_loss(labels, logits)
        first = self.pg_collection.tp.rank() * logits.shape[-1]
        if first + logits.shape[-1] > self.real_vocabulary:
            logits[..., max(self.real_vocabulary - first, 0) :] = torch.finfo(logits.dtype).min
        losses: torch.Tensor = super().compute_language_model_loss(labels, logits)
        return losses

    def _fused_loss(self, labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        assert self.loss_chunk is not None
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        tied = self.share_embeddings_and_output_weights
        weights = self._loss_weights
        return linear_cross_entropy(
            hidden,
            self.shared_embedding_or_output_weight() if tied else self.output_layer.weight,
            labels.t(),
            None if weights is None else weights.t(),
            chunk=self.loss_chunk,
            backend=self.loss_backend,
            group=group if group.size() > 1 else None,
            vocabulary=self.real_vocabulary,
        )


def transformer_config(plan: RunPlan) -> TransformerConfig:
    """Return the plan's section ``transformer`` as a ``TransformerConfig`` that does not initialize
    weights.
    """
    assert plan.megatron is not None, "the plan of a megatron run has Megatron-core's settings"
    settings = dict(plan.megatron["transformer"])
    name = settings["activation_func"]
    # Megatron-core recognises its fused kernel by this function; the kernel is the tanh approximation.
    fused_gelu = name == "gelu_tanh" and settings.get("bias_activation_fusion")
    settings["activation_func"] = functional.gelu if fused_gelu else ACTIVATIONS[name]
    for key in ("params_dtype", "pipeline_dtype"):
        settings[key] = getattr(torch, settings[key])
    # Initialization cannot be disabled, because its code also marks tensor-parallel parameters.
    names = ("init_method", "output_layer_init_method", "embedding_init_method")
    return TransformerConfig(**settings, **dict.fromkeys(names, _leave_uninitialized))


def _leave_uninitialized(weight: torch.Tensor) -> torch.Tensor:
    return weight


def build_chunks(plan: RunPlan, config: TransformerConfig, device: torch.device) -> list[PaddedVocabularyGPT]:
    """Build this pipeline rank's stages on ``device``: one, or several with virtual stages."""
    stages = config.virtual_pipeline_model_parallel_size
    chunks = [_build_chunk(plan, config, None if stages is None else stage) for stage in range(stages or 1)]
    # Megatron-core puts most parameters on the current GPU, but learned positions, routers and the norms of
    # this toolkit on the CPU.
    return [chunk.to(device) for chunk in chunks]


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
    if plan.config.offload.activations is OffloadDevice.cpu:
        # Its own cpu_offloading needs Transformer Engine, and excludes recomputation and pipelines.
        model.decoder._checkpointed_forward = saved_on_host(model.decoder._checkpointed_forward)
    if plan.kernels.loss.name == FUSED:
        model.fuse_loss(loss_chunk(plan.config, plan.shape.vocab_size), loss_backend(plan.config, plan.world))
    return model.train()


def layer_spec(plan: RunPlan, config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """Transformer Engine's layers if they are installed, otherwise Megatron-core's.

    The plan chooses the attention. That of separate documents is always torch's: Transformer Engine's fast
    kernels support documents only as one long packed row, which neither stages nor context ranks could split.
    """
    attention = ModuleSpec(module=TorchAttention, params={"kernel": attention_kernel(plan)})
    if uses_transformer_engine(plan):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
        if plan.kernels.attention.name != TRANSFORMER_ENGINE_ATTENTION:
            spec = copy.deepcopy(spec)  # its layers are one object
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = attention
        return spec
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=stage
    )
    spec = copy.deepcopy(spec)  # its layers are one object
    spec.layer_norm = TorchNorm
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = TorchNorm
        inside = parts.self_attention.submodules
        inside.core_attention = attention
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(inside, name) not in (None, IdentityOp):
                setattr(inside, name, TorchNorm)
    return spec


def attention_kernel(plan: RunPlan) -> AttentionKernel | None:
    """Return the kernel of torch's attention; None if attention is Transformer Engine's."""
    name = plan.kernels.attention.name
    return None if name == TRANSFORMER_ENGINE_ATTENTION else AttentionKernel(name)


def uses_transformer_engine(plan: RunPlan) -> bool:
    return plan.kernels.layers.name == TRANSFORMER_ENGINE
