"""Compare a cell with the local engine: correct cells are within the tolerance, controls are far away."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.engine.cases import SGD, Cell, make, steps, trace
from toolkit.checkpoint.shard import WEIGHT, TensorKey
from toolkit.config.schema import BatchRampConfig, EngineName
from toolkit.engine.deepspeed.engine import DeepSpeedEngine
from toolkit.engine.protocol import StepResult
from toolkit.plan import make_plan
from toolkit.plan.types import Device, World
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import (
    Distance,
    DoubledGradients,
    RunTrace,
    check_control,
    check_parity,
    gather_tensors,
    repeat_first_rank,
    train_steps,
)
from toolkit.testing.tiny import tiny_config

TOLERANCE = Distance(loss=1e-5, norm=1e-4, weight=1e-5)


@cache
def reference(local: Cell) -> RunTrace:
    return trace(0, 1, local)


@cache
def doubled(local: Cell) -> RunTrace:
    """The reference with doubled gradients."""
    return trace(0, 1, local, task=DoubledGradients())


def check_cell(case: Cell, pool: RankPool) -> None:
    """Check that all ranks return the same results, and that these agree with the reference.

    A cell must be able to fail: with AdamW the reference must learn; with SGD, which learns too little in
    these steps, the reference with doubled gradients must be far away.
    """
    traces = pool.run(trace, case, ranks=case.ranks)
    found, right = traces[0], reference(case.reference())
    print(found.distance(right))
    assert all(other.results == found.results for other in traces)
    if set(SGD) <= {key for key, _ in case.more}:
        check_control(doubled(case.reference()), right, TOLERANCE)
        assert found.distance(right).times(TOLERANCE) <= 1, f"{found.distance(right)} against {TOLERANCE}"
    else:
        check_parity(found, right, TOLERANCE)


CONTROL_STEPS = 5  # of runs whose mistake shows early


def doubling(rank: int, ranks: int, case: Cell) -> RunTrace:
    return trace(rank, ranks, case, steps=CONTROL_STEPS, task=DoubledGradients())


def duplicating(rank: int, ranks: int, case: Cell) -> RunTrace:
    return trace(rank, ranks, case, steps=CONTROL_STEPS, batches=repeat_first_rank)


def far(wrong: RunTrace, case: Cell) -> None:
    """Assert a large difference of the loss itself; that of weights alone would be weaker evidence.

    A wrong run may have fewer steps than the reference.
    """
    pairs = zip(wrong.losses, reference(case.reference()).losses, strict=False)
    loss = max(abs(a - b) for a, b in pairs)
    print(loss)
    assert loss > 10 * TOLERANCE.loss, f"a wrong run passes as correct: {loss:.1e}"


def gather_state(rank: int, ranks: int, case: Cell) -> tuple[dict[TensorKey, torch.Tensor], int, int]:
    """Return all state, this rank's elements of weights in shards, and those of its padded partitions."""
    engine = make(case, rank)
    assert isinstance(engine, DeepSpeedEngine)
    steps(engine, case, rank, 0, 1)
    mine = sum(shard.data.numel() for shard in engine.shards() if shard.key.state == WEIGHT)
    padded = sum(partition.master.numel() for partition in engine._partitions())
    state = gather_tensors(engine.shards(), rank, ranks)
    engine.close()
    return state, mine, padded


def ramped(rank: int, ranks: int, stage: int | None, more: dict[str, Any]) -> list[StepResult]:
    config = tiny_config("llama", zero__stage=stage or 0, **more)
    config.engine.name = EngineName.local if stage is None else EngineName.deepspeed
    config.train.global_batch, config.train.batch_ramp = 12, BatchRampConfig(start=4, increment=4, samples=24)
    plan = make_plan(config, World(ranks=ranks, ranks_per_node=ranks, device=Device.CPU))
    from toolkit.engine.build import build_engine, open_initial_weights
    from toolkit.train.task import text_task

    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    results = train_steps(engine, plan, range(8), rank=rank)
    engine.close()
    return results
