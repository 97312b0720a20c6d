"""Work around defects of Megatron-core 0.16 that occur without Transformer Engine.

Each docstring explains the defect.

Megatron-core's own checkpointing is not patched, because the toolkit does not use it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

WEIGHT_GRADIENT_KERNELS = "fused_weight_gradient_mlp_cuda"  # the name of Apex's extension module


@contextmanager
def without_wandb() -> Iterator[None]:
    """Hide W&B while Megatron-core is imported.

    Its modules for inference import W&B if it is installed, although only inference logs to it. That delays
    each rank's start and makes two temporary folders, which stay behind if the rank is killed.
    """
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = cast(Any, None)  # an import raises ModuleNotFoundError, as if it were absent
    try:
        yield
    finally:
        del sys.modules["wandb"]


@functools.cache
def apply() -> None:
    bind_general_gemm()
    default_fp8_to_none()
    shard_any_optimizer()
    compute_norms_on_the_device()
    bind_weight_gradient_kernels()


def bind_general_gemm() -> None:
    """The router's forward reads a name that is bound only with Transformer Engine."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)


def default_fp8_to_none() -> None:
    """``fp8=False`` counts as "not None", so that recomputed norms need Transformer Engine's fp8 state."""
    import megatron.core.tensor_parallel.random as random

    if not random.HAVE_TE:
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def shard_any_optimizer() -> None:
    """The distributed optimizer asserts an Adam because of its own checkpoints, but supports others."""
    import torch
    from megatron.core.optimizer import distrib_optimizer

    distrib_optimizer.Adam = torch.optim.Optimizer  # used only in that assertion


def compute_norms_on_the_device() -> None:
    """Without Transformer Engine and Apex, the gradient norm reads the norm of each parameter on the host,
    and clipping launches two kernels for each parameter.

    The replacements compute the same on the device, with kernels over lists of tensors.
    """
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm_of_tensors
        clip_grads.multi_tensor_scale_impl = optimizer.multi_tensor_scale_impl = _scale_tensors


def _norm_of_tensors(
    _chunk_size: int, _overflow: torch.Tensor, lists: list[list[torch.Tensor]], _per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """The 2-norm of all tensors as a tensor [1], in the interface of Apex's ``multi_tensor_l2norm``."""
    from torch.nn.utils import get_total_norm

    return get_total_norm(lists[0]).reshape(1), None


def _scale_tensors(
    _chunk_size: int, _overflow: torch.Tensor, lists: list[list[torch.Tensor]], scale: float
) -> None:
    """Write the tensors of the first list times ``scale`` to the second, which may be the same list."""
    import torch

    source, target = lists
    if source is not target:
        torch._foreach_copy_(target, source)
    if scale != 1.0:
        torch._foreach_mul_(target, scale)


def bind_weight_gradient_kernels() -> None:
    """Only Apex has the kernels that ``gradient_accumulation_fusion`` calls in Megatron-core's own linear
    layers, among them the output layer of models of Transformer Engine.

    ``torch.addmm`` does the same with cuBLAS. A module with the name of Apex's extension provides it.
    """
    from megatron.core.tensor_parallel import layers

    if layers._grad_accum_fusion_available:
        return
    kernels: Any = ModuleType(WEIGHT_GRADIENT_KERNELS)
    kernels.wgrad_gemm_accum_fp32 = add_weight_gradient
    sys.modules[WEIGHT_GRADIENT_KERNELS] = kernels  # imported where embedding gradients are deferred
    layers.fused_weight_gradient_mlp_cuda = kernels
    layers._grad_accum_fusion_available = True


def add_weight_gradient(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add the gradient of a linear layer's weight to ``main_grad`` within the matrix product.

    With 16-bit factors the product is summed and stored in fp32, which torch implements on GPUs only (since
    2.10: https://github.com/pytorch/pytorch/pull/167931).

    Args:
        inputs: [tokens, in].
        grad_output: [tokens, out].
        main_grad: fp32 [out, in].
    """
    import torch

    if inputs.dtype is main_grad.dtype:
        main_grad.addmm_(grad_output.t(), inputs)
    else:
        torch.addmm(main_grad, grad_output.t(), inputs, out_dtype=main_grad.dtype, out=main_grad)
