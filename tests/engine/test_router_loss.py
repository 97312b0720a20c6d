"""``model.router_aux_loss_coef`` is the same loss on every engine, reported and with the same gradients.

Four layers with two experts per token, so that coefficients that sum over layers, or divide by the experts,
would show.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.cases import quick
from toolkit.engine.protocol import MicroBatch
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import TOLERANCE, Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.measure import Measured, measure
from toolkit.testing.tiny import micro_batches
from toolkit.train.task import IGNORE_INDEX

COEFFICIENT = 0.5
STEPS = 4
LAYERS = 4

# Cells that train on one micro-batch of two samples, and cells that train on four.
SINGLE = [
    deepspeed("mixtral", 1, layers=LAYERS),
    megatron("mixtral", layers=LAYERS),
    megatron("mixtral", pipeline=2, layers=LAYERS),
    megatron("mixtral", tensor=2, label="sp", layers=LAYERS),
    megatron("mixtral", context=2, layers=LAYERS),
]
SEVERAL = [
    deepspeed("mixtral", 1, data=2, expert=2, layers=LAYERS),
    megatron("mixtral", data=2, expert=2, layers=LAYERS),
    megatron("mixtral", pipeline=2, layers=LAYERS),
    megatron("mixtral", layers=LAYERS, recompute=True, label="full"),
]


def unmasked(plan: RunPlan, step: int, data_rank: int) -> list[MicroBatch]:
    """Micro-batches with equal numbers of tokens."""
    found = micro_batches(plan, step, data_rank)
    return [
        {**batch, "labels": torch.where(batch["labels"] == IGNORE_INDEX, 0, batch["labels"])}
        for batch in found
    ]


def measured(pool: RankPool, cell: Cell, samples: int, coefficient: float) -> Measured:
    plan = cell.plan(
        OptimizerCase.SGD,
        train__global_batch=samples,
        model__router_aux_loss_coef=coefficient,
        optim__lr=0.02,
    )
    found: Measured = pool.run(on_rank, plan, ranks=cell.ranks)[0]
    return found


def on_rank(rank: int, ranks: int, plan: RunPlan) -> Measured:
    return measure(rank, ranks, plan, steps=STEPS, gradients=True, batches=unmasked)


@pytest.fixture(scope="module")
def references(pool: RankPool) -> dict[Any, Measured]:
    cell = SINGLE[0].reference()
    return {
        (samples, coefficient): measured(pool, cell, samples, coefficient)
        for samples, coefficient in ((2, COEFFICIENT), (8, COEFFICIENT), (2, 0.0))
    }


@pytest.mark.parametrize("cell", quick(SINGLE, 0), ids=lambda cell: cell.name)
def test_router_loss_of_one_micro_batch_matches_local(
    cell: Cell, pool: RankPool, references: dict[Any, Measured]
) -> None:
    agree(measured(pool, cell, 2, COEFFICIENT), references[2, COEFFICIENT])


@pytest.mark.parametrize("cell", quick(SEVERAL, 1), ids=lambda cell: cell.name)
def test_router_loss_of_several_micro_batches_matches_local(
    cell: Cell, pool: RankPool, references: dict[Any, Measured]
) -> None:
    agree(measured(pool, cell, 8, COEFFICIENT), references[8, COEFFICIENT])


def agree(found: Measured, reference: Measured) -> None:
    differences = found.differences(reference)
    assert not differences.over(TOLERANCE), differences


def test_control_zero_coefficient(references: dict[Any, Measured]) -> None:
    """The loss, which includes it, and the routers' gradients differ."""
    differences = references[2, 0.0].differences(references[2, COEFFICIENT])
    assert differences.loss > COEFFICIENT, "a balanced router has a loss of 2, times the coefficient"
    assert differences.gradient is not None
    assert differences.gradient > 0.05
    assert references[2, 0.0].evaluation != references[2, COEFFICIENT].evaluation, "it was trained"
