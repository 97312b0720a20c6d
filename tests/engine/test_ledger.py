"""Where a step's time goes, on both engines in every layout: through the real loop, with delays put where they can be found again.

    pytest tests/engine/test_ledger.py
    pytest tests/engine/test_ledger.py -m full
"""

from __future__ import annotations

import statistics
from functools import partial

import pytest

from tests.engine.ledger_cases import Measured, bubble, calls_of, measure
from toolkit.config.schema import EngineName
from toolkit.layout.axes import EXPERT
from toolkit.monitor.parts import (
    BACKWARD,
    BUBBLE,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    LOGGING,
    OPTIMIZER,
    TRANSFER,
    UNEXPLAINED,
    communication,
)
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import VPP, Case, Cell, deepspeed, megatron

LOCAL = Cell(engine=EngineName.local, family="llama")
LAYOUTS: dict[str, tuple[Cell, tuple[str, ...]]] = {  # and along which axes there is communication
    "local": (LOCAL, ()),
    "deepspeed-dp2-zero1": (deepspeed("llama", 1, data=2), ("data",)),
    "deepspeed-dp2-zero3": (deepspeed("llama", 3, data=2), ("data",)),
    "deepspeed-tp2": (deepspeed("llama", 1, tensor=2), ("tensor",)),
    "deepspeed-cp2": (deepspeed("llama", 1, context=2), ("context",)),
    "deepspeed-pp2": (deepspeed("llama", 1, pipeline=2), ("pipeline",)),
    "deepspeed-dp2-ep2": (deepspeed("mixtral", 1, data=2, expert=2), ("data", EXPERT)),
    "megatron-dp2-zero1": (megatron("llama", data=2, zero=1), ("data",)),
    "megatron-tp2": (megatron("llama", tensor=2), ("tensor",)),
    "megatron-cp2": (megatron("llama", context=2), ("context",)),
    "megatron-pp2": (megatron("llama", pipeline=2), ("pipeline",)),
    "megatron-dp2-ep2": (megatron("mixtral", data=2, expert=2), ("data", EXPERT)),
    "megatron-tp2-dp2": (megatron("llama", tensor=2, data=2, zero=1), ("tensor", "data", "all")),
}
COMPUTED = (FORWARD, BACKWARD, OPTIMIZER)
LOOP = (DATA, TRANSFER, CHECKPOINT, EVALUATION, LOGGING, UNEXPLAINED)
WITHIN = 0.1  # of a delay
MOST_UNEXPLAINED = 0.05


def plan_of(cell: Cell, accumulation: int = 4, **more: Any) -> RunPlan:
    """Steps of more than 100 ms."""
    sizes = {
        "model__hidden_size": 128, "model__intermediate_size": 256, "model__num_hidden_layers": 4, "model__max_position_embeddings": 128,
        "train__sequence_length": 128, "train__micro_batch": 2, "train__global_batch": 2 * accumulation * cell.data, **more,
    }
    return cell.plan(Case.ADAM, **sizes)


def check_delays(measured: list[Measured], parts: tuple[str, ...]) -> None:
    for rank, one in enumerate(measured):
        for part in parts:
            assert abs(one.landed(part) - 1) <= WITHIN, f"rank {rank}: {one.landed(part):.3f} of {one.seconds * 1e3:.1f} ms are in {part}"


def check_sums(measured: list[Measured]) -> None:
    for one in measured:
        assert [found.step for found in one.times] == list(range(1, len(one.times) + 1))
        for found in one.times:
            assert sum(found.parts.values()) == pytest.approx(found.wall)
            assert min(found.parts.values()) >= -1e-9
            waited = sum(seconds for part, seconds in found.parts.items() if part in (BUBBLE, DATA) or part.startswith("communication/"))
            assert found.busy == pytest.approx(found.wall - waited)


def test_every_part_of_one_rank(pool: RankPool) -> None:
    found = pool.run(partial(measure, around=True), plan_of(LOCAL), (*COMPUTED, *LOOP), 3, ranks=1)
    check_sums(found)
    check_delays(found, (*COMPUTED, *LOOP))


def test_a_slow_stage_is_the_others_bubble(pool: RankPool) -> None:
    """The last stage's forward is delayed; to the first one the whole delay is waiting for it."""
    cell, _ = LAYOUTS["megatron-pp2"]
    first, last = pool.run(measure, plan_of(cell), (BUBBLE,), 3, ranks=2)
    check_sums([first, last])
    assert abs(first.landed(BUBBLE) - 1) <= WITHIN, first.landed(BUBBLE)
    assert abs(last.landed(FORWARD, BUBBLE) - 1) <= WITHIN, last.landed(FORWARD, BUBBLE)


def test_communication_and_its_control(pool: RankPool) -> None:
    """Without the replaced methods nothing is communication, and backward has it."""
    cell, _ = LAYOUTS["deepspeed-dp2-zero1"]
    part = communication("data")
    found = pool.run(measure, plan_of(cell), (part,), 3, ranks=2)
    control = pool.run(partial(measure, replaced=False), plan_of(cell), (part,), 3, ranks=2)
    check_delays(found, (part,))
    for one in found:
        assert one.median(part) > 0
    for one in control:
        assert all(name != part for time in one.times for name in time.parts)


def test_the_last_calls_of_each_group(pool: RankPool) -> None:
    cell, _ = LAYOUTS["megatron-tp2"]
    for calls in pool.run(calls_of, plan_of(cell, accumulation=1), ranks=2):
        begun = [call for call in calls if call[1] == "all_reduce [3, 5] float32"]
        assert [(axis, over) for axis, _, _, over in begun] == [("tensor", False), ("tensor", True)]
        assert all(over for _, what, _, over in calls if what != begun[0][1])
        numbers = [number for axis, _, number, _ in calls]
        assert max(numbers) > 8
        assert len(calls) > 16


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str, pool: RankPool) -> None:
    """Little is unexplained, and a fifth of a step put into each part is there."""
    cell, axes = LAYOUTS[name]
    piped = cell.pipeline > 1
    communicated = () if piped else tuple(communication(axis) for axis in axes)
    delayed = (*COMPUTED, *communicated, *([BUBBLE] if piped else []), *LOOP)
    found = pool.run(partial(measure, around=True), plan_of(cell), delayed, 4, ranks=cell.ranks, timeout=240)
    check_sums(found)
    for one in found:
        assert one.unexplained() <= MOST_UNEXPLAINED, f"{one.unexplained():.1%}"
    check_delays(found, (*communicated, *LOOP))
    if not piped:
        check_delays(found, COMPUTED)
    else:
        assert abs(found[0].landed(BUBBLE) - 1) <= WITHIN, found[0].landed(BUBBLE)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_the_same_to_the_bit(name: str, pool: RankPool) -> None:
    cell, _ = LAYOUTS[name]
    plan = plan_of(cell, accumulation=2)
    recorded = pool.run(measure, plan, ranks=cell.ranks)
    alone = pool.run(partial(measure, recorded=False), plan, ranks=cell.ranks)
    assert [one.losses for one in recorded] == [one.losses for one in alone]
    assert len(recorded[0].losses) == 6
    assert all(one.times and not other.times for one, other in zip(recorded, alone, strict=True))


PIPELINES: dict[str, tuple[Cell, int, int]] = {  # stages, chunks of a stage
    "deepspeed-pp2": (deepspeed("llama", 1, pipeline=2), 2, 1),
    "deepspeed-pp4": (deepspeed("llama", 1, pipeline=4, layers=4), 4, 1),
    "megatron-pp2": (megatron("llama", pipeline=2), 2, 1),
    "megatron-pp4": (megatron("llama", pipeline=4, layers=4), 4, 1),
    "megatron-pp2-vpp2": (megatron("llama", pipeline=2, layers=4, own=VPP), 2, 2),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PIPELINES)
def test_the_bubble_of_equal_stages(name: str, pool: RankPool) -> None:
    """(p - 1) / (v m), within two points."""
    cell, stages, chunks = PIPELINES[name]
    micro_batches = 8
    plan = plan_of(cell, micro_batches, model__num_hidden_layers=cell.layers, model__hidden_size=64, train__sequence_length=32)
    found = pool.run(bubble, plan, 0.05 / chunks, 5, ranks=cell.ranks)
    measured = statistics.mean(statistics.median(steps) for steps in found)
    ideal = (stages - 1) / (chunks * micro_batches)
    assert abs(measured - ideal) <= 0.02, f"{measured:.4f} of {ideal:.4f}: {found}"
