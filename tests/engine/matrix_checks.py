"""Run cells of the parity matrix and deliberately wrong variants of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

from toolkit.plan.types import Device, RunPlan
from toolkit.testing import parity
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import TOLERANCE, Cell, OptimizerCase, select_cells
from toolkit.testing.measure import Measured, measure
from toolkit.testing.verify import ParityVerdict, judge, measure_cell

# The losses of models with two layers fall by REQUIRED_FALL in half of the steps of launch/verify.py.
STEPS = 11
CONTROL_STEPS = 5  # of runs whose mistake shows early


def measured(cell: Cell, case: OptimizerCase, pool: RankPool) -> Measured:
    slow = case is OptimizerCase.ADAM and (cell.layers > 2 or cell.idle)
    return measure_cell(cell, case, pool, Device.CPU, parity.STEPS if slow else STEPS)


def named(name: str) -> Cell:
    (cell,) = select_cells((name,))
    return cell


class References:
    """Runs each reference (family, sizes, optimizer) once."""

    def __init__(self, pool: RankPool) -> None:
        self.of = cache(lambda cell, case: measured(cell, case, pool))


def check(cell: Cell, case: OptimizerCase, pool: RankPool, references: References) -> None:
    verdict, cause, differences = judge(
        cell, measured(cell, case, pool), references.of(cell.reference(), case)
    )
    assert verdict.good, f"{verdict}: {cause}; {differences}"
    if verdict is ParityVerdict.FLIP:
        print(cause)


def right(plan: RunPlan) -> Any:
    return nullcontext()


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def wrong_on_rank(
    rank: int,
    ranks: int,
    plan: RunPlan,
    wrong: Callable[[RunPlan], Any],
    settings: dict[str, Any],
    steps: int,
) -> Measured:
    with wrong(plan):
        return measure(rank, ranks, plan, steps=steps, **settings)


def far(cell: Cell, case: OptimizerCase, found: Measured, references: References) -> None:
    """Assert a large difference of the loss itself; that of weights alone would be weaker evidence.

    The wrong run may have fewer steps than the reference.
    """
    right = references.of(cell.reference(), case).trace.losses
    loss = max(abs(a - b) for a, b in zip(found.trace.losses, right, strict=False))
    print(loss)
    assert loss > 10 * TOLERANCE.loss, (
        f"a wrong run passes as correct: {loss:.1e} against {TOLERANCE.loss:.0e}"
    )
