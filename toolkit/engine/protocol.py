"""The one seam to an engine. It is shaped like a step because pipeline engines forbid separate forward, backward, step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from toolkit.checkpoint.shard import Shard, StateReader

# Tensors of one micro-batch by name; in the text task ``input_ids`` and ``labels``, both int64 [micro_batch, sequence];
# ``labels`` are already shifted, -100 where masked. Where documents are kept apart also ``position_ids``, int64 of the same shape: 0 at
# the first token of each document, and attention stays inside it.
MicroBatch = Mapping[str, torch.Tensor]


LOSS = "loss"


class Objective(Protocol):
    """What a model is trained for: the seam that keeps text, images and other samples out of the engines."""

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """Sum of the losses of the micro-batch's units (tokens, in text): a differentiable fp32 scalar."""

    def eval_sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """What an evaluation adds up over all units: ``loss``, and what else tells how good a model is; always the same names."""
        return {LOSS: self.loss_sum(model, batch)}

    def units(self, batch: MicroBatch) -> int:
        """How many unmasked units the micro-batch has; summed over the global batch they divide the loss."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What the loop decides for one optimizer step."""

    step: int  # from 0
    lr: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """Global over all ranks, equal on all ranks."""

    loss: float  # sum of token losses of the global batch / its unmasked tokens
    grad_norm: float  # before clipping; infinite if a gradient is infinite or NaN
    tokens: int  # unmasked units, whatever the task's are
    # The gradient norm is not finite: the step's samples are consumed, but weights, moments and the optimizer's count of
    # steps are unchanged.
    skipped: bool = False
    loss_scale: float = 1.0

    @property
    def nonfinite(self) -> bool:
        """Whether the loss or the gradient norm is infinite or NaN.

        fp16's overflows do not count as long as the loss scale can fall further, because a smaller scale is the answer
        to them.
        """
        scaled = self.skipped and self.loss_scale > 1
        return not math.isfinite(self.loss) or (not math.isfinite(self.grad_norm) and not scaled)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Sums over all ranks, so that several calls can be added up. ``others``: of ``Objective.eval_sums`` beside the loss."""

    loss_sum: float
    tokens: int
    others: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Copies:
    """Tensors of this rank that others hold too, equal to the bit while nothing is wrong.

    Attributes:
        what: for people. Of one name, no rank is in two sets of ranks.
        ranks: that hold them, this one among them, in rising order.
        tensors: by name; the same names in the same order on all of ``ranks``.
    """

    what: str
    ranks: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]


class Engine(Protocol):
    device: torch.device

    def train_step(self, micro_batches: Sequence[MicroBatch], settings: StepSettings) -> StepResult:
        """One optimizer step over this rank's micro-batches of the global batch (all ranks call it together).

        Every engine skips a step whose gradient norm is not finite, in any precision: see ``StepResult.skipped``.

        Dropout is reseeded from (seed, step, coordinates), so a resumed step repeats itself in the same layout.
        """

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Losses without gradients; leaves random state and gradients as they were."""

    def shards(self) -> list[Shard]:
        """Weights, master weights and optimizer tensors that this rank holds: views for saving and loading in place."""

    def copies(self) -> list[Copies]:
        """What this rank holds in common with others, as it is after a step. All ranks call it together: an engine may have to wait for
        weights that are still on their way."""

    def scalars(self) -> dict[str, object]:
        """The engine's own state that is not a tensor of parameter shape: optimizer step, loss scaler. Plain JSON types."""

    def load(self, reader: StateReader) -> None:
        """Take over weights, and the optimizer's state if the reader has it; then engine and weights are consistent.

        Raises:
            CheckpointError: the reader lacks a weight, or has another optimizer's state.
        """

    def close(self) -> None:
        """Free what the engine holds. The process group belongs to who made it."""
