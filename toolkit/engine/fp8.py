"""fp8 matrix products in the linear layers of decoder layers: ``precision=fp8``.

Rows are scaled dynamically to the largest value of float8_e4m3 (Micikevicius et al., 2209.05433): the tokens
of activations and gradients, and the output channels of weights. The output and the gradient of the input are
fp8 products. The gradient of the weight, a sum over tokens, is a bf16 product, because it is the most
sensitive: so does torchao's recipe ``rowwise_with_gw_hp``, with tensorwise scales in the backward pass.

Weights stay bf16 parameters under their names, so checkpoints are those of bf16. Embeddings, norms,
attention, routers and the output layer compute in bf16.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import ScalingType, scaled_mm

from toolkit.models.layers import find_layers
from toolkit.plan.types import RunPlan

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SMALLEST_MAXIMUM = 1e-12  # of a row, so that a row of zeros has a scale
MULTIPLE = 16  # of both sizes of a weight, for the tensor cores


def use_fp8_linears(module: nn.Module, plan: RunPlan) -> None:
    """Let the linear layers of ``module``'s decoder layers multiply in fp8, if the plan demands it."""
    if not plan.config.precision.fp8:
        return
    for layer in find_layers(module):
        for part in layer.modules():
            if type(part) is nn.Linear and not (part.in_features % MULTIPLE or part.out_features % MULTIPLE):
                part.forward = MethodType(_linear, part)  # type: ignore[method-assign]


def _linear(layer: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    rows = _Fp8Linear.apply(hidden.flatten(0, -2), layer.weight)
    output = rows.unflatten(0, hidden.shape[:-1])
    return output if layer.bias is None else output + layer.bias


class _Fp8Linear(torch.autograd.Function):
    """``rows @ weight.T`` for ``rows`` [rows, in] and ``weight`` [out, in], both bf16."""

    @staticmethod
    def forward(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return multiply(rows, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weight = ctx.saved_tensors
        return multiply(gradient, weight.t()), gradient.t() @ rows


def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right.T`` in fp8 with a scale per row: [m, k], [n, k] -> [m, n] in ``left``'s dtype."""
    (a, a_scale), (b, b_scale) = quantize(left), quantize(right)
    return scaled_mm(
        a, b.t(), a_scale, ScalingType.RowWise, b_scale.t(), ScalingType.RowWise, output_dtype=left.dtype
    )


def quantize(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp8 values [m, k], contiguous, and fp32 scales [m, 1] by which they are multiplied."""
    whole = matrix.float()
    scale = whole.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_MAXIMUM) / LARGEST
    return (whole / scale).clamp(-LARGEST, LARGEST).to(FP8).contiguous(), scale
