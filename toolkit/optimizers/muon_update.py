"""Muon (K. Jordan, https://kellerjordan.github.io/posts/muon): momentum with orthogonalized update matrices.

The arithmetic is that of DeepSpeed's default (Newton-Schulz iterations on the Gram matrix), so that engines
agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

STEPS = 5
RESTART = 2  # iterating on the Gram matrix loses precision, so it is recomputed from X after this many steps
A, B, C = 3.4445, -4.7750, 2.0315  # the quintic a x + b x^3 + c x^5


class MuonOptimizer(torch.optim.Optimizer):
    """Muon in two phases, as under ZeRO 1 to 3.

    :meth:`transform_gradients` computes updates and :meth:`step` applies them, so the gradient norm and
    clipping in between act on the updates.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "use_muon": True})

    @torch.no_grad()
    def transform_gradients(self) -> None:
        """Replace gradients, which must be finite, by updates. This changes the momentum."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                matrix.grad = muon_update(matrix.grad, state["momentum_buffer"], group["momentum"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's takes closures that give a loss
        for group in self.param_groups:
            for matrix in group["params"]:
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(matrix.grad, alpha=-group["lr"])


def muon_update(gradient: torch.Tensor, momentum: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the Nesterov update of a matrix [..., rows, columns]; ``momentum`` is updated in place."""
    momentum.lerp_(gradient, 1 - beta)
    direction = orthogonalize(gradient.lerp(momentum, beta))
    rows, columns = gradient.shape[-2:]
    return (direction * math.sqrt(max(1.0, rows / columns))).to(gradient.dtype)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Approximate ``U V^T`` of ``matrix = U S V^T``.

    For a wide X, iterating on ``X X^T`` instead of X saves work
    (https://tridao.me/blog/2026/gram-newton-schulz).
    """
    x = matrix.mT if matrix.size(-2) > matrix.size(-1) else matrix
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(_compute_dtype(matrix.device))
    x = _iterate(x) if x.size(-2) == x.size(-1) else _iterate_gram(x)
    return x.mT if matrix.size(-2) > matrix.size(-1) else x


def _iterate(x: torch.Tensor) -> torch.Tensor:
    for _ in range(STEPS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x


def _iterate_gram(x: torch.Tensor) -> torch.Tensor:
    for steps in (RESTART, STEPS - RESTART):
        x = _product(x @ x.mT, steps) @ x
    return x


def _product(gram: torch.Tensor, steps: int) -> torch.Tensor:
    """Return P such that ``P x`` equals ``steps`` iterations on ``x``, given ``gram`` = ``x x^T``."""
    polynomial = B * gram + C * gram @ gram
    product = polynomial.clone()
    product.diagonal(dim1=-2, dim2=-1).add_(A)
    for _ in range(steps - 1):
        left = A * gram + polynomial @ gram
        gram = A * left + polynomial @ left
        polynomial = B * gram + C * gram @ gram
        product = A * product + polynomial @ product
    return product


def _compute_dtype(device: torch.device) -> torch.dtype:
    """fp16 if the device supports it: the matrix is normalized, so the range suffices."""
    if device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return torch.float16
    return torch.float32
