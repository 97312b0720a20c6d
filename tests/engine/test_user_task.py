"""A user's task has the losses of plain torch in every layout that accepts it.

pytest tests/engine/test_user_task.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.train.user_tasks import Regression, Weighted
from toolkit.config.schema import EngineName, Precision
from toolkit.data.custom.samples import Samples
from toolkit.data.evaluation import IGNORE_INDEX
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.protocol import EvalResult, MicroBatch
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import TOLERANCE, RunTrace, check_control, check_parity, run_trace
from toolkit.testing.tiny import micro_batches, tiny_plan
from toolkit.train.task import NextTokenTask, Task
from toolkit.train.user_task import CheckedTask

HERE = "tests.train.user_tasks"
NETWORK: dict[str, Any] = {"model__target": f"{HERE}.Network", "task__target": f"{HERE}.Regression"}
TEXT: dict[str, Any] = {"task__target": f"{HERE}.Weighted"}


def row(number: int) -> dict[str, torch.Tensor]:
    """A sample; every third has no weight, so the units of ranks and micro-batches differ."""
    x = torch.randn(4, generator=torch.Generator().manual_seed(number))
    return {"x": x, "y": 2 + x[0] * x[1], "weight": torch.tensor(float(number % 3))}


def tables(plan: RunPlan, step: int, data_rank: int) -> list[MicroBatch]:
    batch, size, ranks = plan.batch.at(step), plan.batch.micro_batch, plan.batch.data_parallel
    firsts = (
        batch.first_sample + (number * ranks + data_rank) * size for number in range(batch.accumulation)
    )
    task = CheckedTask(Regression(), None)
    return [dict(task.collate([row(first + index) for index in range(size)])) for first in firsts]


def texts(plan: RunPlan, step: int, data_rank: int) -> list[MicroBatch]:
    found = []
    for batch in micro_batches(plan, step, data_rank):
        samples = torch.cat([batch["input_ids"], batch["labels"][:, -1:].clamp(min=0)], dim=1).numpy()
        found.append(dict(Weighted().collate(samples)))
    return found


def trace_tables(rank: int, ranks: int, plan: RunPlan, task: Task | None = None) -> RunTrace:
    return run_trace(plan, rank=rank, task=task or CheckedTask(Regression(), None), batches=tables)


def trace_texts(rank: int, ranks: int, plan: RunPlan, task: Task | None = None) -> RunTrace:
    return run_trace(plan, rank=rank, task=task or CheckedTask(Weighted(), None), batches=texts, steps=11)


@pytest.fixture(scope="module")
def table_reference() -> RunTrace:
    return trace_tables(0, 1, tiny_plan(None, **NETWORK, optim__lr=1e-2))


@pytest.fixture(scope="module")
def text_reference() -> RunTrace:
    return trace_texts(0, 1, tiny_plan("llama", **TEXT))


def test_zero3_matches_local_with_uneven_units(table_reference: RunTrace, pool: RankPool) -> None:
    plan = tiny_plan(None, ranks=2, zero__stage=3, **NETWORK, optim__lr=1e-2)
    assert plan.batch.at(0).accumulation == 2
    units = {sum(int((batch["weight"] > 0).sum()) for batch in tables(plan, 0, rank)) for rank in (0, 1)}
    assert len(units) == 2, "ranks have different units"
    check_parity(pool.run(trace_tables, plan, ranks=2)[0], table_reference)


def test_control_units_that_count_every_sample(table_reference: RunTrace) -> None:
    class AllSamples(Regression):
        units = Task.units

    trace = trace_tables(0, 1, tiny_plan(None, **NETWORK, optim__lr=1e-2), AllSamples())
    check_control(trace, table_reference)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "ranks", "micro"), [(0, 2, 4), (1, 2, 2), (2, 4, 1)])
def test_every_stage_matches_local(
    stage: int, ranks: int, micro: int, table_reference: RunTrace, pool: RankPool
) -> None:
    plan = tiny_plan(
        None, ranks=ranks, zero__stage=stage, train__micro_batch=micro, **NETWORK, optim__lr=1e-2
    )
    check_parity(pool.run(trace_tables, plan, ranks=ranks)[0], table_reference)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_follows_fp32(stage: int, table_reference: RunTrace, pool: RankPool) -> None:
    plan = tiny_plan(
        None, ranks=2, zero__stage=stage, precision__name=Precision.bf16, **NETWORK, optim__lr=1e-2
    )
    losses = pool.run(trace_tables, plan, ranks=2)[0].losses
    assert max(abs(a - b) / a for a, b in zip(table_reference.losses, losses, strict=True)) < 0.05


def test_megatron_weights_tokens_like_the_local_engine(text_reference: RunTrace, pool: RankPool) -> None:
    plan = tiny_plan("llama", ranks=2, engine__name=EngineName.megatron, parallel__tensor=2, **TEXT)
    check_parity(pool.run(trace_texts, plan, ranks=2)[0], text_reference)


def test_control_a_task_without_weights(text_reference: RunTrace) -> None:
    class Unweighted(NextTokenTask):
        def loss_sum(self, model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
            return super().loss_sum(model, {**batch, "loss_weights": torch.ones_like(batch["loss_weights"])})

    check_control(trace_texts(0, 1, tiny_plan("llama", **TEXT), Unweighted()), text_reference)


LAYOUTS: Sequence[dict[str, Any]] = (
    {"engine__name": EngineName.megatron, "parallel__pipeline": 2},
    {"engine__name": EngineName.megatron, "parallel__context": 2},
    {"engine__name": EngineName.megatron},
    {"parallel__pipeline": 2},
    {"parallel__context": 2, "zero__stage": 1},
    {"parallel__tensor": 2, "zero__stage": 1},
    {"zero__stage": 3},
)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_every_layout_weights_tokens(
    layout: dict[str, Any], text_reference: RunTrace, pool: RankPool
) -> None:
    check_parity(
        pool.run(trace_texts, tiny_plan("llama", ranks=2, **layout, **TEXT), ranks=2)[0], text_reference
    )


class HiddenStates(Task):
    """Trains a family's model without its output layer."""

    def loss_sum(self, model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
        hidden = model.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state  # type: ignore[operator]
        return (hidden.float().mean(-1) - batch["input_ids"] / 264).square().sum()

    def units(self, batch: MicroBatch) -> int:
        return batch["input_ids"].numel()


def trace_hidden_states(rank: int, ranks: int, plan: RunPlan) -> RunTrace:
    return run_trace(plan, rank=rank, task=CheckedTask(HiddenStates(), None), batches=texts)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 3])
def test_a_task_may_leave_parameters_of_a_family_unused(stage: int, pool: RankPool) -> None:
    target = {"task__target": f"{__name__}.HiddenStates", "optim__weight_decay": 0.1}
    alone = trace_hidden_states(0, 1, tiny_plan("llama", **target))
    plan = tiny_plan("llama", ranks=2, zero__stage=stage, **target)
    distance = pool.run(trace_hidden_states, plan, ranks=2)[0].distance(alone)
    assert distance.times(TOLERANCE) <= 1, distance
    assert alone.losses[0] > 1.5 * alone.losses[-1]


def evaluate(rank: int, ranks: int, plan: RunPlan, masked: bool) -> EvalResult:
    """Evaluate two micro-batches per rank; if ``masked``, the last of rank 1 does not count."""
    task = CheckedTask(Regression(), None)
    engine = build_engine(plan, task, rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))

    found = []
    for number in range(4 // ranks):
        first = (number * ranks + rank) * 2
        samples = Samples([row(first), row(first + 1)], real=0 if masked and first == 6 else 2)
        found.append(task.collate(samples))
    result = engine.eval_step(found)
    engine.close()
    return result


def test_samples_that_do_not_count_change_no_evaluation(pool: RankPool) -> None:
    alone = evaluate(0, 1, tiny_plan(None, **NETWORK), True)
    two = pool.run(evaluate, tiny_plan(None, ranks=2, zero__stage=3, **NETWORK), True, ranks=2)
    assert two[0] == two[1]
    assert (two[0].tokens, two[0].others) == (alone.tokens, alone.others) == (4, alone.others)
    assert two[0].loss_sum == pytest.approx(alone.loss_sum, rel=1e-6)
    everything = evaluate(0, 1, tiny_plan(None, **NETWORK), False)
    assert everything.tokens > alone.tokens
    assert everything.loss_sum > 1.01 * alone.loss_sum


def test_masked_labels_do_not_count() -> None:
    (batch, *_) = texts(tiny_plan("llama", **TEXT), 0, 0)
    assert int((batch["labels"] == IGNORE_INDEX).sum()) == batch["labels"].numel() // 4
