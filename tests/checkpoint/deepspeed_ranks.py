"""DeepSpeed runs for tests of its files: train and save, load with DeepSpeed's loader, continue."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.vendors import vendor_load, vendor_save
from toolkit.checkpoint.formats.deepspeed import target as deepspeed_target
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import TensorKey
from toolkit.checkpoint.source import CheckpointSource
from toolkit.checkpoint.target import CheckpointTarget
from toolkit.config.reshard import TargetConfig, TargetParallelConfig, TargetZeroStage
from toolkit.config.schema import EngineName
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.protocol import StepResult
from toolkit.plan.types import RunPlan
from toolkit.testing.parity import gather_tensors, train_steps
from toolkit.testing.tiny import tiny_plan
from toolkit.train.state import TrainState, namespace, scalars
from toolkit.train.task import text_task

STOP, MORE = 4, 6


@dataclass(frozen=True)
class Layout:
    """A DeepSpeed run. ``sub_group``: ZeRO 3's ``sub_group_size``."""

    stage: int
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    sub_group: int | None = None

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    def plan(self, family: str, **more: Any) -> RunPlan:
        own = {"zero_optimization": {"sub_group_size": self.sub_group}} if self.sub_group else {}
        return tiny_plan(
            family,
            ranks=self.ranks,
            engine__name=EngineName.deepspeed,
            zero__stage=self.stage,
            parallel__tensor=self.tensor,
            parallel__pipeline=self.pipeline,
            engine__deepspeed=own,
            **more,
        )

    def config(self, **more: Any) -> TargetConfig:
        parallel = TargetParallelConfig(data=self.data, tensor=self.tensor, pipeline=self.pipeline)
        return TargetConfig(zero=TargetZeroStage[f"stage{self.stage}"], parallel=parallel, **more)

    def target(self, source: CheckpointSource, **more: Any) -> CheckpointTarget:
        given = {"sub_group": self.sub_group} if self.sub_group else {}
        return deepspeed_target.lay_out(source, self.config(**more), **given)

    def __str__(self) -> str:
        parts = [
            f"{name}{size}"
            for name, size in (("dp", self.data), ("tp", self.tensor), ("pp", self.pipeline))
            if size > 1
        ]
        return "-".join([f"zero{self.stage}", *parts, *(["subgroups"] if self.sub_group else [])])


@dataclass(frozen=True)
class LoadOutcome:
    """Rank 0's state after loading, and the steps that follow."""

    state: dict[TensorKey, torch.Tensor]
    scalars: dict[str, object]
    counts: tuple[int, int, int]  # DeepSpeed's global_steps, global_samples, skipped_steps
    decays: list[float]  # of the optimizer's groups
    results: list[StepResult]


def train(rank: int, ranks: int, plan: RunPlan, folder: Path) -> list[StepResult]:
    """``STOP`` steps, a native checkpoint, and ``MORE`` uninterrupted steps."""
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    train_steps(engine, plan, range(STOP), rank=rank)
    engine_scalars = scalars(plan, TrainState(STOP), {}, {}, engine.scalars())
    CheckpointStore(folder).save(
        STOP, engine.shards(), engine_scalars, namespace=namespace(plan), rank=rank, ranks=ranks, attempt=1
    ).wait()
    results = train_steps(engine, plan, range(STOP, STOP + MORE), rank=rank)
    engine.close()
    return results


def continue_with_vendor(
    rank: int,
    ranks: int,
    plan: RunPlan,
    folder: Path,
    again: Path | None = None,
    universal: bool = False,
    own_counters: bool = True,
) -> LoadOutcome:
    """Load ``folder`` with DeepSpeed, then train ``MORE`` steps.

    Args:
        plan: The run.
        folder: The checkpoint.
        again: Folder where DeepSpeed saves it again before it continues.
        own_counters: Apply the workaround of ``universal.target.NOTES`` for ZeRO 3.
    """
    engine: Any = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    vendor_load(engine, folder, universal=universal)
    if universal and own_counters:
        for state in engine._ds.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()
    if again is not None:
        vendor_save(engine, again)
    ds, state, engine_scalars = engine._ds, gather_tensors(engine.shards(), rank, ranks), engine.scalars()
    counts = (ds.global_steps, ds.global_samples, ds.skipped_steps)
    decays = [group["weight_decay"] for group in ds.optimizer.param_groups]
    results = train_steps(engine, plan, range(STOP, STOP + MORE), rank=rank)
    engine.close()
    return LoadOutcome(state, engine_scalars, counts, decays, results)
