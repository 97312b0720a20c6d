"""ZeRO 0-3 against the local engine: 20 steps, fp32, the same samples, |loss difference| <= 1e-5, gradient norm within 1e-4.

    pytest tests/engine/test_parity.py             the core
    pytest tests/engine/test_parity.py -m full     every family x stage x ranks x accumulation x offload x optimizer

With AdamW and clipping, and with SGD without: Adam and clipping hide wrong scales of gradients. Samples have different numbers
of unmasked tokens, so that a mean of means would show. Each control breaks one thing and must leave the tolerance tenfold.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.engine import cases
from tests.engine.cases import Cell, DoubledGradients, Trace, micro_batches
from tests.engine.pool import Pool
from toolkit.engine.protocol import MicroBatch

LOSS, NORM, WEIGHT = 1e-5, 1e-4, 1e-5
SGD: dict[str, Any] = {"optimizer": "sgd", "clip": 0.0, "lr": 0.3}
OFF: dict[str, Any] = {"optimizer_place": "cpu"}
ALL_OFF: dict[str, Any] = {**OFF, "parameter_place": "cpu", "stage": 3}

CORE = [
    *(Cell(stage=stage, accumulation=accumulation) for stage in range(4) for accumulation in (1, 2)),
    *(Cell(stage=stage, **SGD) for stage in range(4)),
    *(Cell(stage=stage, ranks=4) for stage in range(4)),
    *(Cell(stage=stage, **OFF) for stage in (1, 2, 3)),
    Cell(**ALL_OFF),
    Cell(stage=3, ranks=4, accumulation=1, **SGD, **OFF),
    *(Cell(stage=stage, family="gpt2") for stage in (2, 3)),
    *(Cell(stage=stage, family="qwen2") for stage in (1, 3)),
    *(Cell(stage=stage, family="mixtral") for stage in (0, 3)),
    *(Cell(stage=stage, checkpointing=True) for stage in (2, 3)),
]


def everything() -> Iterator[Cell]:
    places = [*({"stage": stage} for stage in range(4)), *({"stage": stage, **OFF} for stage in (1, 2, 3)), ALL_OFF]
    for family, place, ranks, accumulation, optimizer in itertools.product(cases.FAMILIES, places, (2, 4), (1, 2), ({}, SGD)):
        yield Cell(family=family, ranks=ranks, accumulation=accumulation, **place, **optimizer)


@cache
def oracle(cell: Cell) -> Trace:
    """``cell`` is an oracle's own."""
    trace = cases.train(0, 1, cell)
    assert trace.losses[0] - trace.losses[-1] >= 0.3, f"the cell proves nothing: its loss falls by {trace.losses[0] - trace.losses[-1]:.2f}"
    return trace


@pytest.mark.parametrize("cell", CORE, ids=str)
def test_core(cell: Cell, pool: Pool) -> None:
    check(cell, pool)


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in everything() if cell not in CORE], ids=str)
def test_everything(cell: Cell, pool: Pool) -> None:
    check(cell, pool)


def check(cell: Cell, pool: Pool) -> None:
    loss, norm, weight = pool.run(cell.ranks, cases.train, cell)[0].distance(oracle(cell.oracle()))
    assert loss <= LOSS, f"loss differs by {loss:.1e}"
    assert norm <= NORM, f"gradient norm differs by {norm:.1e}"
    assert weight <= WEIGHT, f"weights differ by {weight:.1e}"


def duplicated(step: int, rank: int, ranks: int, accumulation: int) -> list[MicroBatch]:
    """Rank 1 sees rank 0's first micro-batch instead of its own."""
    mine = micro_batches(step, rank, ranks, accumulation)
    return [micro_batches(step, 0, ranks, accumulation)[0], *mine[1:]] if rank == 1 else mine


def decaying(rank: int, ranks: int, cell: Cell) -> Trace:
    """Weight decay on every parameter, norms and biases too."""
    from toolkit.engine import deepspeed_build

    right = deepspeed_build.parameter_groups

    def wrong(*arguments: Any) -> Any:
        return [{**group, "weight_decay": cell.weight_decay} for group in right(*arguments)]

    deepspeed_build.parameter_groups = wrong
    try:
        return cases.train(rank, ranks, cell)
    finally:
        deepspeed_build.parameter_groups = right


def test_control_doubled_gradients(pool: Pool) -> None:
    cell = Cell(**SGD)
    assert_far(pool.run(2, cases.train, cell, 20, DoubledGradients())[0], cell)


def test_control_no_clipping(pool: Pool) -> None:
    assert_far(pool.run(2, cases.train, Cell(clip=0.0))[0], Cell(), norms=False)


def test_control_duplicated_micro_batch(pool: Pool) -> None:
    for cell in (Cell(), Cell(**SGD)):
        assert_far(pool.run(2, cases.train, cell, 20, None, duplicated)[0], cell)


def test_control_decay_of_norms(pool: Pool) -> None:
    """Shown in the weights that must not decay and in the losses."""
    assert_far(pool.run(2, decaying, Cell())[0], Cell(), norms=False)


def assert_far(trace: Trace, cell: Cell, *, norms: bool = True) -> None:
    loss, norm, _ = trace.distance(oracle(cell.oracle()))
    print(f"loss {loss:.1e} norm {norm:.1e}")
    assert loss > 10 * LOSS, f"the control's loss differs by {loss:.1e} only"
    assert not norms or norm > 10 * NORM, f"the control's gradient norm differs by {norm:.1e} only"


