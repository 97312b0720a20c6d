"""AdamW (Loshchilov and Hutter, 1711.05101)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.config.optim import OptimConfig, OptimizerKernel
from toolkit.optimizers.base import EXP_AVG, EXP_AVG_SQ, STEP, OptimizerSpec, StateLayout

if TYPE_CHECKING:
    import torch

ADAM_STATES = StateLayout(tensors=(EXP_AVG, EXP_AVG_SQ), numbers=(STEP,))


def create_adamw(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    import torch

    first, second = optim.betas
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(first, second), eps=optim.eps)


def deepspeed_adamw(optim: OptimConfig) -> dict[str, Any]:
    """Return DeepSpeed's settings. ``weight_decay`` is the default for groups without their own."""
    return {"lr": optim.lr, "betas": list(optim.betas), "eps": optim.eps, "weight_decay": optim.weight_decay}


class AdamW(OptimizerSpec):
    """On GPUs torch's fused kernel, which needs no compilation, unlike DeepSpeed's FusedAdam."""

    name = "adamw"
    settings = frozenset({"betas", "eps"})
    kernels = frozenset({OptimizerKernel.torch, OptimizerKernel.cpu, OptimizerKernel.fused})
    tested_by_deepspeed = True
    not_on_megatron = None

    def states(self, optim: OptimConfig, kind: str = "") -> StateLayout:
        return ADAM_STATES

    def deepspeed(self, optim: OptimConfig, kernel: OptimizerKernel) -> dict[str, Any]:
        params = deepspeed_adamw(optim)
        if kernel is OptimizerKernel.cpu:
            return {"type": "AdamW", "params": params}  # DeepSpeedCPUAdam, by offload_optimizer
        params["torch_adam"] = True
        if kernel is OptimizerKernel.fused:
            params["fused"] = True
        return {"type": "AdamW", "params": params}

    def megatron(self, optim: OptimConfig) -> dict[str, Any]:
        return {
            "optimizer": "adam",
            "adam_beta1": optim.betas[0],
            "adam_beta2": optim.betas[1],
            "adam_eps": optim.eps,
        }

    def create(self, groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
        return create_adamw(groups, optim)
