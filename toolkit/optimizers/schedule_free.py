"""Schedule-free AdamW (Defazio et al., 2405.15682), from the package schedulefree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit.config.optim import OptimConfig, ScheduleName
from toolkit.config.schema import RunConfig
from toolkit.optimizers.base import EXP_AVG_SQ, OptimizerSpec, RuleViolation, StateLayout

if TYPE_CHECKING:
    import torch


class ScheduleFree(OptimizerSpec):
    """Gradients are taken at an interpolation ``y`` of the iterate ``z`` and its average ``x``.

    Evaluation uses ``x``. A checkpoint has ``y`` as the weight, from which training continues.
    """

    name = "schedule_free"
    settings = frozenset({"betas", "eps"})
    arguments: ClassVar = {"warmup_steps": 0, "r": 0.0, "weight_lr_power": 2.0}
    needs_whole_parameters = (
        "it evaluates with an average of the weights, which ZeRO 1 to 3 cannot exchange for them"
    )
    package = ("schedulefree>=1.4", "schedulefree")

    def states(self, optim: OptimConfig, kind: str = "") -> StateLayout:
        return StateLayout(tensors=("z", EXP_AVG_SQ), group_numbers=("k", "weight_sum", "lr_max"))

    def find_violations(self, config: RunConfig) -> Iterator[RuleViolation]:
        if config.optim.betas[0] == 0:
            yield RuleViolation(
                "optim.betas optim.name",
                "the first beta is the interpolation between iterate and average, and is not 0",
                "write optim.betas=[0.9,0.95]",
            )
        if config.checkpoint.export:
            yield RuleViolation(
                "checkpoint.export optim.name",
                "a checkpoint has the weights at which gradients are taken, and an export should have their "
                "average",
                "leave out checkpoint.export, or write optim=adamw",
            )
        if config.schedule.name is not ScheduleName.constant:
            yield RuleViolation(
                "schedule.name optim.name",
                "averaging replaces the decay of the learning rate",
                "write schedule=constant",
                warning=True,
            )

    def create(self, groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
        from schedulefree import AdamWScheduleFree

        first, second = optim.betas
        created: Any = AdamWScheduleFree(
            groups, lr=optim.lr, betas=(first, second), eps=optim.eps, **self.merged_arguments(optim)
        )
        created.train()
        return created
