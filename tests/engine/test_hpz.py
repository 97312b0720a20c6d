"""ZeRO++ hpZ: the secondary partitions that each group of ranks keeps are those of the loaded weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.cases import LR, OFFLOAD_ALL, SGD, Cell, cell, make, quick, steps, trace
from tests.engine.checks import CONTROL_STEPS, TOLERANCE, check_cell, reference
from toolkit.engine.deepspeed.engine import DeepSpeedEngine
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import RunTrace, rank_samples


def hpz(size: int, *, threshold: int = 0, ranks: int = 4, **more: Any) -> Cell:
    """A cell with hpZ. Parameters with fewer elements than ``threshold`` stay gathered between steps."""
    keys = {"stage3_param_persistence_threshold": threshold}
    own = {"zero__hpz_partition_size": size, "engine__deepspeed": {"zero_optimization": keys}}
    return cell(3, ranks, 1, **own, **more)


FROZEN: dict[str, Any] = {"family": None, "model__target": "tests.engine.models.Mixer", "optim__lr": 1e-2}
CELLS = [hpz(2), hpz(2, threshold=5000, **SGD), hpz(2, ranks=2), hpz(4, **OFFLOAD_ALL)]


@pytest.mark.parametrize("case", quick(CELLS, 0), ids=str)
def test_hpz_matches_local(case: Cell, pool: RankPool) -> None:
    check_cell(case, pool)


@pytest.mark.full
def test_hpz_frozen_parameters_match_local(pool: RankPool) -> None:
    case = hpz(2, **FROZEN)
    found = pool.run(trace, case, ranks=4)[0]
    assert found.distance(reference(case.reference())).times(TOLERANCE) <= 1


def trace_with_stale_partitions(rank: int, ranks: int, case: Cell) -> RunTrace:
    """A control: secondary partitions from before the load are kept."""
    from toolkit.engine.deepspeed import patches

    forget = patches.drop_secondary_partitions
    patches.drop_secondary_partitions = lambda module: None
    try:
        return trace(rank, ranks, case, steps=CONTROL_STEPS)
    finally:
        patches.drop_secondary_partitions = forget


@pytest.mark.parametrize("case", quick([hpz(2), hpz(2, **FROZEN)], 0), ids=str)
def test_control_stale_secondary_partitions(case: Cell, pool: RankPool) -> None:
    found = pool.run(trace_with_stale_partitions, case, ranks=4)[0].losses
    losses = [abs(a - b) for a, b in zip(found, reference(case.reference()).losses, strict=False)]
    assert any(math.isnan(loss) or loss > 10 * TOLERANCE.loss for loss in losses)


def evaluate_and_reload(rank: int, ranks: int, case: Cell) -> tuple[list[float], int]:
    """Losses with evaluations between steps and of a reloaded first step, and elements of secondary
    partitions.
    """
    from toolkit.engine.build import open_initial_weights

    engine, plan = make(case, rank), case.plan()
    assert isinstance(engine, DeepSpeedEngine)
    losses = []
    for step in range(3):
        engine.eval_step(rank_samples(engine, plan, 100, rank))
        losses += [result.loss for result in steps(engine, case, rank, step, step + 1)]
    engine.eval_step(rank_samples(engine, plan, 100, rank))
    copies = sum(parameter.ds_secondary_tensor.numel() for parameter in engine._ds.module.parameters())
    engine.load(open_initial_weights(plan))
    losses += [result.loss for result in steps(engine, case, rank, 0, 1)]
    engine.close()
    return losses, copies


@pytest.mark.parametrize("threshold", quick([0, 5000]))
def test_evaluation_and_reload_leave_no_stale_partitions(threshold: int, pool: RankPool) -> None:
    case = hpz(2, threshold=threshold, optim__lr=LR)
    losses, copies = pool.run(evaluate_and_reload, case, ranks=4)[0]
    right = reference(case.reference()).losses[:3]
    assert losses == pytest.approx([*right, right[0]], abs=TOLERANCE.loss)
    more = tuple((key, value) for key, value in case.more if key != "zero__hpz_partition_size")
    plain = replace(case, more=more).plan().memory
    assert plain is not None
    planned = case.plan().memory
    assert planned is not None
    assert planned.parameters - plain.parameters == 4 * copies, (
        "the plan counts what the copies take, in fp32"
    )
