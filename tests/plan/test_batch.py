"""Global batches: divisibility, and the batch size ramp against a slow reference loop.

pytest tests/plan/test_batch.py
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.cases import run_config
from toolkit.config.schema import BatchRampConfig, TrainConfig
from toolkit.errors import PlanError
from toolkit.plan.batch import continue_batch, plan_batch, ramp_stages
from toolkit.plan.types import GlobalBatch


def slow_sizes(train: TrainConfig, steps: int) -> list[int]:
    """Reference: the size of each batch from the number of consumed samples."""
    ramp, sizes, consumed = train.batch_ramp, [], 0
    for _ in range(steps):
        if ramp.start is None:
            size = train.global_batch
        else:
            assert ramp.increment is not None
            assert ramp.samples is not None
            increments = (train.global_batch - ramp.start) // ramp.increment
            size = ramp.start + ramp.increment * min(increments, consumed * increments // ramp.samples)
        sizes.append(size)
        consumed += size
    return sizes


@st.composite
def ramps(draw: st.DrawFn) -> TrainConfig:
    unit, increments = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    start, increment = unit * draw(st.integers(1, 5)), unit * draw(st.integers(1, 5))
    ramp = BatchRampConfig(start=start, increment=increment, samples=draw(st.integers(1, 3000)))
    return TrainConfig(global_batch=start + increments * increment, batch_ramp=ramp)


@given(ramps())
@settings(max_examples=150, deadline=None)
def test_ramp_equals_the_slow_loop(train: TrainConfig) -> None:
    stages = ramp_stages(train)
    plan = plan_batch(
        run_config(
            train__global_batch=train.global_batch, train__batch_ramp=train.batch_ramp, train__micro_batch=1
        ),
        1,
    )
    assert plan.stages == stages
    sizes = slow_sizes(train, 300)
    consumed = 0
    for step, size in enumerate(sizes):
        assert plan.at(step) == GlobalBatch(step, consumed, size, size)
        consumed += size
    assert stages[-1].steps is None
    assert stages[-1].size == train.global_batch


@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_indivisible_batches_are_refused_with_a_divisible_one(
    micro: int, ranks: int, accumulation: int
) -> None:
    size = micro * ranks * accumulation
    plan = plan_batch(run_config(train__global_batch=size, train__micro_batch=micro), ranks)
    assert plan.at(7) == GlobalBatch(7, 7 * size, size, accumulation)
    if micro * ranks > 1:
        with pytest.raises(PlanError) as caught:
            plan_batch(run_config(train__global_batch=size + 1, train__micro_batch=micro), ranks)
        problem = caught.value.problems[0]
        assert problem.key == "train.global_batch"
        for word in problem.remedy.replace(",", "").split():
            if word.startswith("train.global_batch="):
                plan_batch(
                    run_config(train__global_batch=int(word.split("=")[1]), train__micro_batch=micro), ranks
                )


def test_default_micro_batch_needs_no_accumulation() -> None:
    plan = plan_batch(run_config(train__global_batch=24, train__micro_batch=None), 8)
    assert (plan.micro_batch, plan.at(0).accumulation) == (3, 1)


@pytest.mark.parametrize(
    "ramp",
    [
        BatchRampConfig(start=4),
        BatchRampConfig(start=4, increment=4),
        BatchRampConfig(start=8, increment=4, samples=10),
        BatchRampConfig(start=4, increment=3, samples=10),
        BatchRampConfig(start=0, increment=4, samples=10),
        BatchRampConfig(start=4, increment=4, samples=0),
        BatchRampConfig(start=3, increment=5, samples=10),
    ],
)
def test_invalid_ramps_are_refused(ramp: BatchRampConfig) -> None:
    with pytest.raises(PlanError) as caught:
        plan_batch(run_config(train__batch_ramp=ramp, train__micro_batch=2), 2)
    assert caught.value.problems[0].key == "train.batch_ramp"
    assert caught.value.problems[0].remedy


def test_ramp_skips_sizes_of_parts_within_one_step() -> None:
    """With parts of 5 samples and batches of 10 and more, each step passes at least one part."""
    stages = ramp_stages(
        TrainConfig(global_batch=40, batch_ramp=BatchRampConfig(start=10, increment=10, samples=15))
    )
    assert [stage.size for stage in stages] == [10, 30, 40]


@given(ramp=st.integers(1, 60), step=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_resumed_ramp_continues_unchanged(ramp: int, step: int) -> None:
    """A run that resumes from a checkpoint has the same batches as without the interruption."""
    train = TrainConfig(global_batch=16, batch_ramp=BatchRampConfig(start=4, increment=4, samples=ramp))
    batch = plan_batch(
        run_config(train__global_batch=16, train__batch_ramp=train.batch_ramp, train__micro_batch=1), 1
    )
    assert continue_batch(batch, train, batch.stages, step, batch.at(step).first_sample) == batch
