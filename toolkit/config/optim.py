"""The sections ``optim`` and ``schedule`` of the schema. The string below a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from toolkit.config.checks import at_least, check
from toolkit.config.numbers import parse_count, parse_percent


class OptimizerKernel(Enum):
    auto = "auto"
    torch = "torch"
    cpu = "cpu"
    fused = "fused"


class LrScaling(Enum):
    none = "none"
    linear = "linear"
    sqrt = "sqrt"


class ScheduleName(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"
    custom = "custom"


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    name: str = "adamw"
    """The optimizer, usually chosen with its defaults as an option of this group: optim=adamw."""
    target: str | None = None
    """For optim=custom: dotted path of your own torch.optim.Optimizer, such as my.package.Optimizer. It is
    called with parameter groups, lr and optim.arguments.
    """
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, each given as +optim.arguments.NAME=VALUE."""
    kernel: OptimizerKernel = OptimizerKernel.auto
    """auto, torch, cpu (DeepSpeed's vectorised CPU kernel) or fused (one CUDA kernel)."""
    lr: float = 3e-4
    """Peak learning rate, at the batch size lr_reference_batch if lr_scaling is set."""
    weight_decay: float = 0.1
    """Weight decay, never applied to one-dimensional tensors. It is decoupled (weights shrink by lr x
    weight_decay), but SGD adds weight_decay x weight to the gradient, before momentum. In every engine, after
    clipping.
    """
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's decay rates of the averages of the gradient and the squared gradient."""
    eps: float = 1e-8
    """Adam's epsilon."""
    momentum: float = 0.0
    """Momentum of sgd and muon."""
    clip: float = 1.0
    """Maximum global gradient norm; 0: no clipping."""
    lr_scaling: LrScaling = LrScaling.none
    """How lr scales with the global batch: none, linear or sqrt of global_batch / lr_reference_batch."""
    lr_reference_batch: int | None = None
    """The global batch for which lr was chosen, for lr_scaling."""

    def __post_init__(self) -> None:
        at_least(
            "optim",
            0,
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            clip=self.clip,
            momentum=self.momentum,
        )
        ok = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(
            ok, "optim.betas", self.betas, "Adam takes two factors in [0, 1)", "write optim.betas=[0.9,0.95]"
        )


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    name: ScheduleName = ScheduleName.cosine
    """constant, linear, cosine, wsd (warm-up, stable, decay), or custom (schedule.target)."""
    target: str | None = None
    """For schedule=custom: dotted path of a function of (step, samples) that returns the factor of optim.lr,
    such as my.package.factor. The first step is step 0, before which 0 samples were consumed.
    """
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the function, each given as +schedule.arguments.NAME=VALUE."""
    warmup: int | str = 0
    """Steps of linear warm-up from 0, or a share of the run's steps: 3%."""
    decay: int | None = None
    """Steps of decay: after warm-up for linear and cosine (null: to the end of the run), the last steps for
    wsd.
    """
    min_lr: float = 0.0
    """The learning rate after decay."""

    def __post_init__(self) -> None:
        if isinstance(self.warmup, str) and parse_percent(self.warmup) is None:
            steps = parse_count(self.warmup)
            check(
                steps is not None,
                "schedule.warmup",
                self.warmup,
                "a warm-up is a number of steps, or a share of the run from 0% to 100%",
                "write schedule.warmup=100 or schedule.warmup=3%",
            )
            self.warmup = int(steps or 0)
        if not isinstance(self.warmup, str):
            at_least("schedule", 0, warmup=self.warmup)
        at_least("schedule", 0, min_lr=self.min_lr)
        at_least("schedule", 1, decay=self.decay)

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up. In a plan's configuration a share is resolved: plan/train_steps.py."""
        assert not isinstance(self.warmup, str), f"the plan resolves schedule.warmup={self.warmup}"
        return self.warmup
