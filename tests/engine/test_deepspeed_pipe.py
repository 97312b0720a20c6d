"""DeepSpeed's pipeline compared with the local engine: fp32, the same samples, |loss difference| <= 1e-5.

    pytest tests/engine/test_deepspeed_pipe.py             one cell of each kind, and the controls
    pytest tests/engine/test_deepspeed_pipe.py -m full     every family and layout, precisions

Micro-batches have different numbers of unmasked tokens, and several are in flight at a time. Controls break
one thing each, for example a stage that swaps the activations of two micro-batches.
"""

from __future__ import annotations

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
    quick,
    steps,
    trace,
)
from tests.engine.checks import CONTROL_STEPS, TOLERANCE, check_cell, doubling, duplicating, far, reference
from tests.engine.memory_measures import Bytes, gradients, states, weights
from tests.engine.resuming import assert_same, resume, save_and_go_on
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.shard import StateReader
from toolkit.config.schema import BatchRampConfig
from toolkit.engine.deepspeed import patches
from toolkit.engine.deepspeed.pipeline import DeepSpeedPipelineEngine
from toolkit.engine.protocol import EvalResult, StepResult
from toolkit.plan.memory import stage_memory
from toolkit.plan.types import MemoryPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import Distance, RunTrace, check_parity
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
    """A pipeline cell, with Adam at 2e-3, at which four blocks learn enough in twenty steps."""
    settings = {"parallel__pipeline": stages, "model__num_hidden_layers": layers, "optim__lr": 2e-3, **more}
    return cell(stage, stages * data, accumulation, family, **settings)


QUICK = [
    pipe(0, family="qwen2", layers=3),  # tied embeddings, uneven stages, clipping without ZeRO
    pipe(1, **SGD),
    pipe(1, data=2, accumulation=2, family="gpt2", layers=3, **SGD),
]
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"accumulation": 1, "train__micro_batch": 8, "train__global_batch": 8},
    {"data": 2, "accumulation": 2},
    {"stages": 4, "layers": 4},
    {"stages": 3, "layers": 4, "accumulation": 3},
    {"layers": 5, "optim__lr": 3e-3},
)


def further() -> Iterator[Cell]:
    """Every family and every layout with both optimizers, in turn without ZeRO and with ZeRO 1."""
    optimizers: tuple[dict[str, Any], ...] = ({}, SGD)
    for number, family in enumerate(FAMILIES):
        for turn, optimizer in enumerate(optimizers):
            yield pipe((number + turn) % 2, family=family, layers=3, **optimizer)
    for number, layout in enumerate(LAYOUTS):
        for turn, family in enumerate(("llama", "gpt2")):
            optimizer = optimizers[(number + turn) % 2]
            yield pipe((number // 2 + turn) % 2, family=family, **{**layout, **optimizer})
    for family in ("llama", "gpt2", "mixtral"):
        yield pipe(1, family=family, **CHECKPOINTING)
    yield pipe(0, data=2, layers=3, accumulation=3, **CHECKPOINTING)


CELLS = [*QUICK, *(case for case in further() if case not in QUICK)]


@pytest.mark.parametrize("case", quick(CELLS, *range(len(QUICK))), ids=str)
def test_pipelines_match_local(case: Cell, pool: RankPool) -> None:
    check_cell(case, pool)


# -- Controls


def swapping(rank: int, ranks: int, case: Cell) -> RunTrace:
    """Stage 1 receives two micro-batches' activations from the first stage and swaps them."""
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
        return trace(rank, ranks, case, steps=CONTROL_STEPS)
    finally:
        p2p.recv = receive


def test_control_swapped_activations(pool: RankPool) -> None:
    """With four stages the first one sends twice before it waits for a gradient."""
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


def trace_without_pipeline_norm(rank: int, ranks: int, case: Cell) -> RunTrace:
    patch = patches.clip_by_pipeline_norm
    patches.clip_by_pipeline_norm = lambda engine, read: lambda: 0.0
    try:
        return trace(rank, ranks, case)
    finally:
        patches.clip_by_pipeline_norm = patch


def test_control_clipping_by_the_first_stage(pool: RankPool) -> None:
    """DeepSpeed clips by this norm without ZeRO."""
    case = QUICK[0]
    far(pool.run(trace_without_pipeline_norm, case, ranks=2)[0], case)


# -- Other precisions, batches, seeds


def traced(rank: int, ranks: int, case: Cell, steps: int) -> RunTrace:
    return trace(rank, ranks, case, steps=steps)


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [{}, {"engine__deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}}],
    ids=["bf16", "fp32-sums"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_bf16_matches_local_bf16(family: str, more: dict[str, Any], pool: RankPool) -> None:
    case = pipe(1, family=family, layers=3, optim__lr=1e-3, **BF16, **more)
    distance = pool.run(trace, case, ranks=2)[0].distance(trace(0, 1, case.reference()))
    print(distance)
    assert distance.times(Distance(loss=1e-3, norm=1.5e-2, weight=1e-3)) <= 1, distance


@pytest.mark.full
def test_fp16_skips_the_same_steps_as_zero1(pool: RankPool) -> None:
    """ZeRO 1 on one rank sums micro-batches in fp16 too, which overflows a step earlier than fp32 sums."""
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
def test_batch_ramp_matches_local(stage: int, pool: RankPool) -> None:
    ramp = BatchRampConfig(start=4, increment=2, samples=60)
    case = pipe(stage, train__global_batch=12, train__batch_ramp=ramp)
    plan = case.plan()
    assert len({plan.batch.at(step).accumulation for step in range(20)}) > 2
    check_parity(pool.run(trace, case, ranks=2)[0], trace(0, 1, case.reference()), TOLERANCE)


def results(rank: int, ranks: int, case: Cell, count: int = 4) -> list[StepResult]:
    engine = make(case, rank)
    found = steps(engine, case, rank, 0, count)
    engine.close()
    return found


def test_recomputation_uses_the_same_dropout_masks(pool: RankPool) -> None:
    """Backwards of earlier micro-batches run between forwards of later ones."""
    case = pipe(1, family="gpt2", **DROPOUT)
    kept = pool.run(results, case, ranks=2)[0]
    assert kept == pool.run(results, pipe(1, family="gpt2", **DROPOUT, **CHECKPOINTING), ranks=2)[0]
    assert kept != pool.run(results, pipe(1, family="gpt2"), ranks=2)[0]


def evaluated(rank: int, ranks: int, case: Cell) -> tuple[list[StepResult], EvalResult, EvalResult]:
    """Evaluate between steps, and again with shorter sequences and fewer micro-batches."""
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
def test_evaluation_matches_local_and_does_not_change_training(case: Cell, pool: RankPool) -> None:
    every = pool.run(evaluated, case, ranks=case.ranks)
    assert all(other == every[0] for other in every)
    went_on, whole, short = every[0]
    _, local_whole, local_short = evaluated(0, 1, case.reference())
    assert whole.tokens == local_whole.tokens
    assert whole.loss_sum / whole.tokens == pytest.approx(local_whole.loss_sum / whole.tokens, abs=1e-5)
    if case.data == 1:
        assert short.loss_sum == pytest.approx(local_short.loss_sum, abs=1e-3)
        assert short.tokens == local_short.tokens
    assert went_on == pool.run(results, case, ranks=case.ranks)[0]


# -- State


GLOBAL = 4  # micro-batches of a step, in every layout
EACH = 4


def test_resume_in_the_same_layout_is_bitwise(pool: RankPool, tmp_path: Path) -> None:
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
def test_resume_in_more_layouts_is_bitwise(case: Cell, pool: RankPool, tmp_path: Path) -> None:
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
def test_resuming_across_layouts_matches_local(family: str, pool: RankPool, tmp_path: Path) -> None:
    """Within 1e-5 over all 24 steps; with zeroed moments the last stretch must be outside."""
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
    for case in (layouts[-1], layouts[1]):  # including into a pipeline
        wrong = pool.run(
            stretch, case, last * EACH, before, tmp_path / f"wrong-{case.ranks}", True, ranks=case.ranks
        )[0]
        assert max(abs(a.loss - b) for a, b in zip(wrong, stayed[last * EACH :], strict=True)) > 1e-4


def one_after_another(rank: int, ranks: int, first: Cell, second: Cell) -> RunTrace:
    trace(rank, ranks, first, steps=1)
    return trace(rank, ranks, second)


def test_close_releases_pipeline_groups(pool: RankPool) -> None:
    second = cell(1, 2, 2, **SGD)
    found = pool.run(one_after_another, pipe(1, **SGD), second, ranks=2)[0]
    assert found.distance(reference(second.reference())).times(TOLERANCE) <= 1


# -- Memory


SIZES: dict[str, Any] = {
    "layers": 6,
    "model__hidden_size": 128,
    "model__intermediate_size": 352,
    "model__vocab_size": 1501,
}


def measure_stage(rank: int, ranks: int, case: Cell) -> tuple[Bytes, MemoryPlan]:
    """This rank's memory, with gradients after the last backward, and the plan's memory of its stage."""
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
        plan.config,
        plan.shape,
        plan.parameters,
        plan.axes,
        plan.batch,
        plan.world.device,
        plan.deepspeed,
        kernels=plan.kernels,
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
def test_memory_of_each_stage_matches_the_plan(case: Cell, pool: RankPool) -> None:
    """Within 1%. The stages differ, so the plan of one does not fit another."""
    every = pool.run(measure_stage, case, ranks=case.ranks)
    for found, plan in every:
        for name in ("parameters", "gradients", "optimizer"):
            assert getattr(found, name) == pytest.approx(getattr(plan, name), rel=0.01), (
                f"{name}: {found}, {plan}"
            )
    assert len({found.parameters for found, _ in every}) > 1
