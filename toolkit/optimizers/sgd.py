"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.config.optim import OptimConfig, OptimizerKernel
from toolkit.optimizers.base import MOMENTUM, OptimizerSpec, StateLayout

if TYPE_CHECKING:
    import torch


class Sgd(OptimizerSpec):
    name = "sgd"
    settings = frozenset({"momentum"})
    not_on_megatron = None

    def states(self, optim: OptimConfig, kind: str = "") -> StateLayout:
        return StateLayout(tensors=(MOMENTUM,) if optim.momentum else ())

    def deepspeed(self, optim: OptimConfig, kernel: OptimizerKernel) -> dict[str, Any]:
        params = {"lr": optim.lr, "momentum": optim.momentum, "weight_decay": optim.weight_decay}
        return {"type": "SGD", "params": params}

    def megatron(self, optim: OptimConfig) -> dict[str, Any]:
        return {"optimizer": "sgd", "sgd_momentum": optim.momentum}

    def create(self, groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
        import torch

        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
