"""Where a step's time goes, on both engines in every layout: through the real loop, with delays put where they can be found again.

pytest tests/engine/test_ledger.py
pytest tests/engine/test_ledger.py -m full
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.engine.ledger_cases import Measured, bubble, calls_of, measure
from toolkit.config.schema import EngineName
from toolkit.layout.axes import EXPERT
from toolkit.monitor.step_parts import (
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
TRIES = 4
ASLEEP = 0.06  # seconds of forward and of backward: steps in which little is computed
MOST_UNEXPLAINED = 0.05


def small(cell: Cell, accumulation: int = 1, **more: Any) -> RunPlan:
    """For steps that mostly sleep."""
    return cell.plan(Case.ADAM, train__global_batch=2 * accumulation * cell.data, **more)


def large(cell: Cell) -> RunPlan:
    """Steps of more than 100 ms."""
    return small(
        cell,
        4,
        model__hidden_size=128,
        model__intermediate_size=256,
        model__num_hidden_layers=4,
        model__max_position_embeddings=128,
        train__sequence_length=128,
    )


def within(measured: list[Measured], parts: tuple[str, ...]) -> dict[tuple[int, str], float]:
    """Rank and part of each delay that is not found where it was put, and how much of it is there."""
    found = {(rank, part): one.landed(part) for rank, one in enumerate(measured) for part in parts}
    return {place: share for place, share in found.items() if abs(share - 1) > WITHIN}


def check_delays(run: Callable[[float], list[Measured]], parts: tuple[str, ...]) -> None:
    """With longer and longer steps, where other processes disturb: a delay that is counted elsewhere is never found."""
    missing: dict[tuple[int, str], float] = {}
    for attempt in range(TRIES):
        measured = run(ASLEEP * 2**attempt)
        check_sums(measured)
        found = within(measured, parts)
        missing = {place: share for place, share in found.items() if attempt == 0 or place in missing}
        if not missing:
            break
    assert not missing, missing


def check_sums(measured: list[Measured]) -> None:
    for one in measured:
        assert [found.step for found in one.times] == list(range(1, len(one.times) + 1))
        for found in one.times:
            assert sum(found.parts.values()) == pytest.approx(found.wall)
            assert min(found.parts.values()) >= -1e-9
            waited = sum(
                seconds
                for part, seconds in found.parts.items()
                if part in (BUBBLE, DATA) or part.startswith("communication/")
            )
            assert found.busy == pytest.approx(found.wall - waited)


def check_counted(measured: list[Measured], parts: tuple[str, ...]) -> None:
    """Each delay is in its part, and nothing anywhere else."""
    for one in measured:
        for found, delayed in zip(one.times, one.delayed, strict=True):
            assert {part: seconds for part, seconds in found.parts.items() if seconds} == (
                {delayed: 1.0} if delayed else {}
            )
        assert set(one.delayed) == {None, *parts}


def test_every_part_of_one_rank(pool: RankPool) -> None:
    parts = (*COMPUTED, *LOOP)
    check_counted(
        pool.run(partial(measure, around=True, counted=True), small(LOCAL), parts, 1, ranks=1), parts
    )


@pytest.mark.parametrize("name", ["deepspeed-dp2-zero3", "megatron-tp2"])
def test_communication_and_its_control(name: str, pool: RankPool) -> None:
    """Without the replaced methods nothing is communication: what computes has it."""
    cell, axes = LAYOUTS[name]
    parts = (*COMPUTED, *map(communication, axes))
    check_counted(pool.run(partial(measure, counted=True), small(cell), parts, 1, ranks=2), parts)
    for one in pool.run(partial(measure, counted=True, replaced=False), small(cell), parts, 1, ranks=2):
        assert not any(part.startswith("communication") for found in one.times for part in found.parts)
        assert all(
            found.wall == (delayed is not None) for found, delayed in zip(one.times, one.delayed, strict=True)
        )


def test_a_slow_stage_is_the_others_bubble(pool: RankPool) -> None:
    """The last stage's forward is delayed; to the first one the whole delay is waiting for it."""
    cell, _ = LAYOUTS["megatron-pp2"]
    check_slow_stage(
        lambda asleep: pool.run(partial(measure, asleep=asleep), small(cell), (BUBBLE,), 2, ranks=2)
    )


def check_slow_stage(run: Callable[[float], list[Measured]]) -> None:
    shares: list[tuple[float, float]] = []
    for attempt in range(TRIES):
        first, last = run(ASLEEP * 2**attempt)
        check_sums([first, last])
        shares.append((first.landed(BUBBLE), last.landed(FORWARD, BUBBLE)))
        if all(abs(share - 1) <= WITHIN for share in shares[-1]):
            return
    raise AssertionError(f"bubble of the first stage, forward of the last one: {shares}")


def test_the_last_calls_of_each_group(pool: RankPool) -> None:
    cell, _ = LAYOUTS["megatron-tp2"]
    for calls in pool.run(calls_of, small(cell, 1), ranks=2):
        begun = [call for call in calls if call[1] == "all_reduce [3, 5] float32"]
        assert [(axis, over) for axis, _, _, over in begun] == [("tensor", False), ("tensor", True)]
        assert all(over for _, what, _, over in calls if what != begun[0][1])
        numbers = [number for axis, _, number, _ in calls]
        assert max(numbers) > 8
        assert len(calls) > 16


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str, pool: RankPool) -> None:
    """A fifth of a step put into each part is there. What the loop does is the same in all layouts: one of each engine shows it."""
    cell, axes = LAYOUTS[name]
    piped, around = cell.pipeline > 1, name.endswith("dp2-zero1")
    own = (*COMPUTED, *(communication(axis) for axis in axes if not piped), *(LOOP if around else ()))
    check_delays(
        lambda asleep: pool.run(
            partial(measure, around=around, asleep=asleep), small(cell), own, 3, ranks=cell.ranks
        ),
        own,
    )
    if piped:
        check_slow_stage(
            lambda asleep: pool.run(
                partial(measure, asleep=asleep), small(cell), (BUBBLE,), 3, ranks=cell.ranks
            )
        )


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_little_is_unexplained_and_losses_are_the_same_to_the_bit(name: str, pool: RankPool) -> None:
    cell, _ = LAYOUTS[name]
    recorded = pool.run(measure, large(cell), ranks=cell.ranks)
    alone = pool.run(partial(measure, recorded=False), large(cell), ranks=cell.ranks)
    assert len(recorded[0].losses) == 6
    assert [one.losses for one in recorded] == [one.losses for one in alone]
    assert all(one.times and not other.times for one, other in zip(recorded, alone, strict=True))
    for one in recorded:
        assert one.unexplained() <= MOST_UNEXPLAINED, f"{one.unexplained():.1%}"


PIPELINES: dict[str, tuple[Cell, int, int]] = {  # stages, chunks of a stage
    "deepspeed-pp2": (deepspeed("llama", 1, pipeline=2), 2, 1),
    "deepspeed-pp4": (deepspeed("llama", 1, pipeline=4, layers=4), 4, 1),
    "megatron-pp2": (megatron("llama", pipeline=2), 2, 1),
    "megatron-pp4": (megatron("llama", pipeline=4, layers=4), 4, 1),
    "megatron-pp2-vpp2": (megatron("llama", pipeline=2, layers=4, own=VPP), 2, 2),
    "deepspeed-gpt2-pp2": (
        deepspeed("gpt2", 1, pipeline=2),
        2,
        1,
    ),  # tied embeddings: the last stage waits for the first one's gradients
    "megatron-pp2-dp2": (megatron("llama", pipeline=2, data=2, zero=1), 2, 1),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PIPELINES)
def test_the_bubble_of_equal_stages(name: str, pool: RankPool) -> None:
    """(p - 1) / (v m), within two points."""
    cell, stages, chunks = PIPELINES[name]
    micro_batches = 8
    plan = small(cell, micro_batches)
    ideal = (stages - 1) / (chunks * micro_batches)
    tried: list[float] = []
    while not tried or abs(tried[-1] - ideal) > 0.02:
        assert len(tried) < TRIES, f"{tried}, not {ideal}"
        steps = pool.run(bubble, plan, ASLEEP * 2 ** len(tried) / chunks, 4, ranks=cell.ranks)
        tried.append(statistics.mean(map(min, steps)))  # what else the machine does only adds
