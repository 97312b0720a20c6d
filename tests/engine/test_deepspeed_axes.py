"""DeepSpeed's tensor, context and expert axes compared with ``local``: training, state, resume and controls.

    pytest tests/engine/test_deepspeed_axes.py             a cell of each axis, controls, resumes
    pytest tests/engine/test_deepspeed_axes.py -m full     axis x ZeRO stage, families, offload, resumes

As in test_parity.py: fp32, the same samples with different numbers of unmasked tokens, AdamW with
clipping and SGD without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.cases import (
    BF16,
    CHECKPOINTING,
    CONTEXT,
    DROPOUT,
    EXPERT,
    FP16,
    OFFLOAD,
    OFFLOAD_ALL,
    SGD,
    TENSOR,
    Cell,
    cell,
    long_trace,
    make,
    quick,
    steps,
    trace,
)
from tests.engine.checks import (
    TOLERANCE,
    check_cell,
    doubling,
    duplicating,
    far,
    gather_state,
    ramped,
    reference,
)
from tests.engine.resuming import Saved, check_pairs, check_same, neighbours
from toolkit.checkpoint.shard import WEIGHT, TensorKey
from toolkit.engine.deepspeed.engine import DeepSpeedEngine
from toolkit.engine.protocol import EvalResult, StepResult
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import Distance, check_parity, rank_samples

FOUR_TENSOR: dict[str, Any] = {"parallel__tensor": 4, "model__num_key_value_heads": 4}
FOUR_CONTEXT: dict[str, Any] = {"parallel__context": 4}  # two key-value heads: copied
FOUR_EXPERT: dict[str, Any] = {"parallel__expert": 4}

QUICK = [
    cell(3, 4, 1, **TENSOR, **SGD),
    cell(2, 2, **CONTEXT, **SGD),
    cell(2, 2, 2, "mixtral", **EXPERT, **SGD),
]


def further() -> Iterator[Cell]:
    """Every axis with every stage; in turn the optimizers, two ranks and four, and the families."""
    turns: tuple[dict[str, Any], ...] = ({}, SGD)
    for stage in range(4):
        now, other = turns[stage % 2], turns[1 - stage % 2]
        for axis, four, families in (
            (TENSOR, FOUR_TENSOR, ("qwen2", "qwen3")),
            (CONTEXT, FOUR_CONTEXT, ("gpt2", "qwen2", "mixtral")),
        ):
            yield cell(stage, 2, 2, **axis, **now)
            yield cell(stage, 4, 1 + stage % 2, **axis, **other)
            yield cell(stage, 2, 2, families[stage % len(families)], **axis, **other)
            if stage in (1, 3):
                yield cell(stage, 4, 2, **four, **other)
    for stage in (1, 2):
        now, other = turns[stage % 2], turns[1 - stage % 2]
        yield cell(stage, 2, 2, "mixtral", **EXPERT, **now)
        yield cell(stage, 4, 1, "mixtral", **EXPERT, **other)
        yield cell(stage, 4, 2, "mixtral", **FOUR_EXPERT, **now)
    for family, axis, stages in (
        ("llama", TENSOR, (1, 3)),
        ("llama", CONTEXT, (2, 3)),
        ("mixtral", EXPERT, (1, 2)),
    ):
        for stage in stages:
            yield cell(stage, 2, 2, family, **axis, **OFFLOAD, **turns[stage % 2])
        yield cell(stages[-1], 2, 2, family, **axis, **CHECKPOINTING)
    yield cell(3, 4, 2, **TENSOR, **OFFLOAD_ALL)
    yield cell(3, 4, 2, **CONTEXT, **OFFLOAD_ALL)


CELLS = [*QUICK, *(case for case in further() if case not in QUICK)]


@pytest.mark.parametrize("case", quick(CELLS, *range(len(QUICK))), ids=str)
def test_axes_match_local(case: Cell, pool: RankPool) -> None:
    check_cell(case, pool)


AXES = [
    cell(1, 2, 2, "llama", **TENSOR),
    cell(2, 2, 2, "llama", **CONTEXT),
    cell(1, 2, 2, "mixtral", **EXPERT),
]


@pytest.mark.full
@pytest.mark.parametrize("case", AXES, ids=str)
def test_bf16_matches_local_bf16(case: Cell, pool: RankPool) -> None:
    """Within tolerances: partial activations and gradients are rounded to bf16 before they are summed.

    Measured over 20 steps: loss 5.2e-4, gradient norm 7.9e-3, weights 4.8e-3
    (of a router, whose choices are not smooth).
    """
    case = replace(case, more=(*case.more, *BF16.items(), ("optim__lr", 1e-3)))
    check_parity(
        pool.run(long_trace, case, ranks=2)[0],
        long_trace(0, 1, case.reference()),
        Distance(loss=2e-3, norm=3e-2, weight=1e-2),
    )


# -- Controls


def trace_with_swapped_slices(rank: int, ranks: int, case: Cell) -> Any:
    """Each context rank takes the other's slice, at its own positions."""
    from toolkit.engine.deepspeed import context_parallel as context

    right = context.slice_sequence
    context.slice_sequence = lambda batch, *, ranks, index: right(batch, ranks=ranks, index=ranks - 1 - index)
    try:
        return trace(rank, ranks, case)
    finally:
        context.slice_sequence = right


def trace_without_norm_reduction(rank: int, ranks: int, case: Cell) -> Any:
    """The gradients of a norm inside the heads are those of this rank's heads only."""
    from toolkit.engine.deepspeed import build as deepspeed_build

    right = deepspeed_build.tensor_parallel.apply_tensor_parallel

    def wrong(*arguments: Any) -> Any:
        right(*arguments)
        return lambda: None

    deepspeed_build.tensor_parallel.apply_tensor_parallel = wrong
    try:
        return trace(rank, ranks, case)
    finally:
        deepspeed_build.tensor_parallel.apply_tensor_parallel = right


def on_sgd(case: Cell) -> Cell:
    return replace(case, more=(*case.more, *SGD.items()))


@pytest.mark.parametrize("case", quick(map(on_sgd, AXES), 0), ids=str)
def test_control_doubled_gradients(case: Cell, pool: RankPool) -> None:
    far(pool.run(doubling, case, ranks=2)[0], case)


DUPLICATED = [cell(2, 2, 2, "mixtral", **EXPERT, **SGD), cell(1, 4, 1, **TENSOR), cell(1, 4, 1, **CONTEXT)]


@pytest.mark.parametrize("case", quick(DUPLICATED, 0), ids=str)
def test_control_duplicated_micro_batch(case: Cell, pool: RankPool) -> None:
    far(pool.run(duplicating, case, ranks=case.ranks)[0], case)


@pytest.mark.full
def test_control_swapped_sequence_slices(pool: RankPool) -> None:
    case = cell(2, 2, 2, **CONTEXT, **SGD)
    far(pool.run(trace_with_swapped_slices, case, ranks=2)[0], case)


def test_control_unreduced_norms_of_heads(pool: RankPool) -> None:
    """Measured over 20 steps: the weights differ by 1.8e-3, the loss by 7e-5."""
    case = cell(1, 2, 2, "qwen3", **TENSOR, **SGD)
    wrong = pool.run(trace_without_norm_reduction, case, ranks=2)[0]
    assert wrong.distance(reference(case.reference())).weight > 10 * TOLERANCE.weight


# -- State


SHAPES: dict[str, Any] = {
    "model__hidden_size": 40,
    "model__intermediate_size": 52,
}  # heads of 10: partitions end inside rows
COVERED = [
    *(cell(stage, 4, 1, "llama", **TENSOR, **SHAPES) for stage in range(4)),
    cell(2, 4, 1, "llama", **CONTEXT, **SHAPES),
    *(cell(stage, 4, 1, "mixtral", **EXPERT, **SHAPES) for stage in (1, 2)),
]


@pytest.mark.full
@pytest.mark.parametrize("case", COVERED, ids=str)
def test_shards_cover_every_element_once(case: Cell, pool: RankPool) -> None:
    """``gather_tensors`` asserts the coverage.

    Sizes that do not divide evenly leave padding and boxes of every kind.
    """
    state = pool.run(gather_state, case, ranks=4)[0][0]
    plan = case.plan()
    assert {key.state for key in state} == {"weight", "exp_avg", "exp_avg_sq"}
    for spec in plan.parameters:
        assert tuple(state[TensorKey(WEIGHT, spec.name)].shape) == spec.shape


def copies(rank: int, ranks: int, case: Cell) -> dict[str, torch.Tensor]:
    """This rank's replicated parameters after some steps."""
    engine = make(case, rank)
    assert isinstance(engine, DeepSpeedEngine)
    steps(engine, case, rank, 0, 4)
    found = {box.name: weight.detach().clone() for weight, box in engine._boxes.items() if box.replicas > 1}
    engine.close()
    return found


@pytest.mark.parametrize("family", quick(["qwen3", "llama"], 0))
def test_replicated_parameters_stay_equal_on_tensor_ranks(family: str, pool: RankPool) -> None:
    """Attention dropout differs per rank, but replicated parameters see the same activations."""
    case = cell(1, 2, 2, family, **TENSOR, **DROPOUT)
    first, second = pool.run(copies, case, ranks=2)
    assert "model.norm.weight" in first
    assert all(torch.equal(first[name], second[name]) for name in first)


def evaluating(rank: int, ranks: int, case: Cell, every: bool) -> tuple[list[StepResult], list[EvalResult]]:
    engine, plan = make(case, rank), case.plan()
    results, evaluations = [], []
    for step in range(3):
        if every:
            evaluations.append(engine.eval_step(rank_samples(engine, plan, 100, rank)))
        results += steps(engine, case, rank, step, step + 1)
    engine.close()
    return results, evaluations


@pytest.mark.parametrize("case", quick(AXES, 1), ids=str)
def test_evaluation_matches_local_and_does_not_change_training(case: Cell, pool: RankPool) -> None:
    answers = pool.run(evaluating, case, True, ranks=2)
    plain, _ = pool.run(evaluating, case, False, ranks=2)[0]
    _, expected = evaluating(0, 1, case.reference(), True)
    for results, evaluations in answers:
        assert results == plain
        for found, right in zip(evaluations, expected, strict=True):
            assert found.tokens == right.tokens
            assert found.loss_sum == pytest.approx(right.loss_sum, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "axis"), [(1, TENSOR), (3, TENSOR), (2, CONTEXT)])
def test_batch_ramp_matches_local(stage: int, axis: dict[str, Any], pool: RankPool) -> None:
    """Accumulation 2, 4, 6: DeepSpeed counts a context rank as part of the batch, but not a tensor rank."""
    expected = ramped(0, 1, None, {})
    found = pool.run(ramped, stage, axis, ranks=2)[0]
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    assert max(abs(a.loss - b.loss) for a, b in zip(found, expected, strict=True)) <= TOLERANCE.loss


# -- Resume

GLOBAL = 4  # micro-batches of a step, in every layout


def layout(stage: int | None, ranks: int, axis: dict[str, Any], family: str = "llama", **more: Any) -> Cell:
    data = ranks // (axis.get("parallel__tensor", 1) * axis.get("parallel__context", 1))
    return cell(stage, ranks, GLOBAL // data, family, **axis, **more)


LLAMAS = [
    layout(None, 1, {}),
    layout(1, 2, {}),
    layout(3, 4, {}),
    *(layout(stage, 2, TENSOR) for stage in range(4)),
    *(layout(stage, 4, TENSOR) for stage in (1, 3)),
    layout(2, 4, FOUR_CONTEXT),
    layout(1, 2, CONTEXT),
    layout(3, 4, CONTEXT),
]
MIXTRALS = [
    layout(stage, ranks, axis, "mixtral")
    for stage, ranks, axis in (
        (None, 1, {}),
        (1, 2, {}),
        (3, 2, {}),
        (1, 2, EXPERT),
        (2, 4, EXPERT),
        (1, 4, FOUR_EXPERT),
        (2, 2, CONTEXT),
    )
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "sources"),
    [*neighbours(LLAMAS), *neighbours(MIXTRALS)],
    ids=lambda part: str(part) if isinstance(part, Cell) else "",
)
def test_resume_in_another_layout(target: Cell, sources: list[Cell], saved: Saved, pool: RankPool) -> None:
    check_pairs(target, sources, saved, pool)


SAME = [
    layout(1, 4, TENSOR, **DROPOUT),
    layout(1, 2, TENSOR, **FP16),
    layout(2, 2, TENSOR, **BF16),
    layout(3, 4, TENSOR, **DROPOUT),
    layout(3, 4, TENSOR, **OFFLOAD_ALL),
    layout(2, 2, CONTEXT, "gpt2", **DROPOUT),
    layout(3, 2, CONTEXT, **OFFLOAD_ALL),
    layout(2, 4, EXPERT, "mixtral", **DROPOUT),
    layout(1, 4, EXPERT, "mixtral", **BF16),
    layout(2, 4, EXPERT, "mixtral", **OFFLOAD),
    layout(2, 4, EXPERT, "mixtral", **SGD, optim__momentum=0.9),
]


@pytest.mark.parametrize("case", quick(SAME, 0), ids=str)
def test_resume_in_the_same_layout_is_bitwise(case: Cell, saved: Saved, pool: RankPool) -> None:
    check_same(case, saved, pool)


# -- What DeepSpeed keeps

GATHERED: dict[str, Any] = {
    "engine__deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
}


def weights_saved_for_backward(rank: int, ranks: int, case: Cell) -> list[str]:
    """The parameters whose gathered memory autograd keeps in addition to the parameter itself."""
    engine = make(case, rank)
    assert isinstance(engine, DeepSpeedEngine)
    boxes = engine._boxes
    found: set[str] = set()

    def look(saved: torch.Tensor) -> torch.Tensor:
        if not isinstance(saved, nn.Parameter):
            memory = saved.untyped_storage().data_ptr()
            found.update(
                box.name
                for weight, box in boxes.items()
                if weight.numel() and weight.untyped_storage().data_ptr() == memory
            )
        return saved

    with torch.autograd.graph.saved_tensors_hooks(look, lambda saved: saved):
        steps(engine, case, rank, 0, 1)
    engine.close()
    return sorted(found)


def test_zero3_frees_gathered_tensor_parallel_weights(pool: RankPool) -> None:
    """Without the patch all 15 stay gathered from forward to backward."""
    assert pool.run(weights_saved_for_backward, cell(3, 4, 1, **TENSOR, **GATHERED), ranks=4)[0] == []


def run_in_sequence(rank: int, ranks: int, cells: list[Cell]) -> list[list[StepResult]]:
    found = []
    for case in cells:
        engine = make(case, rank)
        found.append(steps(engine, case, rank, 0, 2))
        engine.close()
    return found


def test_close_releases_the_groups_of_an_engines_axes(pool: RankPool) -> None:
    """Without the patch DeepSpeed uses the first engine's groups in the second one and does not start."""
    cells = [cell(1, 2, 2, **TENSOR), cell(1, 2, 2), cell(1, 2, 2, **CONTEXT)]
    together = pool.run(run_in_sequence, cells, ranks=2)[0]
    alone = [pool.run(run_in_sequence, [case], ranks=2)[0][0] for case in cells[1:]]
    assert together[1:] == alone
