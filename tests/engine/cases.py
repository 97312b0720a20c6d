"""Cells of DeepSpeed's test matrix, and what a rank does with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from toolkit.checkpoint.shard import MASTER, WEIGHT, Shard, StateReader, TensorInfo, TensorKey
from toolkit.cluster.world.machine_info import detect_machine
from toolkit.config.optim import OptimizerKernel
from toolkit.config.schema import EngineName, OffloadDevice, Precision
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.protocol import Engine, StepResult
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.testing import parity
from toolkit.testing.parity import RunTrace, run_trace, train_steps
from toolkit.testing.tiny import MICRO_BATCH, tiny_config
from toolkit.train.task import text_task


@dataclass(frozen=True)
class Cell:
    """A layout and its settings.

    ``stage`` None is the local engine, with all micro-batches on one rank. ``more`` are further keys as in
    ``testing/tiny.py``.
    """

    stage: int | None = 2
    ranks: int = 2
    accumulation: int = 2
    family: str | None = "llama"  # None: model.target, in ``more``
    more: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        engine = "local" if self.stage is None else f"zero{self.stage}"
        shown = [f"{key.split('__')[1]}={getattr(value, 'name', value)}" for key, value in self.more]
        return "-".join(
            [engine, f"{self.ranks}ranks", f"{self.accumulation}accumulated", self.family or "target", *shown]
        )

    @property
    def data(self) -> int:
        """The number of ranks with their own samples."""
        more = dict(self.more)
        return self.ranks // (
            more.get("parallel__tensor", 1)
            * more.get("parallel__context", 1)
            * more.get("parallel__pipeline", 1)
        )

    def plan(self) -> RunPlan:
        settings = {
            "engine__name": EngineName.local if self.stage is None else EngineName.deepspeed,
            "zero__stage": self.stage or 0,
            "train__global_batch": self.data * MICRO_BATCH * self.accumulation,
            **dict(self.more),
        }
        return make_plan(tiny_config(self.family, **settings), self.world())

    def world(self) -> World:
        here = detect_machine()
        return World(
            ranks=self.ranks,
            ranks_per_node=self.ranks,
            device=Device.CPU,
            has_compiler=True,
            has_libaio=here.has_libaio,
        )

    def reference(self) -> Cell:
        """The cell of the local engine with the same samples, first weights and optimizer."""
        carriage = (
            "engine__",
            "zero__",
            "offload__",
            "parallel__",
            "train__activation_checkpointing",
            "optim__kernel",
        )
        more = tuple((key, value) for key, value in self.more if not key.startswith(carriage))
        return replace(self, stage=None, ranks=1, accumulation=self.data * self.accumulation, more=more)


def cell(
    stage: int | None = 2, ranks: int = 2, accumulation: int = 2, family: str | None = "llama", **more: Any
) -> Cell:
    return Cell(stage, ranks, accumulation, family, tuple(more.items()))


# Without clipping, because clipping and Adam hide a wrong scale of all gradients.
SGD: dict[str, Any] = {"optim__name": "sgd", "optim__clip": 0.0, "optim__lr": 0.1}
BF16: dict[str, Any] = {"precision__name": Precision.bf16}
FP16: dict[str, Any] = {"precision__name": Precision.fp16}
# torch's AdamW on the CPU: DeepSpeed's is compiled on first use.
OFFLOAD: dict[str, Any] = {"offload__optimizer": OffloadDevice.cpu, "optim__kernel": OptimizerKernel.torch}
OFFLOAD_ALL: dict[str, Any] = {**OFFLOAD, "offload__parameters": OffloadDevice.cpu}
CHECKPOINTING: dict[str, Any] = {"train__activation_checkpointing": "full"}
TENSOR: dict[str, Any] = {"parallel__tensor": 2}
CONTEXT: dict[str, Any] = {"parallel__context": 2}
EXPERT: dict[str, Any] = {"parallel__expert": 2}
DROPOUT: dict[str, Any] = {"model__dropout": 0.1}


def quick(cases: Iterable[Any], *indices: int, unpack: bool = False) -> list[Any]:
    """Mark all cases but those at ``indices`` as ``full``, so that ``make test`` runs one of each claim.

    Args:
        unpack: a case is a tuple of the values of several parameters.
    """
    return [
        case
        if number in indices or hasattr(case, "marks")
        else pytest.param(*(case if unpack else (case,)), marks=pytest.mark.full)
        for number, case in enumerate(cases)
    ]


# With this learning rate, unless the cell has its own, the loss of a model with two layers falls by
# REQUIRED_FALL in this many steps of eight samples.
LR, STEPS = 2e-3, 11


def trace(rank: int, ranks: int, cell: Cell, *, steps: int | None = None, **settings: Any) -> RunTrace:
    """Train the cell for ``steps`` steps; None: until its loss has fallen enough."""
    assert ranks == cell.ranks
    plan = replace(cell, more=(("optim__lr", LR), *cell.more)).plan()
    return run_trace(plan, rank=rank, steps=steps or steps_to_learn(plan), **settings)


def long_trace(rank: int, ranks: int, cell: Cell) -> RunTrace:
    """Train the cell as long as the measured differences of docs/results.md."""
    return trace(rank, ranks, cell, steps=parity.STEPS)


def steps_to_learn(plan: RunPlan) -> int:
    """STEPS, or more for deeper or other models and for smaller batches; SGD needs no fall."""
    model = plan.config.model
    slow = model.target is not None or (model.num_hidden_layers or 0) > 2 or plan.batch.at(0).size < 8
    return parity.STEPS if slow and plan.config.optim.name != "sgd" else STEPS


def make(cell: Cell, rank: int, reader: StateReader | None = None) -> Engine:
    """The cell's engine with its first weights, or with the state of ``reader``."""
    plan = cell.plan()
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan) if reader is None else reader)
    return engine


def steps(engine: Engine, cell: Cell, rank: int, first: int, last: int) -> list[StepResult]:
    return train_steps(engine, cell.plan(), range(first, last), rank=rank)


class WithoutMoments:
    """A control: moments exist but are zero."""

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader

    @property
    def tensors(self) -> Mapping[TensorKey, TensorInfo]:
        return self._reader.tensors

    @property
    def scalars(self) -> Mapping[str, object]:
        return self._reader.scalars

    def read(self, shards: Sequence[Shard]) -> None:
        self._reader.read([shard for shard in shards if shard.key.state in (WEIGHT, MASTER)])
        for shard in shards:
            if shard.key.state not in (WEIGHT, MASTER):
                shard.data.zero_()
