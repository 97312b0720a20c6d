"""The interface of an engine: whole steps, because pipelines have no separate forward and backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from toolkit.checkpoint.shard import Shard, StateReader
from toolkit.plan.types import Device

# Tensors of one micro-batch by name. In the text task: ``input_ids`` and ``labels``, int64 [micro_batch,
# sequence]; labels are already shifted, and -100 where masked. With data.documents=separate also
# ``position_ids`` of the same shape, which restart at 0 with each document; attention does not cross
# documents.
MicroBatch = Mapping[str, torch.Tensor]

LOSS = "loss"


class CountedBatch(dict[str, torch.Tensor]):
    """A micro-batch whose units were counted in host memory, before its tensors moved to the device.

    Counting on the device would make the host wait for it in every micro-batch.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], units: int) -> None:
        super().__init__(tensors)
        self.units = units


class Objective(Protocol):
    """Computes the loss of a micro-batch, so that engines are independent of the kind of samples."""

    def loss_sum(self, model: nn.Module, batch: MicroBatch) -> torch.Tensor:
        """Return the loss summed over the micro-batch's units (tokens of text): a differentiable fp32
        scalar.
        """

    def eval_sums(self, model: nn.Module, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return sums over all units for evaluation: ``loss`` and other metrics, always under the same
        names.
        """
        return {LOSS: self.loss_sum(model, batch)}

    def units(self, batch: MicroBatch) -> int:
        """Return the number of unmasked units. The loss is divided by their sum over the global batch."""


def count_units(objective: Objective, batch: MicroBatch) -> int:
    """Return the units of a micro-batch: those of a ``CountedBatch`` without waiting for the device."""
    return batch.units if isinstance(batch, CountedBatch) else objective.units(batch)


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of one optimizer step."""

    step: int  # from 0
    lr: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step over all ranks; equal on all ranks."""

    loss: float  # sum of the losses of the global batch / its unmasked units
    grad_norm: float  # before clipping; infinite if a gradient is infinite or NaN
    tokens: int  # unmasked units of the global batch
    # The gradient norm is not finite: samples are consumed, but weights, moments and the optimizer's step
    # count do not change.
    skipped: bool = False
    loss_scale: float = 1.0

    @property
    def nonfinite(self) -> bool:
        """Whether the loss or the gradient norm is infinite or NaN.

        fp16 overflows do not count as long as the loss scale can decrease further.
        """
        scaled = self.skipped and self.loss_scale > 1
        return not math.isfinite(self.loss) or (not math.isfinite(self.grad_norm) and not scaled)


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Sums over all ranks, so that results of several calls can be added.

    ``others`` has the metrics of ``Objective.eval_sums`` other than the loss.
    """

    loss_sum: float
    tokens: int
    others: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """Tensors of this rank that other ranks store too, and that must be bitwise equal.

    Attributes:
        kind: what the tensors are, for messages. A rank belongs to at most one set of each kind.
        ranks: the ranks that store them, including this one, in increasing order.
        tensors: by name; the same names in the same order on all of ``ranks``.
    """

    kind: str
    ranks: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]


class Engine(Protocol):
    device: torch.device

    def train_step(self, micro_batches: Sequence[MicroBatch], settings: StepSettings) -> StepResult:
        """Run one optimizer step over this rank's micro-batches of the global batch. Collective.

        A step whose gradient norm is not finite is skipped in any precision: see ``StepResult.skipped``.
        Dropout is seeded by (seed, step, coordinates), so a resumed run repeats it in the same layout.
        """

    def eval_step(self, micro_batches: Sequence[MicroBatch]) -> EvalResult:
        """Compute losses without gradients. Random state and gradients do not change. Collective."""

    def forward_hashes(self, micro_batch: MicroBatch) -> dict[str, int]:
        """Compute the loss of one micro-batch without gradients and without dropout, and return hashes of
        what this rank computed: of the outputs of its modules, in the order of their calls, and the loss.

        Ranks that differ only in their data coordinate return equal hashes of the same micro-batch. Weights,
        buffers, random state and gradients do not change. Collective; waits for the device.
        """

    def shards(self) -> list[Shard]:
        """Views of this rank's weights, master weights and optimizer tensors, for saving and loading."""

    def replica_sets(self) -> list[ReplicaSet]:
        """Return the tensors that this rank shares with others after a step.

        Collective, because an engine may have to wait for weights that are still being gathered.
        """

    def scalars(self) -> dict[str, object]:
        """State other than tensors of parameter shape, in JSON types: optimizer step, loss scaler."""

    def load(self, reader: StateReader) -> None:
        """Load weights, and the optimizer state if the reader has it. Collective.

        Raises:
            CheckpointError: the reader lacks a weight, or has the state of another optimizer.
        """

    def close(self) -> None:
        """Free the engine's memory and its process groups. The default process group stays."""


def rank_device(device: Device, local_rank: int) -> torch.device:
    """Return the device of a rank: its own GPU, or the CPU."""
    return torch.device("cuda", local_rank) if device is Device.CUDA else torch.device("cpu")
