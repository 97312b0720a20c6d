"""Adafactor (Shazeer and Stern, 1804.04235) as in ``torch.optim.Adafactor``: factored second moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit.config.optim import OptimConfig
from toolkit.optimizers.base import FP32, STEP, OptimizerSpec, StateLayout

if TYPE_CHECKING:
    import torch


class Adafactor(OptimizerSpec):
    """A matrix [..., rows, columns] has a state [..., rows, 1] and one [..., 1, columns].

    The update is scaled by the root mean square of the whole parameter and of the whole update.
    """

    name = "adafactor"
    arguments: ClassVar = {"beta2_decay": -0.8, "d": 1.0}
    needs_whole_parameters = (
        "it factors moments by rows and columns and scales updates by the norm of whole parameters"
    )

    def states(self, optim: OptimConfig, kind: str = "") -> StateLayout:
        return StateLayout(numbers=(STEP,), whole=("row_var", "col_var", "variance"))

    def parameter_bytes(self, optim: OptimConfig, name: str, shape: Sequence[int]) -> int:
        if len(shape) < 2:
            return FP32 * math.prod(shape)
        *batch, rows, columns = shape
        return FP32 * math.prod(batch) * (rows + columns)

    def create(self, groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
        import torch

        return torch.optim.Adafactor(groups, lr=optim.lr, **self.merged_arguments(optim))
