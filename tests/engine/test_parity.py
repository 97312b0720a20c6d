"""ZeRO 0 to 3 compared with the local engine, with other numbers of ranks and micro-batches than
test_matrix.py, and offload.

    pytest tests/engine/test_parity.py             offload, families, controls
    pytest tests/engine/test_parity.py -m full     stage x offload, with other ranks, batches and families

fp32, the same samples, |loss difference| <= 1e-5, gradient norm within 1e-4. With AdamW and
clipping, and with SGD without: Adam and clipping hide wrong scales of gradients. Samples have different
numbers of unmasked tokens, so that a mean of means would show. Controls break one thing each and must be ten
tolerances away.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.cases import CHECKPOINTING, OFFLOAD, OFFLOAD_ALL, SGD, Cell, cell, quick, trace
from tests.engine.checks import check_cell, doubling, duplicating, far
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import RunTrace
from toolkit.testing.tiny import FAMILIES

QUICK = [cell(2, **OFFLOAD), cell(3, **OFFLOAD_ALL), cell(0, family="mixtral")]


def further() -> Iterator[Cell]:
    """Ranks and micro-batches of every stage and offload; in turn the optimizers and the families."""
    offloads: list[tuple[int, dict[str, Any]]] = [(stage, {}) for stage in range(4)]
    offloads += [(1, OFFLOAD), (2, OFFLOAD), (3, OFFLOAD), (3, OFFLOAD_ALL)]
    turns: tuple[dict[str, Any], ...] = ({}, SGD)
    families = itertools.cycle(family for family in FAMILIES if family != "llama")
    for number, (stage, offload) in enumerate(offloads):
        now, other = turns[number % 2], turns[1 - number % 2]
        yield cell(stage, 2, 1, **now, **offload)
        yield cell(stage, 4, 1, **other, **offload)
        yield cell(stage, 4, 2, **now, **offload)
        yield cell(stage, 2, 2, next(families), **other, **offload)
        yield cell(stage, 2, 2, next(families), **now, **offload)
    yield from (cell(stage, **CHECKPOINTING) for stage in (2, 3))


CELLS = [*QUICK, *(case for case in further() if case not in QUICK)]


@pytest.mark.parametrize("case", quick(CELLS, *range(len(QUICK))), ids=str)
def test_zero_matches_local(case: Cell, pool: RankPool) -> None:
    check_cell(case, pool)


def decaying(rank: int, ranks: int, case: Cell) -> RunTrace:
    """Weight decay on every parameter, including norms and biases."""
    from toolkit.engine.deepspeed import build as deepspeed_build

    right = deepspeed_build.module_groups

    def wrong(*arguments: Any) -> Any:
        return [{**group, "weight_decay": 0.1} for group in right(*arguments)]

    deepspeed_build.module_groups = wrong
    try:
        return trace(rank, ranks, case)
    finally:
        deepspeed_build.module_groups = right


def test_control_doubled_gradients(pool: RankPool) -> None:
    case = cell(**SGD)
    far(pool.run(doubling, case, ranks=2)[0], case)


@pytest.mark.full
def test_control_no_clipping(pool: RankPool) -> None:
    far(pool.run(trace, cell(optim__clip=0.0), ranks=2)[0], cell())


@pytest.mark.parametrize("case", quick([cell(), cell(**SGD)], 0), ids=str)
def test_control_duplicated_micro_batch(case: Cell, pool: RankPool) -> None:
    far(pool.run(duplicating, case, ranks=2)[0], case)


@pytest.mark.full
def test_control_decay_of_norms(pool: RankPool) -> None:
    far(pool.run(decaying, cell(), ranks=2)[0], cell())
