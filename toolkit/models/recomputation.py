"""Recompute activations in the backward pass, for models of transformers: ``train.activation_checkpointing``.

Blocks are recomputed by ``torch.utils.checkpoint`` without reentrant autograd, which restores the random
state, so that dropout draws the same masks. transformers calls it in the ``forward`` of each block; a
compiled block includes the call, and torch.compile then decides by the same policy (``CheckpointPolicy``)
inside its graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.config.kernels import CompileMode
from toolkit.config.schema import EngineName, OffloadDevice
from toolkit.models.activation_offload import store_inputs_on_host
from toolkit.plan.types import RunPlan

# Operators whose results selective recomputation stores: matrix products and fused attention. Everything else
# (norms, rotations, activation functions, dropout, residual sums) is limited by memory bandwidth and cheap to
# repeat. torchtitan's policy "op" makes the same distinction, but stores only every second product.
STORED_OPERATORS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_scaled_mm",
        "aten::_scaled_mm_v2",
        "aten::_grouped_mm",
        "aten::_scaled_grouped_mm",
        "transformers::grouped_mm_fallback",  # experts on CPUs
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flex_attention",
    }
)


def enable_recomputation(model: Any, plan: RunPlan) -> None:
    """Recompute the blocks of ``model``, a ``PreTrainedModel``, as the plan's configuration demands."""
    recomputation = plan.config.train.recomputation
    if not (recomputation.full or recomputation.selective):
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if recomputation.selective:
        # ZeRO 3 gathers a compiled block as a whole, before its forward.
        hooks = plan.config.engine.name is EngineName.deepspeed and plan.config.zero.stage == 3
        hooks = hooks and plan.kernels.compile.name == CompileMode.none.value
        options["context_fn"] = _contexts_without_hooks if hooks else _contexts
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its name in earlier releases of transformers
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for number, block in enumerate(blocks(model)):
        block.gradient_checkpointing = number % recomputation.every == 0
        if block.gradient_checkpointing and plan.config.offload.activations is OffloadDevice.cpu:
            store_inputs_on_host(block)


def blocks(model: nn.Module) -> list[Any]:
    """Return the blocks in order. Every module that transformers can recompute is one, also in encoders."""
    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the forward pass of a block and of its recomputation."""
    found: tuple[Any, Any] = create_selective_checkpoint_contexts(store_products)
    return found


def _contexts_without_hooks() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward, recompute = _contexts()
    return _StoredOperators(forward), _StoredOperators(recompute)


class _StoredOperators(TorchDispatchMode):
    """``mode`` for the operators that are stored only.

    torch counts the calls of every operator and expects as many in the recomputation. ZeRO 3 gathers
    parameters in hooks of the block's modules, ahead of their use, so that the two differ.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let FlexAttention be compiled inside a block, as torch's modes do."""
        return True

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in STORED_OPERATORS:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def store_products(
    context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any
) -> CheckpointPolicy:
    """Return the policy of selective recomputation."""
    stored = operator.name() in STORED_OPERATORS
    return CheckpointPolicy.MUST_SAVE if stored else CheckpointPolicy.PREFER_RECOMPUTE
