"""Muon (K. Jordan, https://kellerjordan.github.io/posts/muon): momentum whose matrices are made orthogonal.

The same arithmetic as DeepSpeed's default (Newton-Schulz iterated on the Gram matrix), so that the engines can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

STEPS = 5
RESTART = (
    2  # the iteration on the Gram matrix alone loses precision; after this many steps it starts from X again
)
A, B, C = (
    3.4445,
    -4.7750,
    2.0315,
)  # the quintic a x + b x^3 + c x^5, as steep at 0 as keeps singular values near 1


class Muon(torch.optim.Optimizer):
    """Two phases, as under ZeRO 1 to 3: the gradients become the updates, and only then are norm and clipping computed.

    So with ``optim.clip`` the norm and the clipping are of the updates, and clipping acts on the learning rate.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def prepare(self) -> None:
        """Turn each gradient into its update. Call it for finite gradients only: it moves the momentum."""
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
    """The update of a matrix [..., rows, columns]; ``momentum`` is advanced in place, Nesterov's look-ahead is taken."""
    momentum.lerp_(gradient, 1 - beta)
    direction = orthogonalize(gradient.lerp(momentum, beta))
    rows, columns = gradient.shape[-2:]
    return (direction * math.sqrt(max(1.0, rows / columns))).to(gradient.dtype)


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """About ``U V^T`` of ``matrix = U S V^T``: its singular values are brought to about 1.

    Iterating on ``R = X X^T`` instead of ``X`` saves work where X is wide (https://tridao.me/blog/2026/gram-newton-schulz);
    a square X has nothing to save and is iterated itself.
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
    """The matrix P for which ``P x`` is ``steps`` iterations of ``x``, from ``gram`` = ``x x^T``."""
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
    """fp16 where the device computes in it; the matrix is normalised, so its range suffices and its precision is wanted."""
    if device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return torch.float16
    return torch.float32
