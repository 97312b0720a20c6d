"""AdamW with 8-bit states (Dettmers et al., 2110.02861), from the package bitsandbytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit.config.optim import OptimConfig
from toolkit.optimizers.base import FP32, STEP, OptimizerSpec, StateLayout

if TYPE_CHECKING:
    import torch

BLOCK = 256  # elements that share a scale
CODES = 256  # values of the code table to which each state of each parameter refers


class Adam8bit(OptimizerSpec):
    """States are quantized in blocks of ``BLOCK`` elements; small parameters have fp32 states.

    A block of a flat partition is not a block of the parameter, so ZeRO 1 to 3 would round differently.
    """

    name = "adam8bit"
    settings = frozenset({"betas", "eps"})
    arguments: ClassVar = {"min_8bit_size": 4096}
    needs_whole_parameters = "it quantizes states in blocks of 256 elements of a parameter"
    package = ("bitsandbytes>=0.49", "bitsandbytes")

    def states(self, optim: OptimConfig, kind: str = "") -> StateLayout:
        whole = ("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2")
        return StateLayout(numbers=(STEP,), whole=whole)

    def parameter_bytes(self, optim: OptimConfig, name: str, shape: Sequence[int]) -> int:
        numel = math.prod(shape)
        if numel < self.merged_arguments(optim)["min_8bit_size"]:
            return 2 * FP32 * numel
        return 2 * (numel + FP32 * -(-numel // BLOCK) + FP32 * CODES)

    def create(self, groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
        from bitsandbytes.optim import AdamW8bit

        first, second = optim.betas
        created: torch.optim.Optimizer = AdamW8bit(
            groups, lr=optim.lr, betas=(first, second), eps=optim.eps, **self.merged_arguments(optim)
        )
        return created
