"""In fp16 the loss scale means the same in every layout, so the same steps overflow as in ``local``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.cases import quick
from toolkit.checkpoint.scalars import LOSS_SCALER
from toolkit.config.schema import EngineName, Precision
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.protocol import StepResult
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.parity import train_steps
from toolkit.train.task import text_task

STEPS = 10
# Layouts whose sums over micro-batches and ranks overflow no earlier than the fp32 sums of the local engine.
CELLS = [
    deepspeed("llama", 2, data=2),
    deepspeed("llama", 3, data=2),
    deepspeed("llama", 1, data=4),
    megatron("llama", data=2, zero=1),
    megatron("llama", tensor=2),
]


def overflowing(
    rank: int, ranks: int, plan: RunPlan, undivided: bool = False
) -> tuple[list[StepResult], Any]:
    """Steps from a scale of 2^24, of which the first overflow, and the final scale."""
    from toolkit.engine.deepspeed import patches

    divide = patches.divide_loss_scale
    if undivided:
        patches.divide_loss_scale = lambda optimizer, ranks: None
    try:
        engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
        engine.load(open_initial_weights(plan))
        results = train_steps(engine, plan, range(STEPS), rank=rank)
        saved: Any = engine.scalars()[LOSS_SCALER]
        engine.close()
    finally:
        patches.divide_loss_scale = divide
    return results, saved["cur_scale"]


def plan_of(cell: Cell) -> RunPlan:
    return cell.plan(OptimizerCase.ADAM, precision__name=Precision.fp16, precision__initial_scale_power=24)


@pytest.fixture(scope="module")
def right() -> tuple[list[StepResult], Any]:
    found = overflowing(0, 1, plan_of(Cell(engine=EngineName.local, family="llama")))
    skipped = [result.skipped for result in found[0]]
    assert any(skipped[1:]), "2^24 overflows, else the cases show nothing"
    assert not all(skipped)
    return found


@pytest.mark.parametrize("cell", quick(CELLS, 0, 3), ids=lambda cell: cell.name)
def test_same_steps_overflow_as_in_the_local_engine(
    cell: Cell, pool: RankPool, right: tuple[list[StepResult], Any]
) -> None:
    found, saved = pool.run(overflowing, plan_of(cell), ranks=cell.ranks)[0]
    assert [result.skipped for result in found] == [result.skipped for result in right[0]]
    assert [result.loss_scale for result in found] == [result.loss_scale for result in right[0]]
    assert saved == right[1], "a checkpoint has the run's scale, whatever the engine holds"
    assert [result.loss for result in found] == pytest.approx([result.loss for result in right[0]], abs=1e-3)


def test_control_undivided_loss_scale(pool: RankPool, right: tuple[list[StepResult], Any]) -> None:
    """Without the division gradients are twice as large and overflow when the local engine's do not."""
    found, _ = pool.run(overflowing, plan_of(deepspeed("llama", 2, data=2)), True, ranks=2)[0]
    assert [result.skipped for result in found] != [result.skipped for result in right[0]]
