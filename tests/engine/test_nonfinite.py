"""A nonfinite gradient on one rank in one step: every engine and layout skips that step, and only that one.

    pytest tests/engine/test_nonfinite.py             one layout of each kind
    pytest tests/engine/test_nonfinite.py -m full     further precisions, optimizers and layouts

Each layout is compared with the local engine, poisoned in the same step, by results and final weights.
Controls: a run that is not poisoned and one that is poisoned a step later are far from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.cases import BF16, CONTEXT, EXPERT, OFFLOAD, OFFLOAD_ALL, TENSOR, Cell, cell, quick
from toolkit.checkpoint.scalars import OPTIMIZER_STEP
from toolkit.config.schema import EngineName, Precision
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import TOLERANCE, Distance, RunTrace, gather_weights, train_steps
from toolkit.train.task import text_task

STEPS, POISONED = 4, 2
# One sum of gradients in bf16 or two. Newton-Schulz enlarges rounding differences, and under ZeRO 0 Muon's
# norm is of gradients.
TOLERANCES = {
    "precision__name": Distance(loss=2e-3, norm=5e-2, weight=1e-3),
    "optim__momentum": Distance(2e-3, math.inf, 1e-3),
}
MEGATRON: dict[str, Any] = {"engine__name": EngineName.megatron}
PIPELINE: dict[str, Any] = {"parallel__pipeline": 2}
MUON: dict[str, Any] = {"optim__name": "muon", "optim__momentum": 0.95, "optim__clip": 0.0}
FP16_UNSCALED: dict[str, Any] = {"precision__name": Precision.fp16, "precision__initial_scale_power": 0}


@dataclass(frozen=True)
class Skipped:
    """A run of STEPS steps. ``before`` and ``after``: whole weights around the poisoned step, on rank 0."""

    trace: RunTrace
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    scalars: dict[str, object]


def poisoned_run(
    rank: int, ranks: int, case: Cell, poisoned: int | None = POISONED, gradient: float = math.nan
) -> Skipped:
    """Poison the gradient of one matrix on the last rank, in step ``poisoned``."""
    plan = case.plan()
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    armed = False

    def poison(found: torch.Tensor) -> torch.Tensor:
        return found * gradient if armed else found

    if rank == ranks - 1:
        matrix_of(engine).register_hook(poison)
    results, weights = [], []
    for step in range(STEPS):
        armed = step == poisoned
        weights.append(gather_weights(engine, plan, rank))
        results += train_steps(engine, plan, range(step, step + 1), rank=rank)
    weights.append(gather_weights(engine, plan, rank))
    found = Skipped(
        RunTrace(tuple(results), weights[-1]), weights[POISONED], weights[POISONED + 1], engine.scalars()
    )
    engine.close()
    return found


def matrix_of(engine: Any) -> nn.Parameter:
    """A matrix that each layout stores once: the tensor axis shards it, and every stage has one."""
    modules = (
        engine._model.chunks
        if hasattr(engine, "_model")
        else [engine._module if hasattr(engine, "_module") else engine._ds.module]
    )
    names = ("down_proj", "linear_fc2", "experts")
    return next(
        parameter
        for module in modules
        for name, parameter in module.named_parameters()
        if any(part in name for part in names)
    )


@cache
def reference(case: Cell, poisoned: int | None = POISONED) -> Skipped:
    return poisoned_run(0, 1, case, poisoned)


def names(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """Names of the weights that differ."""
    assert before.keys() == after.keys()
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


LAYOUTS = [
    *(cell(stage) for stage in (0, 1, 2, 3)),
    cell(1, **BF16),
    cell(0, **PIPELINE),
    cell(1, **PIPELINE),
    cell(0, **MEGATRON),
    cell(1, **MEGATRON),
    cell(0, **TENSOR, **MEGATRON),
    cell(0, **PIPELINE, **MEGATRON),
    cell(0, **BF16, **MEGATRON),
    *(
        pytest.param(case, marks=pytest.mark.full)
        for case in (
            cell(0, **TENSOR),
            cell(2, **TENSOR),
            cell(1, **CONTEXT),
            cell(1, family="mixtral", **EXPERT),
            cell(2, **OFFLOAD),
            cell(3, **OFFLOAD_ALL),
            cell(1, **MUON),
            cell(0, **MUON),
            cell(3, **MUON),
            cell(2, **BF16),
            cell(3, **BF16),
            cell(1, **PIPELINE, **BF16),
            cell(0, 4, **PIPELINE),
            cell(1, 4, **PIPELINE),
            cell(1, **BF16, **MEGATRON),
            cell(0, **CONTEXT, **MEGATRON),
            cell(1, 4, **TENSOR, **MEGATRON),
            cell(1, 4, **PIPELINE, **MEGATRON),
            cell(0, family="mixtral", **EXPERT, **MEGATRON),
            cell(0, optim__clip=0.0),
            cell(0, optim__clip=0.0, **MEGATRON),
            cell(0, optim__clip=0.0, **PIPELINE),
        )
    ),
]


@pytest.mark.parametrize(
    "case",
    quick(LAYOUTS, 2, 5, 8),
    ids=lambda case: f"{dict(case.more).get('engine__name', EngineName.deepspeed).name}-{case}",
)
def test_every_layout_skips_a_nonfinite_step(case: Cell, pool: RankPool) -> None:
    answers = pool.run(poisoned_run, case, ranks=case.ranks)
    found = answers[0]
    results = found.trace.results
    assert [[result.skipped for result in answer.trace.results] for answer in answers] == [
        [False, False, True, False]
    ] * case.ranks
    assert math.isinf(results[POISONED].grad_norm)
    assert math.isfinite(results[POISONED].loss), "forward was sound"
    assert names(found.before, found.after) == []
    assert found.scalars[OPTIMIZER_STEP] == STEPS - 1, "Adam's count of steps is part of the state"
    local = reference(case.reference())
    tolerance = next((TOLERANCES[key] for key, _ in case.more if key in TOLERANCES), TOLERANCE)
    finite = [
        RunTrace(tuple(result for result in run.results if not result.skipped), run.weights)
        for run in (found.trace, local.trace)
    ]
    distance = finite[0].distance(finite[1])
    assert distance.times(tolerance) <= 1, distance


def test_control_runs_differ_from_a_skipped_step() -> None:
    """A run that applies the step, and one that skips another step."""
    case = cell().reference()
    for other in (reference(case, None), reference(case, POISONED - 1)):
        assert (
            max(
                float((other.trace.weights[name] - value).abs().max())
                for name, value in reference(case).trace.weights.items()
            )
            > 5 * TOLERANCE.weight
        )


@pytest.mark.parametrize("more", [{}, BF16, MUON], ids=["fp32", "bf16", "muon"])
@pytest.mark.parametrize("gradient", [math.nan, math.inf])
def test_local_engine_keeps_weights_moments_and_step_count(more: dict[str, Any], gradient: float) -> None:
    found = poisoned_run(0, 1, cell(None, 1, **more), gradient=gradient)
    assert [result.skipped for result in found.trace.results] == [False, False, True, False]
    assert names(found.before, found.after) == []
    assert names(found.after, found.trace.weights) != [], "the next step is taken"
    assert found.scalars[OPTIMIZER_STEP] == STEPS - 1
    assert all(bool(value.isfinite().all()) for value in found.trace.weights.values()), (
        "no moment was poisoned"
    )


FP16 = [cell(None, 1, **FP16_UNSCALED), cell(1, **FP16_UNSCALED), cell(0, **FP16_UNSCALED, **MEGATRON)]


@pytest.mark.parametrize("case", FP16, ids=["local", "deepspeed", "megatron"])
def test_fp16_skips_a_nonfinite_step_at_the_smallest_scale(case: Cell, pool: RankPool) -> None:
    """No engine raises: train.on_nonfinite decides what follows."""
    results = pool.run(poisoned_run, case, ranks=case.ranks)[0].trace.results
    assert [result.skipped for result in results] == [False, False, True, False]
    assert [result.loss_scale for result in results] == [1.0] * STEPS
