"""Lion (Chen et al., 2302.06675): the sign of an interpolation between momentum and gradient."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from toolkit.config.optim import OptimConfig
from toolkit.optimizers.base import EXP_AVG, OptimizerSpec, StateLayout

if TYPE_CHECKING:
    import torch


class Lion(OptimizerSpec):
    """DeepSpeed's own Lion is not used: its CPU kernel takes the sign of zero for one, and so moves weights
    without a gradient, such as the embeddings of tokens that a batch does not have (2e-2 of the loss after 12
    steps).
    """

    name = "lion"
    settings = frozenset({"betas"})

    def states(self, optim: OptimConfig, kind: str = "") -> StateLayout:
        return StateLayout(tensors=(EXP_AVG,))

    def create(self, groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
        first, second = optim.betas
        return _lion_class()(groups, lr=optim.lr, betas=(first, second))


@cache
def _lion_class() -> Any:
    """Return the torch optimizer; torch is imported here, because plans read this file."""
    import torch

    class LionOptimizer(torch.optim.Optimizer):
        def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float]) -> None:
            super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's closures give a loss
            """Decay the weights, then move each by ``lr`` against the sign of the interpolation."""
            for group in self.param_groups:
                first, second = group["betas"]
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if not state:
                        state[EXP_AVG] = torch.zeros_like(parameter)
                    average = state[EXP_AVG]
                    direction = average.lerp(parameter.grad, 1 - first).sign_()
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(direction, alpha=-group["lr"])
                    average.lerp_(parameter.grad, 1 - second)

    return LionOptimizer
