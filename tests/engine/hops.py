"""Train a cell for some steps from a checkpoint, and save a checkpoint for the next one."""

from __future__ import annotations

from pathlib import Path

from tests.engine.cases import WithoutMoments
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import StateReader
from toolkit.engine.build import build_engine
from toolkit.engine.protocol import Engine, StepResult
from toolkit.families import FAMILIES
from toolkit.plan.types import Device, RunPlan
from toolkit.testing.matrix import Cell, OptimizerCase
from toolkit.testing.parity import train_steps
from toolkit.train.task import text_task

EACH = 4


TOLERANCE = 1e-5


def stretch(
    rank: int,
    ranks: int,
    cell: Cell,
    first: int,
    source: Path | None,
    target: Path,
    forget: bool,
    device: Device = Device.CPU,
) -> list[StepResult]:
    """Train EACH steps from ``first`` on, from the state at ``source`` if any, and save to ``target``."""
    plan = cell.plan(OptimizerCase.ADAM, device)
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    reader: StateReader = cell.open_initial_weights(plan) if source is None else open_reader(source)
    engine.load(WithoutMoments(reader) if forget else reader)
    results = train_steps(engine, plan, range(first, first + EACH), rank=rank)
    save(engine, plan, first + EACH, target, rank, ranks)
    engine.close()
    return results


def save(engine: Engine, plan: RunPlan, step: int, folder: Path, rank: int, ranks: int) -> None:
    assert plan.shape is not None
    CheckpointStore(folder).save(
        step,
        engine.shards(),
        engine.scalars(),
        namespace=FAMILIES[plan.shape.family].namespace,
        rank=rank,
        ranks=ranks,
        attempt=1,
    ).wait()
