"""Choose the attention kernel of a run, and state why a kernel cannot be used.

Sources: torch 2.13's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp lists what each kernel of
``scaled_dot_product_attention`` supports, and torch/nn/attention/flex_attention.py what FlexAttention does.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.config.data import DocumentMasking
from toolkit.config.kernels import AttentionKernel
from toolkit.config.schema import EngineName, Precision, RunConfig
from toolkit.families.base import ModelShape
from toolkit.plan.devices import find_gpu
from toolkit.plan.rules_compile import INSTALL, lacking
from toolkit.plan.types import Device, KernelChoice, World

# Names of attention that is not one of AttentionKernel.
TRANSFORMER_ENGINE_ATTENTION = "transformer-engine"
TRANSFORMERS_ATTENTION = "transformers"  # of a model without a family
OWN_ATTENTION = "model"  # of model.target
LARGEST_FLASH_HEAD = 256


@dataclass(frozen=True, slots=True)
class AttentionObstacle:
    """Why a run cannot use a kernel: the ``keys`` that prevent it, the rule and the remedy."""

    keys: str
    rule: str
    remedy: str


def choose_attention(
    config: RunConfig, world: World, shape: ModelShape | None, *, transformer_engine: bool
) -> KernelChoice:
    """Choose the attention kernel of a run.

    Args:
        transformer_engine: whether Megatron-core's layers are Transformer Engine's.
    """
    key = config.model.attention
    if config.model.source_key == "model.target":
        return KernelChoice(OWN_ATTENTION, "model.target computes its own attention")
    if key is not AttentionKernel.auto:
        return KernelChoice(key.value, f"model.attention={key.value}")
    if config.model.source_key == "model.hf.architecture":
        return KernelChoice(TRANSFORMERS_ATTENTION, "the model's class in transformers chooses")
    documents = config.data.documents is DocumentMasking.separate
    if transformer_engine and not documents:
        return KernelChoice(
            TRANSFORMER_ENGINE_ATTENTION, "it chooses between cuDNN's kernel and flash-attn's"
        )
    sdpa = AttentionKernel.sdpa.value
    if world.device is Device.CPU:
        return KernelChoice(sdpa, "the run is on CPUs")
    if not documents and not _gathers_keys(config):
        chosen = (
            "its memory-efficient kernel, because flash kernels compute in 16 bits"
            if config.precision.name is Precision.fp32
            else "cuDNN's kernel on Hopper and Blackwell, elsewhere its flash kernel"
        )
        return KernelChoice(sdpa, f"torch chooses {chosen}")
    obstacles = []
    for kernel, reason in (
        (AttentionKernel.flash, "each context rank computes causal attention on prefixes of the keys"),
        (AttentionKernel.flex, "a block mask instead of a mask of all pairs of tokens"),
    ):
        obstacle = find_obstacle(kernel, config, world, shape)
        if obstacle is None:
            return KernelChoice(kernel.value, reason)
        obstacles.append(obstacle)
    return KernelChoice(sdpa, f"with a mask of all pairs of tokens, because {obstacles[-1].rule}")


def find_obstacle(
    kernel: AttentionKernel, config: RunConfig, world: World, shape: ModelShape | None
) -> AttentionObstacle | None:
    """Return why the run of a family's model cannot use ``kernel``; None if it can."""
    on_gpu = world.device is Device.CUDA
    dropout = shape is not None and shape.dropout > 0
    if kernel is AttentionKernel.flash:
        gpu = find_gpu(world.gpu)
        if config.data.documents is DocumentMasking.separate:
            return AttentionObstacle(
                "data.documents",
                "flash kernels take no mask",
                "write model.attention=flex on GPUs, or sdpa on CPUs",
            )
        if on_gpu and config.precision.name is Precision.fp32:
            return AttentionObstacle(
                "precision.name",
                "flash kernels compute in 16 bits",
                "write precision=bf16, or model.attention=sdpa",
            )
        if on_gpu and shape is not None and shape.head_dim > LARGEST_FLASH_HEAD:
            return AttentionObstacle(
                "", f"flash kernels support heads of up to {LARGEST_FLASH_HEAD}", "write model.attention=flex"
            )
        if on_gpu and gpu is not None and not gpu.has_bf16:
            return AttentionObstacle(
                "",
                f"flash kernels need compute capability 8.0, and {world.gpu} has less",
                "write model.attention=sdpa",
            )
        if not on_gpu and dropout:
            return AttentionObstacle(
                "model.dropout",
                "torch's flash kernel for CPUs has no dropout",
                "write model.dropout=0, or model.attention=sdpa",
            )
    if kernel is AttentionKernel.flex:
        if not on_gpu:
            return AttentionObstacle(
                "", "FlexAttention has no backward pass on CPUs", "write model.attention=sdpa"
            )
        if dropout:
            return AttentionObstacle(
                "model.dropout",
                "FlexAttention has no dropout",
                "write model.dropout=0, or model.attention=sdpa",
            )
        for name in lacking(world):
            return AttentionObstacle(
                "",
                f"torch.compile generates FlexAttention's kernels, and {name} is not installed",
                f"{INSTALL[name]}, or write model.attention=sdpa",
            )
    return None


def has_dense_mask(config: RunConfig, attention: str) -> bool:
    """Return whether attention takes a mask of all pairs of tokens, which each rank stores.

    Args:
        attention: the name of the run's choice.
    """
    masked = config.data.documents is DocumentMasking.separate or _gathers_keys(config)
    return masked and attention in (AttentionKernel.sdpa.value, AttentionKernel.eager.value)


def repeats_keys(config: RunConfig, attention: str, device: Device) -> bool:
    """Return whether keys and values are repeated for each query head.

    No fused GPU kernel supports grouped keys with a mask, and in fp32 only torch's memory-efficient kernel is
    left, which does not support them either.
    """
    in_fp32 = device is Device.CUDA and config.precision.name is Precision.fp32
    return (
        attention == AttentionKernel.eager.value
        or has_dense_mask(config, attention)
        or (in_fp32 and attention == AttentionKernel.sdpa.value)
    )


def _gathers_keys(config: RunConfig) -> bool:
    """Return whether a rank has part of the queries and all keys."""
    return config.engine.name is EngineName.megatron and config.parallel.context > 1
