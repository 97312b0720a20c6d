"""Cells of the engine's matrices, and what a rank does in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.checkpoint.shard import MASTER, WEIGHT, Reader, Shard, TensorInfo, TensorKey
from toolkit.cluster.machine_info import detect_machine
from toolkit.config.schema import EngineName, OptimizerKernel, OptimizerName, Place, Precision
from toolkit.engine.build import build_engine, first_weights
from toolkit.engine.protocol import Engine, StepResult
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World
from toolkit.testing.parity import Trace, run, step_all
from toolkit.testing.tiny import MICRO_BATCH, tiny_config
from toolkit.train.task import text_task


@dataclass(frozen=True)
class Cell:
    """A layout and its settings. ``stage`` None: the local engine, which takes all micro-batches on its one rank.

    ``more`` are further keys as ``testing/tiny.py`` takes them.
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
        """Ranks that have samples of their own."""
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

    def oracle(self) -> Cell:
        """The same samples, first weights and optimizer on the local engine."""
        carriage = ("engine__", "offload__", "parallel__", "train__activation_checkpointing", "optim__kernel")
        more = tuple((key, value) for key, value in self.more if not key.startswith(carriage))
        return replace(self, stage=None, ranks=1, accumulation=self.data * self.accumulation, more=more)


def cell(
    stage: int | None = 2, ranks: int = 2, accumulation: int = 2, family: str | None = "llama", **more: Any
) -> Cell:
    return Cell(stage, ranks, accumulation, family, tuple(more.items()))


# No clipping: with it, or with Adam, a wrong scale of all gradients does not show.
SGD: dict[str, Any] = {"optim__name": OptimizerName.sgd, "optim__clip": 0.0, "optim__lr": 0.1}
BF16: dict[str, Any] = {"precision__name": Precision.bf16}
FP16: dict[str, Any] = {"precision__name": Precision.fp16}
# torch's AdamW on the CPU: DeepSpeed's is compiled on first use.
OFFLOAD: dict[str, Any] = {"offload__optimizer": Place.cpu, "optim__kernel": OptimizerKernel.torch}
OFFLOAD_ALL: dict[str, Any] = {**OFFLOAD, "offload__parameters": Place.cpu}
CHECKPOINTING: dict[str, Any] = {"train__activation_checkpointing": True}
TENSOR: dict[str, Any] = {"parallel__tensor": 2}
CONTEXT: dict[str, Any] = {"parallel__context": 2}
EXPERT: dict[str, Any] = {"parallel__expert": 2}
DROPOUT: dict[str, Any] = {"model__dropout": 0.1}


def trace(rank: int, ranks: int, cell: Cell, **settings: Any) -> Trace:
    assert ranks == cell.ranks
    return run(cell.plan(), rank=rank, **settings)


def make(cell: Cell, rank: int, reader: Reader | None = None) -> Engine:
    """The cell's engine with its first weights, or what ``reader`` has."""
    plan = cell.plan()
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(first_weights(plan) if reader is None else reader)
    return engine


def steps(engine: Engine, cell: Cell, rank: int, first: int, last: int) -> list[StepResult]:
    return step_all(engine, cell.plan(), range(first, last), rank=rank)


class WithoutMoments:
    """The control: moments are there and zero."""

    def __init__(self, reader: Reader) -> None:
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
