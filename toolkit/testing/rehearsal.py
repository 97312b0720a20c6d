"""Rehearse a run on GPUs without one: a plan for CUDA is carried out on a fake device (``fake_cuda.py``).

Everything is built, loaded and trained for some steps as on a machine with GPUs: engine, initial weights,
collation, forward, backward, update, saving, resuming, evaluation. Only ``torch.compile`` is off, and
FlexAttention and flash attention cannot be run (``model.attention=sdpa`` can). A parameter, buffer or input
that stays on the CPU fails with the names of the operator and the tensor. The values are real, so the result
can be compared with that of a run on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.config.data import DocumentMasking
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.hashing import hash_tensors
from toolkit.engine.protocol import Engine, EvalResult, MicroBatch, StepResult, StepSettings
from toolkit.families import FAMILIES
from toolkit.plan.schedule import learning_rate
from toolkit.plan.types import Device, RunPlan
from toolkit.testing import fake_cuda
from toolkit.testing.tiny import END_OF_TEXT, micro_batches
from toolkit.train.micro_batches import move_batch
from toolkit.train.nonfinite import all_finite
from toolkit.train.task import Task, text_task

STEPS = 3


@dataclass(frozen=True)
class Rehearsed:
    """The results of a rank's steps and evaluation."""

    steps: tuple[StepResult, ...]
    evaluation: EvalResult


def rehearse(
    rank: int,
    ranks: int,
    plan: RunPlan,
    folder: Path | None = None,
    task: Task | None = None,
    move: Callable[[Task, MicroBatch, torch.device], MicroBatch] = move_batch,
) -> Rehearsed:
    """Carry out a plan for GPUs on this rank of ``testing/dist.py``.

    The process must not be reused afterwards.

    Args:
        folder: for a checkpoint, from which training continues before the last step; None: without one.
        task, move: replace the plan's task and the function of the loop that moves a micro-batch to the
            device, for runs with deliberate mistakes.

    Raises:
        WrongDevice: a tensor is on the CPU that has to be on the GPU.
    """
    assert plan.world.device is Device.CUDA, "the plan is one for GPUs"
    assert ranks == plan.axes.size, f"{ranks} ranks for a plan of {plan.axes.size}"
    prepare_process(rank)
    separate = plan.config.data.documents is DocumentMasking.separate
    task = task or text_task(plan, END_OF_TEXT if separate else None)

    def samples(step: int) -> list[MicroBatch]:
        return [move(task, task.collate(rows), engine.device) for rows in _rows(plan, step, rank)]

    engine = build_engine(plan, task, rank=rank, local_rank=rank)
    try:
        engine.load(open_initial_weights(plan))
        steps = []
        for step in range(STEPS):
            if folder is not None and step == STEPS - 1:
                _save(engine, plan, step, folder, rank, ranks)
                engine.load(open_reader(folder))
            steps.append(engine.train_step(samples(step), StepSettings(step, learning_rate(plan, step))))
        for copies in engine.replica_sets():
            hash_tensors(list(copies.tensors.values()), engine.device)
        return Rehearsed(tuple(steps), engine.eval_step(samples(STEPS)))
    finally:
        engine.close()


_prepared = False


def prepare_process(rank: int) -> None:
    """Give this process a fake GPU; engines that were imported for the CPU use it, too."""
    global _prepared
    if _prepared:
        return
    _prepared = True
    fake_cuda.install(rank)
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    set_accelerator(CUDA_Accelerator())


def _save(engine: Engine, plan: RunPlan, step: int, folder: Path, rank: int, ranks: int) -> None:
    """Save as a run does in the background, by way of host memory."""
    assert plan.shape is not None, "checkpoints here are of families"
    shards = engine.shards()
    assert all_finite(shard.data for shard in shards), "the state is finite"
    CheckpointStore(folder).save(
        step,
        shards,
        engine.scalars(),
        namespace=FAMILIES[plan.shape.family].namespace,
        rank=rank,
        ranks=ranks,
        attempt=1,
        background=True,
    ).wait()


def _rows(plan: RunPlan, step: int, rank: int) -> list[npt.NDArray[np.int64]]:
    """Return the micro-batches of a step as the data yield them, int64 [micro_batch, sequence + 1]."""
    return [
        torch.cat([batch["input_ids"], batch["labels"][:, -1:]], dim=1).numpy()
        for batch in micro_batches(plan, step, plan.axes.coordinates(rank).data)
    ]
