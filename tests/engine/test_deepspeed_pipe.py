"""DeepSpeed's pipeline against the local engine: 20 steps, fp32, the same samples, |loss difference| <= 1e-5.

    pytest tests/engine/test_deepspeed_pipe.py             one cell of each kind, and the controls
    pytest tests/engine/test_deepspeed_pipe.py -m full     every family x stage x layout x optimizer, precisions, ramps, hops

Micro-batches have different numbers of unmasked tokens; several are in the pipeline at a time. Controls break one thing each: among
them, a stage that gets two micro-batches' activations in each other's place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.cases import (
    BF16,
    CHECKPOINTING,
    DROPOUT,
    FP16,
    SGD,
    Cell,
    WithoutMoments,
    cell,
    make,
    steps,
    trace,
)
from tests.engine.checks import TOLERANCE, check_cell, doubling, duplicating, far, oracle
from tests.engine.test_memory import Bytes, gradients, states, weights
from tests.engine.test_resume import assert_same, resume, save_and_go_on
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import StateReader
from toolkit.config.schema import BatchRampConfig
from toolkit.engine.deepspeed import pipeline_compat as deepspeed_pipe_compat
from toolkit.engine.deepspeed.pipeline import DeepSpeedPipelineEngine
from toolkit.engine.protocol import EvalResult, StepResult
from toolkit.plan.memory import stage_memory
from toolkit.plan.types import MemoryPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import Distance, Trace, check
from toolkit.testing.tiny import FAMILIES, micro_batches


def pipe(
    stage: int,
    stages: int = 2,
    data: int = 1,
    accumulation: int = 4,
    family: str = "llama",
    layers: int = 2,
    **more: Any,
) -> Cell:
    """With Adam at 2e-3, at which four blocks learn enough in twenty steps."""
    settings = {"parallel__pipeline": stages, "model__num_hidden_layers": layers, "optim__lr": 2e-3, **more}
    return cell(stage, stages * data, accumulation, family, **settings)


CORE = [
    pipe(0, family="qwen2", layers=3),  # tied embeddings, uneven stages, clipping without ZeRO
    pipe(1, **SGD),
    pipe(1, data=2, accumulation=2, family="gpt2", layers=3),
]


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"accumulation": 1, "train__micro_batch": 8, "train__global_batch": 8},
    {"data": 2, "accumulation": 2},
    {"stages": 4, "layers": 4},
    {"stages": 3, "layers": 4, "accumulation": 3},
    {"layers": 5, "optim__lr": 3e-3},
)


def everything() -> Iterator[Cell]:
    optimizers: tuple[dict[str, Any], ...] = ({}, SGD)
    for stage, optimizer in itertools.product((0, 1), optimizers):
        for family in FAMILIES:
            yield pipe(stage, family=family, layers=3, **optimizer)
        for family, layout in itertools.product(("llama", "gpt2"), LAYOUTS):
            yield pipe(stage, family=family, **{**layout, **optimizer})
    for family in FAMILIES:
        yield pipe(1, family=family, **CHECKPOINTING)
    yield pipe(0, data=2, layers=3, accumulation=3, **CHECKPOINTING)


@pytest.mark.parametrize("case", CORE, ids=str)
def test_core(case: Cell, pool: RankPool) -> None:
    check_cell(case, pool)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in everything() if case not in CORE], ids=str)
def test_everything(case: Cell, pool: RankPool) -> None:
    check_cell(case, pool)


# -- Controls


def swapping(rank: int, ranks: int, case: Cell) -> Trace:
    """Stage 1 takes two micro-batches' activations from the first stage before it uses either, and uses each as the other."""
    from deepspeed.runtime.pipe import p2p

    receive, kept = p2p.recv, list[torch.Tensor]()

    def swapped(tensor: torch.Tensor, source: int, **settings: Any) -> None:
        if rank != 1 or source != 0 or not tensor.is_floating_point() or not tensor.dim():
            receive(tensor, source, **settings)
        elif kept:
            tensor.copy_(kept.pop())
        else:
            receive(tensor, source, **settings)
            kept.append(tensor.clone())
            receive(tensor, source, **settings)

    p2p.recv = swapped
    try:
        return trace(rank, ranks, case)
    finally:
        p2p.recv = receive


def test_control_swapped_activations(pool: RankPool) -> None:
    """Of four stages the first sends twice before it waits for a gradient."""
    case = pipe(1, stages=4, layers=4, accumulation=2)
    far(pool.run(swapping, case, ranks=4)[0], case)


def test_control_doubled_gradients(pool: RankPool) -> None:
    case = pipe(1, **SGD)
    far(pool.run(doubling, case, ranks=2)[0], case)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_control_duplicated_micro_batch(stage: int, pool: RankPool) -> None:
    case = pipe(stage, data=2, accumulation=2)
    far(pool.run(duplicating, case, ranks=4)[0], case)


def unmended(rank: int, ranks: int, case: Cell) -> Trace:
    mend = deepspeed_pipe_compat.norm_of_all_stages
    deepspeed_pipe_compat.norm_of_all_stages = lambda engine: lambda: 0.0
    try:
        return trace(rank, ranks, case)
    finally:
        deepspeed_pipe_compat.norm_of_all_stages = mend


def test_control_norm_of_the_first_stage(pool: RankPool) -> None:
    """What DeepSpeed clips by without ZeRO."""
    case = CORE[0]
    far(pool.run(unmended, case, ranks=2)[0], case)


# -- Other precisions, batches, seeds


def traced(rank: int, ranks: int, case: Cell, steps: int) -> Trace:
    return trace(rank, ranks, case, steps=steps)


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [{}, {"engine__deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}}],
    ids=["bf16", "fp32-sums"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_bf16_follows_the_local_engine_in_bf16(family: str, more: dict[str, Any], pool: RankPool) -> None:
    case = pipe(1, family=family, layers=3, optim__lr=1e-3, **BF16, **more)
    distance = pool.run(trace, case, ranks=2)[0].distance(trace(0, 1, case.oracle()))
    print(distance)
    assert distance.times(Distance(loss=1e-3, norm=1.5e-2, weight=1e-3)) <= 1, distance


@pytest.mark.full
def test_fp16_skips_the_same_steps(pool: RankPool) -> None:
    """As ZeRO 1 on one rank: both add up micro-batches in fp16, which overflows a step before the fp32 sums of ``local``."""
    scaling = {"precision__initial_scale_power": 24, "precision__scale_window": 3}
    case = pipe(1, family="qwen2", **FP16, **scaling)
    found = pool.run(traced, case, 12, ranks=2)[0]
    right = pool.run(traced, cell(1, 1, 4, "qwen2", optim__lr=2e-3, **FP16, **scaling), 12, ranks=1)[0]
    assert [(result.skipped, result.loss_scale) for result in found.results] == [
        (r.skipped, r.loss_scale) for r in right.results
    ]
    assert {result.skipped for result in found.results} == {True, False}
    assert max(abs(a - b) for a, b in zip(found.losses, right.losses, strict=True)) <= 2e-4


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_batch_ramp(stage: int, pool: RankPool) -> None:
    ramp = BatchRampConfig(start=4, increment=2, samples=60)
    case = pipe(stage, train__global_batch=12, train__batch_ramp=ramp)
    plan = case.plan()
    assert len({plan.batch.at(step).accumulation for step in range(20)}) > 2
    check(pool.run(trace, case, ranks=2)[0], trace(0, 1, case.oracle()), TOLERANCE)


def results(rank: int, ranks: int, case: Cell, count: int = 4) -> list[StepResult]:
    engine = make(case, rank)
    found = steps(engine, case, rank, 0, count)
    engine.close()
    return found


def test_dropout_is_the_same_recomputed(pool: RankPool) -> None:
    """Backwards of earlier micro-batches run between the forwards of later ones, and recompute with the masks they had."""
    case = pipe(1, family="gpt2", **DROPOUT)
    kept = pool.run(results, case, ranks=2)[0]
    assert kept == pool.run(results, pipe(1, family="gpt2", **DROPOUT, **CHECKPOINTING), ranks=2)[0]
    assert kept != pool.run(results, pipe(1, family="gpt2"), ranks=2)[0]


def evaluated(rank: int, ranks: int, case: Cell) -> tuple[list[StepResult], EvalResult, EvalResult]:
    """Evaluation between steps, and again of shorter sequences in fewer micro-batches."""
    engine = make(case, rank)
    found = steps(engine, case, rank, 0, 2)
    batches = micro_batches(case.plan(), 7, case.plan().axes.coordinates(rank).data)
    whole = engine.eval_step(batches)
    short = engine.eval_step(
        [{name: tensor[:1, :9] for name, tensor in batch.items()} for batch in batches[:1]]
    )
    found += steps(engine, case, rank, 2, 4)
    if isinstance(engine, DeepSpeedPipelineEngine):
        assert engine._ds.timers.get_timers() == {}, "DeepSpeed keeps a time a step"
    engine.close()
    return found, whole, short


@pytest.mark.parametrize(
    "case",
    [
        pipe(1, family="qwen2"),
        pytest.param(pipe(0, data=2, layers=3, accumulation=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_evaluation(case: Cell, pool: RankPool) -> None:
    every = pool.run(evaluated, case, ranks=case.ranks)
    assert all(other == every[0] for other in every)
    went_on, whole, short = every[0]
    _, local_whole, local_short = evaluated(0, 1, case.oracle())
    assert whole.tokens == local_whole.tokens
    assert whole.loss_sum / whole.tokens == pytest.approx(local_whole.loss_sum / whole.tokens, abs=1e-5)
    if case.data == 1:
        assert short.loss_sum == pytest.approx(local_short.loss_sum, abs=1e-3)
        assert short.tokens == local_short.tokens
    assert went_on == pool.run(results, case, ranks=case.ranks)[0]


# -- State


GLOBAL = 4  # micro-batches of a step, in every layout
EACH = 6


def test_same_layout_to_the_bit(pool: RankPool, tmp_path: Path) -> None:
    check_to_the_bit(pipe(1, data=2, accumulation=2, family="gpt2", layers=3, **DROPOUT), pool, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        pipe(0, family="gpt2", **DROPOUT),
        pipe(1, family="qwen2", layers=3, **BF16),
        pipe(1, family="gpt2", **FP16),
        pipe(0, stages=4, layers=4),
        pipe(1, **SGD, optim__momentum=0.9),
    ],
    ids=str,
)
def test_more_same_layouts_to_the_bit(case: Cell, pool: RankPool, tmp_path: Path) -> None:
    check_to_the_bit(case, pool, tmp_path)


def check_to_the_bit(case: Cell, pool: RankPool, folder: Path) -> None:
    unbroken = pool.run(save_and_go_on, case, folder, ranks=case.ranks)[0]
    assert_same(pool.run(resume, case, [folder], ranks=case.ranks)[0][0], unbroken)


def stretch(
    rank: int, ranks: int, case: Cell, first: int, source: Path | None, target: Path, forget: bool = False
) -> list[StepResult]:
    reader: StateReader | None = None if source is None else open_reader(source)
    engine = make(case, rank, WithoutMoments(reader) if forget and reader is not None else reader)
    found = steps(engine, case, rank, first, first + EACH)
    store = CheckpointStore(target)
    store.save(
        first + EACH, engine.shards(), engine.scalars(), namespace="test/1", rank=rank, ranks=ranks, attempt=1
    ).wait()
    engine.close()
    return found


def hops(family: str) -> list[Cell]:
    local = cell(None, 1, GLOBAL, family, model__num_hidden_layers=3, optim__lr=2e-3)
    return [
        local,
        pipe(1, family=family, layers=3),
        replace(local, stage=3, ranks=2, accumulation=2),
        pipe(0, data=2, accumulation=2, family=family, layers=3),
        pipe(1, data=2, accumulation=2, family=family, layers=3),
        local,
    ]


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mixtral"])
def test_hops(family: str, pool: RankPool, tmp_path: Path) -> None:
    """Within 1e-5 of never hopping, over all 36 steps; the last stretch once more with zeroed moments, which must be outside."""
    layouts, found, source = hops(family), list[StepResult](), None
    for number, case in enumerate(layouts):
        target = tmp_path / str(number)
        found += pool.run(stretch, case, number * EACH, source, target, ranks=case.ranks)[0]
        before, source = source, target
    stayed = [result.loss for result in results(0, 1, layouts[0], EACH * len(layouts))]
    worst = max(abs(a.loss - b) for a, b in zip(found, stayed, strict=True))
    print(family, worst)
    assert worst <= 1e-5
    last = len(layouts) - 1
    for case in (layouts[-1], layouts[1]):  # into the pipeline too
        wrong = pool.run(
            stretch, case, last * EACH, before, tmp_path / f"wrong-{case.ranks}", True, ranks=case.ranks
        )[0]
        assert max(abs(a.loss - b) for a, b in zip(wrong, stayed[last * EACH :], strict=True)) > 1e-4


def one_after_another(rank: int, ranks: int, first: Cell, second: Cell) -> Trace:
    trace(rank, ranks, first, steps=1)
    return trace(rank, ranks, second)


def test_the_next_engine_of_a_process_has_its_own_groups(pool: RankPool) -> None:
    second = cell(1, 2, 2, **SGD)
    found = pool.run(one_after_another, pipe(1, **SGD), second, ranks=2)[0]
    assert found.distance(oracle(second.oracle())).times(TOLERANCE) <= 1


# -- Memory


SIZES: dict[str, Any] = {
    "layers": 6,
    "model__hidden_size": 128,
    "model__intermediate_size": 352,
    "model__vocab_size": 1501,
}


def held(rank: int, ranks: int, case: Cell) -> tuple[Bytes, MemoryPlan]:
    """What this rank holds, gradients when the last backward is through, and what the plan says of its stage."""
    engine: Any = make(case, rank)
    most, reduce = 0, engine._ds.allreduce_gradients

    def look(**settings: Any) -> None:
        nonlocal most
        most = sum(gradients(engine).values())
        reduce(**settings)
        most = max(most, sum(gradients(engine).values()))

    engine._ds.allreduce_gradients = look
    steps(engine, case, rank, 0, 2)
    kept = weights(engine)
    found = Bytes(
        sum(kept.values()), most, sum(size for address, size in states(engine).items() if address not in kept)
    )
    engine.close()
    plan = case.plan()
    assert plan.shape is not None
    planned = stage_memory(
        plan.config, plan.shape, plan.parameters, plan.axes, plan.batch, plan.world.device, plan.deepspeed
    )
    return found, planned[plan.axes.coordinates(rank).pipeline]


@pytest.mark.parametrize(
    "case",
    [
        pipe(1, family="qwen2", **SIZES),
        *(
            pytest.param(case, marks=pytest.mark.full)
            for case in (
                pipe(0, family="qwen2", **SIZES),
                pipe(1, stages=4, **SIZES),
                pipe(1, data=2, **SIZES),
                pipe(1, data=2, **SIZES, **BF16),
            )
        ),
    ],
    ids=str,
)
def test_each_stage_holds_what_the_plan_says(case: Cell, pool: RankPool) -> None:
    """Within 1%. The stages differ, so a plan of one would not do for another."""
    every = pool.run(held, case, ranks=case.ranks)
    for found, plan in every:
        for name in ("parameters", "gradients", "optimizer"):
            assert getattr(found, name) == pytest.approx(getattr(plan, name), rel=0.01), (
                f"{name}: {found}, {plan}"
            )
    assert len({found.parameters for found, _ in every}) > 1
