"""An optimizer of the user's own: ``optim=custom optim.target=my.package.Optimizer``.

``trial_steps.py`` finds out on small tensors which states it has and on which layouts it is exact, because no
plan imports the user's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from toolkit.config.optim import OptimConfig
from toolkit.config.schema import EngineName, OffloadDevice, RunConfig
from toolkit.optimizers.base import FP32, OptimizerSpec, RuleViolation, StateLayout

if TYPE_CHECKING:
    import torch


class Custom(OptimizerSpec):
    """The plan counts two fp32 states per element, as Adam has: it does not know the class."""

    name = "custom"

    def states(self, optim: OptimConfig, kind: str = "") -> StateLayout:
        from toolkit.optimizers.trial_steps import run_trial_steps

        return run_trial_steps(optim).states

    def element_bytes(self, optim: OptimConfig, kind: str = "") -> int:
        return 2 * FP32

    def find_violations(self, config: RunConfig) -> Iterator[RuleViolation]:
        if config.optim.target is None:
            yield RuleViolation(
                "optim.target optim.name",
                "optim=custom trains with your own torch.optim.Optimizer",
                "write optim=custom optim.target=my.package.Optimizer, or optim=adamw",
            )
        if config.engine.name is not EngineName.deepspeed:
            return
        if OffloadDevice.nvme in (config.offload.optimizer, config.offload.parameters):
            yield RuleViolation(
                "optim.name offload.optimizer",
                "DeepSpeed writes the states of its own optimizers to NVMe",
                "write offload=cpu, or optim=adamw",
            )
        if config.parallel.expert > 1:
            yield RuleViolation(
                "optim.name parallel.expert",
                "DeepSpeed divides the parameter groups of experts for its own optimizers",
                "write parallel.expert=1, or optim=adamw",
            )

    def create(self, groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
        from toolkit.optimizers.trial_steps import create_custom

        return create_custom(groups, optim)
