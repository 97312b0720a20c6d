"""The plan's memory compared with DeepSpeed's tensors on each rank: parameters, gradients, optimizer states,
within 1%.

    pytest tests/engine/test_memory.py
    pytest tests/engine/test_memory.py -m full

toolkit/plan/memory.py defines what each figure counts. Storages are counted once, regardless of the number of
views.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.engine.cases import BF16, CONTEXT, EXPERT, TENSOR, Cell, cell, make, quick, steps
from tests.engine.memory_measures import SIZES, Bytes, gradients, states, weights
from toolkit.engine.deepspeed.engine import DeepSpeedEngine
from toolkit.testing.dist import RankPool


def measure(rank: int, ranks: int, case: Cell) -> tuple[Bytes, Any]:
    engine = make(case, rank)
    assert isinstance(engine, DeepSpeedEngine)
    most = 0
    after_backward = engine._ds._backward_epilogue

    def look() -> None:
        nonlocal most
        most = max(most, sum(gradients(engine).values()))
        after_backward()  # reduces; afterwards ZeRO 2 keeps only its part of the gradients
        most = max(most, sum(gradients(engine).values()))

    engine._ds._backward_epilogue = look
    steps(engine, case, rank, 0, 2)
    parameter_bytes = weights(engine)
    found = Bytes(
        sum(parameter_bytes.values()),
        most,
        sum(size for address, size in states(engine).items() if address not in parameter_bytes),
    )
    engine.close()
    return found, case.plan().memory


PRECISIONS: tuple[dict[str, Any], ...] = ({}, BF16)
CORE = [
    cell(stage, 2, 2, **SIZES, **precision)
    for stage, precision in itertools.product(range(4), PRECISIONS)
    if stage or not precision  # stage 0 is fp32 only
]
# Other ranks and micro-batches with every stage; the precisions alternate.
FURTHER = [
    cell(stage, ranks, accumulation, **SIZES, **PRECISIONS[(stage + number) % 2 if stage else 0])
    for stage in range(4)
    for number, (ranks, accumulation) in enumerate(((1, 2), (4, 1), (2, 1), (4, 2)))
]


# One axis in addition to data, with a vocabulary that the tensor axis divides.
EXPERTS = {
    "model__hidden_size": 64,
    "model__intermediate_size": 96,
    "model__num_hidden_layers": 4,
    "model__vocab_size": 1501,
}
AXES = {
    "tensor": cell(1, 2, 2, **TENSOR, **{**SIZES, "model__vocab_size": 1502}),
    "context": cell(2, 2, 2, **CONTEXT, **SIZES),
    "expert": cell(1, 2, 2, "mixtral", **EXPERT, **EXPERTS),
    "expert-of-four": cell(2, 4, 2, "mixtral", **EXPERT, **EXPERTS),
}


def brief(case: Cell) -> str:
    precision = case.plan().config.precision.name.value
    return f"zero{case.stage}-{case.ranks}ranks-{case.accumulation}accumulated-{precision}"


@pytest.mark.parametrize("case", quick([*CORE, *FURTHER], 3, 5), ids=brief)
def test_memory_matches_the_plan(case: Cell, pool: RankPool) -> None:
    check(case, pool)


@pytest.mark.parametrize("axis", quick(AXES, 0, 2))
def test_memory_with_a_second_axis_matches_the_plan(axis: str, pool: RankPool) -> None:
    check(AXES[axis], pool)


def check(case: Cell, pool: RankPool) -> None:
    """The plan is that of the fullest rank."""
    measured = pool.run(measure, case, ranks=case.ranks)
    plan = measured[0][1]
    for name in ("parameters", "gradients", "optimizer"):
        most = max(getattr(found, name) for found, _ in measured)
        assert most == pytest.approx(getattr(plan, name), rel=0.01), (
            f"{name}: measured {most}, planned {getattr(plan, name)}"
        )
