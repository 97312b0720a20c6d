"""Turn the samples of a step into micro-batches on the device, without making the host wait.

On GPUs tensors are copied from pinned memory, so a copy returns at once, and units are counted before it.
Samples of the toolkit's own tasks and formats are collated and copied by a thread, one or two steps ahead, on
another stream than the one that computes. Otherwise the training thread does it when the step begins: on
CPUs, and for users' tasks and datasets, which may have state or draw random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt
import torch

from toolkit.data.order.prefetch import Prefetch
from toolkit.data.order.stream import rank_positions
from toolkit.engine.protocol import CountedBatch, MicroBatch, Objective
from toolkit.plan.types import Device, RunPlan
from toolkit.train.task import Task

Step = list[CountedBatch]
PendingStep = Callable[[], Step]  # returns a step's micro-batches on the device


def prefetches(plan: RunPlan) -> bool:
    """Return whether a thread prepares micro-batches ahead of the step that needs them."""
    return plan.world.device is Device.CUDA and plan.config.task.target is None


def prepare_batch(
    task: Task, samples: Any, device: torch.device, numbers: npt.NDArray[Any] | None = None
) -> CountedBatch:
    """Collate the samples of a micro-batch, and :func:`move_batch` it to ``device``.

    Args:
        numbers: the places of the samples in the order of the run; None in evaluations.
    """
    task.sample_numbers = numbers
    return move_batch(task, task.collate(samples), device)


def move_batch(task: Objective, batch: MicroBatch, device: torch.device) -> CountedBatch:
    """Count the units of a collated batch and copy it to ``device``.

    A copy to a GPU is in the order of the current stream; the host does not wait for it.
    """
    kind = type(batch) if isinstance(batch, CountedBatch) else CountedBatch
    return kind({name: _move(tensor, device) for name, tensor in batch.items()}, task.units(batch))


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    # torch frees pinned memory only after the copies from it.
    return tensor.pin_memory().to(device, non_blocking=True)


@contextmanager
def pending_steps(
    plan: RunPlan,
    task: Task,
    stream: Iterable[Sequence[Any]],
    device: torch.device,
    *,
    first_step: int,
    data_rank: int,
    prefetch: bool,
) -> Iterator[Iterator[PendingStep]]:
    """Iterate over the steps from ``first_step`` to the run's last.

    Waiting for the iterator is waiting for samples. Nothing is read beyond the last step.

    Args:
        stream: the samples of each step.
        prefetch: take and prepare steps in a thread. The stream must have no state.
    """

    def collate(step: int, samples: Sequence[Any]) -> Step:
        positions = rank_positions(plan.batch, step, data_rank)
        return [
            prepare_batch(task, micro_batch, device, numbers)
            for micro_batch, numbers in zip(samples, positions, strict=True)
        ]

    numbered = zip(range(first_step, plan.config.train.steps), stream, strict=False)
    if not prefetch:
        yield (partial(collate, step, samples) for step, samples in numbered)
        return
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None
    staged = ([_stage(partial(collate, step, samples), copies)] for step, samples in numbered)
    steps: Prefetch[PendingStep] = Prefetch(staged, 1, name="micro-batches")
    try:
        yield steps
    finally:
        steps.close()


@dataclass(frozen=True, slots=True)
class _StagedStep:
    """Micro-batches that are being copied on another stream; ``copied`` is recorded after the copies."""

    batches: Step
    copied: torch.cuda.Event

    def __call__(self) -> Step:
        """Let the current stream wait for the copies; the host does not."""
        current = torch.cuda.current_stream()
        current.wait_event(self.copied)
        for batch in self.batches:
            for tensor in batch.values():
                # The memory belongs to the other stream, which would use it again when the tensor is freed.
                tensor.record_stream(current)
        return self.batches


def _stage(collate: Callable[[], Step], copies: torch.cuda.Stream | None) -> PendingStep:
    if copies is None:
        batches = collate()
        return lambda: batches
    torch.cuda.set_device(copies.device)  # a new thread starts on GPU 0
    with torch.cuda.stream(copies):
        return _StagedStep(collate(), copies.record_event())
