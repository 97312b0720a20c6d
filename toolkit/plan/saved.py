"""Bytes of one checkpoint: weights, master weights beside 16 bits, and the optimizer's tensors, each once whatever the layout."""

from __future__ import annotations

from toolkit.plan.memory import FP32, element_bytes, optimizer_groups
from toolkit.plan.types import RunPlan


def checkpoint_bytes(plan: RunPlan) -> int | None:
    """Tensors alone, which is all but some kilobytes. None for ``model.target``, whose parameters are known to its own code only."""
    if not plan.parameters:
        return None
    weight = element_bytes(plan.config.precision.name)
    master = FP32 if weight < FP32 else 0
    return sum(
        group.numel * (weight + master + group.state_bytes)
        for group in optimizer_groups(plan.parameters, plan.config.optim, 1)
    )
