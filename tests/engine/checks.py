"""A cell against ``local``: right cells within the tolerance, wrong ones ten tolerances away."""

from __future__ import annotations

from functools import cache

from tests.engine.cases import SGD, Cell, trace
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import (
    Distance,
    DoubledGradients,
    RunTrace,
    check_control,
    check_parity,
    repeat_first_rank,
)

TOLERANCE = Distance(loss=1e-5, norm=1e-4, weight=1e-5)


@cache
def oracle(local: Cell) -> RunTrace:
    return trace(0, 1, local)


@cache
def doubled(local: Cell) -> RunTrace:
    """The oracle, wrong on purpose."""
    return trace(0, 1, local, task=DoubledGradients())


def check_cell(case: Cell, pool: RankPool) -> None:
    """All ranks give the same results. And a cell must be able to fail: with AdamW the oracle must learn; with SGD, which at a rate
    that does not diverge learns too little in 20 steps, the oracle with doubled gradients must be far."""
    traces = pool.run(trace, case, ranks=case.ranks)
    found, right = traces[0], oracle(case.oracle())
    print(found.distance(right))
    assert all(other.results == found.results for other in traces)
    if set(SGD) <= {key for key, _ in case.more}:
        check_control(doubled(case.oracle()), right, TOLERANCE)
        assert found.distance(right).times(TOLERANCE) <= 1, f"{found.distance(right)} against {TOLERANCE}"
    else:
        check_parity(found, right, TOLERANCE)


def doubling(rank: int, ranks: int, case: Cell) -> RunTrace:
    return trace(rank, ranks, case, task=DoubledGradients())


def duplicating(rank: int, ranks: int, case: Cell) -> RunTrace:
    return trace(rank, ranks, case, batches=repeat_first_rank)


def far(wrong: RunTrace, case: Cell) -> None:
    """In the loss itself: weights alone would be the weaker evidence."""
    distance = wrong.distance(oracle(case.oracle()))
    print(distance)
    assert distance.loss > 10 * TOLERANCE.loss, (
        f"a wrong run passes for right: {distance} against {TOLERANCE}"
    )
