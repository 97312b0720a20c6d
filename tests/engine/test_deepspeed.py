"""The DeepSpeed engine and its patches of DeepSpeed 0.19, each with a case that fails without it.

pytest tests/engine/test_deepspeed.py
pytest tests/engine/test_deepspeed.py -m full     including CPU Adam and NVMe, which are compiled first
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.cases import (
    BF16,
    CHECKPOINTING,
    DROPOUT,
    FP16,
    OFFLOAD,
    OFFLOAD_ALL,
    SGD,
    Cell,
    cell,
    long_trace,
    make,
    quick,
    steps,
    trace,
)
from tests.engine.checks import gather_state, ramped
from toolkit.checkpoint.shard import WEIGHT, TensorKey
from toolkit.cluster.world.machine_info import detect_machine
from toolkit.config.optim import OptimizerKernel
from toolkit.config.schema import OffloadDevice
from toolkit.engine.deepspeed.engine import DeepSpeedEngine
from toolkit.engine.protocol import StepResult, StepSettings
from toolkit.errors import PlanError
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import Distance, check_parity, gather_tensors
from toolkit.testing.tiny import micro_batches

TOLERANCE = Distance(loss=1e-5, norm=1e-4, weight=1e-5)


def results_of(rank: int, ranks: int, case: Cell, count: int) -> list[StepResult]:
    engine = make(case, rank)
    results = steps(engine, case, rank, 0, count)
    engine.close()
    return results


# -- State


ODD: dict[str, Any] = {"model__vocab_size": 263, "model__hidden_size": 36, "model__intermediate_size": 50}


@pytest.mark.parametrize("case", quick([cell(stage, 4, 1, "gpt2", **ODD) for stage in range(4)], 2), ids=str)
def test_shards_cover_every_element_once_and_no_padding(case: Cell, pool: RankPool) -> None:
    """``gather_tensors`` asserts the coverage; the embedding's 263 x 36 elements do not divide evenly."""
    plan = case.plan()
    found = pool.run(gather_state, case, ranks=4)
    state = found[0][0]
    names = {spec.name for spec in plan.parameters}
    assert "lm_head.weight" not in names
    assert {key.name for key in state} == names
    assert {key.state for key in state} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(tuple(state[TensorKey(WEIGHT, spec.name)].shape) == spec.shape for spec in plan.parameters)
    total = sum(spec.numel for spec in plan.parameters)
    if case.stage:
        assert sum(mine for _, mine, _ in found) == total
        assert sum(padded for _, _, padded in found) > total, "without padding the case shows nothing"


def most_at_once(rank: int, ranks: int) -> tuple[int, int, int]:
    """The maximum of elements in memory while a ZeRO-3 model is built, the share, the largest parameter."""
    from toolkit.engine.deepspeed import build as deepspeed_build

    case, most, share = cell(3, ranks, 1, train__global_batch=2 * ranks), 0, 0
    made: list[Any] = []

    class Watched(nn.Parameter):
        """Counts the elements in memory whenever a parameter is created."""

        def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> Any:
            nonlocal most
            parameter = nn.Parameter(data, requires_grad)
            made.append(parameter)
            stored = sum(
                p.data.numel() + (p.ds_tensor.numel() if hasattr(p, "ds_tensor") else 0) for p in made
            )
            most = max(most, stored)
            return parameter

    original = deepspeed_build.nn
    deepspeed_build.nn = type("nn", (), {"Parameter": Watched, "Module": nn.Module})  # type: ignore[assignment]
    try:
        engine = make(case, rank)
    finally:
        deepspeed_build.nn = original
    share = sum(parameter.ds_tensor.numel() for parameter in made)
    engine.close()
    return most, share, max(spec.numel for spec in case.plan().parameters)


def test_zero3_build_stores_one_whole_parameter_at_most(pool: RankPool) -> None:
    for most, share, largest in pool.run(most_at_once, ranks=4):
        assert most <= share + largest


def read_back(rank: int, ranks: int, case: Cell) -> list[bool]:
    """Whether forward sees the masters rounded to the run's precision, after ``load`` and after a step."""
    import deepspeed

    engine = make(case, rank)
    assert isinstance(engine, DeepSpeedEngine)
    agree = []
    for count in (0, 1):
        steps(engine, case, rank, 0, count)
        state = gather_tensors(engine.shards(), rank, ranks)
        parameters = dict(engine._ds.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=case.stage == 3):
            if rank == 0:
                masters = {
                    name: state.get(TensorKey("master", name), state[TensorKey(WEIGHT, name)])
                    for name in parameters
                }
                agree.append(
                    all(
                        torch.equal(weight.cpu(), masters[name].to(weight.dtype))
                        for name, weight in parameters.items()
                    )
                )
    engine.close()
    return agree


AGREEING = [
    *(cell(stage, **BF16) for stage in (1, 2, 3)),
    *(cell(stage, **FP16) for stage in (2, 3)),
    cell(3, **OFFLOAD_ALL),
    cell(2, **OFFLOAD),
    cell(1, family="qwen2"),
]


@pytest.mark.parametrize("case", quick(AGREEING, 2, 5), ids=str)
def test_weights_equal_rounded_masters(case: Cell, pool: RankPool) -> None:
    assert pool.run(read_back, case, ranks=2)[0] == [True, True]


def lower_stage1(rank: int, ranks: int, case: Cell) -> str:
    engine = make(case, rank)
    assert isinstance(engine, DeepSpeedEngine)
    name = type(engine._ds.optimizer).__name__
    engine.close()
    return name


def test_bf16_optimizer_state_is_saved_and_loaded(pool: RankPool) -> None:
    """With data_types.grad_accum_dtype DeepSpeed uses its BF16_Optimizer under stage 1."""
    case = cell(1, **BF16, engine__deepspeed={"data_types": {"grad_accum_dtype": "fp32"}})
    assert pool.run(lower_stage1, case, ranks=2)[0] == "BF16_Optimizer"
    assert pool.run(read_back, case, ranks=2)[0] == [True, True]


# -- Steps


RAMPED = [*((stage, {}) for stage in range(4)), *((stage, OFFLOAD) for stage in (1, 2, 3))]


@pytest.mark.parametrize(
    ("stage", "more"),
    [pytest.param(*case, marks=() if case == RAMPED[6] else pytest.mark.full) for case in RAMPED],
)
def test_batch_ramp_matches_local(stage: int, more: dict[str, Any], pool: RankPool) -> None:
    """Accumulation 1, 2, 3. DeepSpeed's own count would step in the middle of the first larger batch."""
    expected = ramped(0, 1, None, {})
    assert len({result.tokens for result in expected}) > 3
    found = pool.run(ramped, stage, more, ranks=2)[0]
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    assert max(abs(a.loss - b.loss) for a, b in zip(found, expected, strict=True)) <= 1e-5
    assert max(abs(a.grad_norm - b.grad_norm) for a, b in zip(found, expected, strict=True)) <= 1e-4


def evaluating(
    rank: int, ranks: int, case: Cell, every: int
) -> tuple[list[StepResult], list[tuple[float, int]]]:
    engine, plan = make(case, rank), case.plan()
    results, evaluations = [], []
    for step in range(4):
        if every:
            found = engine.eval_step(micro_batches(plan, 100, rank))
            evaluations.append((found.loss_sum, found.tokens))
        results.append(engine.train_step(micro_batches(plan, step, rank), StepSettings(step, 1e-3)))
    engine.close()
    return results, evaluations


@pytest.mark.parametrize(
    "case", quick([cell(stage, family="gpt2", **DROPOUT) for stage in range(4)], 3), ids=str
)
def test_evaluation_does_not_change_training(case: Cell, pool: RankPool) -> None:
    """Bitwise, with dropout, before the first step (ZeRO 3's trace) and between steps."""
    plain, _ = pool.run(evaluating, case, 0, ranks=2)[0]
    results, evaluations = pool.run(evaluating, case, 1, ranks=2)[0]
    assert results == plain
    _, expected = evaluating(0, 1, replace(case.reference(), more=()), 1)
    assert evaluations[0][1] == expected[0][1]
    assert evaluations[0][0] == pytest.approx(expected[0][0], rel=1e-6)


# -- Precision


@pytest.mark.parametrize("stage", quick([1, 2, 3], 2))
def test_bf16_matches_local_bf16(stage: int, pool: RankPool) -> None:
    """DeepSpeed reduces gradients in bf16, ``local`` in fp32.

    Measured differences over 20 steps: loss 2.7e-4, gradient norm 2.4e-3, weights 2.6e-4.
    """
    case = cell(stage, **BF16, optim__lr=1e-3)
    check_parity(
        pool.run(long_trace, case, ranks=2)[0],
        long_trace(0, 1, case.reference()),
        Distance(loss=1e-3, norm=1e-2, weight=1e-3),
    )


def scaling(power: int, window: int) -> dict[str, Any]:
    return {**FP16, "precision__initial_scale_power": power, "precision__scale_window": window}


def skipping(
    rank: int, ranks: int, case: Cell, count: int
) -> tuple[list[StepResult], list[bool], dict[str, object]]:
    """Each step's result, and whether it left weights and moments unchanged."""
    engine = make(case, rank)
    results, unchanged = [], []
    for step in range(count):
        before = [shard.data.clone() for shard in engine.shards()]
        results += steps(engine, case, rank, step, step + 1)
        unchanged.append(all(torch.equal(a, b.data) for a, b in zip(before, engine.shards(), strict=False)))
    scalars = engine.scalars()
    engine.close()
    return results, unchanged, scalars


OVERFLOWING = [
    *(cell(stage, **scaling(24, 1000)) for stage in (1, 2, 3)),
    cell(2, **scaling(24, 1000), **OFFLOAD),
]


@pytest.mark.parametrize("case", quick(OVERFLOWING, 1), ids=str)
def test_fp16_skips_overflowing_steps(case: Cell, pool: RankPool) -> None:
    results, unchanged, scalars = pool.run(skipping, case, 10, ranks=2)[0]
    assert results[0].skipped, "2^24 overflows in the first step, else the case shows nothing"
    assert not all(result.skipped for result in results)
    assert [result.skipped for result in results] == unchanged
    for result, following in pairwise(results):
        assert following.loss_scale == (result.loss_scale / 2 if result.skipped else result.loss_scale)
    assert scalars["optimizer_step"] == sum(not result.skipped for result in results)


def growing(rank: int, ranks: int, stage: int, window: int) -> Any:
    return trace(rank, ranks, cell(stage, **scaling(8, window), **SGD), steps=6)


@pytest.mark.parametrize("stage", quick([1, 2, 3], 1))
def test_fp16_scale_growth_does_not_change_the_step(stage: int, pool: RankPool) -> None:
    """Without the patch, a step whose scale doubles is halved, and the weights differ by 4e-3."""
    steady = pool.run(growing, stage, 1000, ranks=2)[0]
    grown = pool.run(growing, stage, 2, ranks=2)[0]
    assert grown.results[-1].loss_scale > steady.results[-1].loss_scale
    distance = grown.distance(steady)
    assert distance.weight < 1e-5
    assert distance.norm < 1e-4


# -- Optimizers

MUON: dict[str, Any] = {"optim__name": "muon", "optim__momentum": 0.95, "optim__lr": 1e-3, "optim__clip": 0.0}


@pytest.mark.parametrize("stage", quick([0, 1, 2, 3], 3))
def test_muon_matches_local(stage: int, pool: RankPool) -> None:
    """The gradient norm is that of the orthogonalized update under every stage, as in the local engine."""
    case = cell(stage, **MUON)
    found = pool.run(long_trace, case, ranks=2)[0]
    expected = long_trace(0, 1, case.reference())
    distance = found.distance(expected)
    assert expected.losses[0] - expected.losses[-1] > 0.3
    assert distance.loss <= 1e-3, str(distance)
    assert distance.norm <= 1e-2 * min(expected.norms), str(distance)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cpu_adam_matches_local(stage: int, pool: RankPool) -> None:
    """DeepSpeed's vectorized Adam, which is compiled on first use (a minute)."""
    case = cell(stage, **{**OFFLOAD, "optim__kernel": OptimizerKernel.cpu})
    check_parity(pool.run(trace, case, ranks=2, timeout=500)[0], trace(0, 1, case.reference()), TOLERANCE)


# -- NVMe


@pytest.mark.full
@pytest.mark.timeout(900)
def test_nvme_offload_resumes_bitwise(pool: RankPool, tmp_path: Path) -> None:
    """States are on disk between steps. Without libaio the plan is refused."""
    from tests.engine.resuming import resume, save_and_go_on

    large = {
        "model__hidden_size": 512,
        "model__intermediate_size": 1024,
    }  # partitions under 1 MiB stay in memory
    case = cell(
        3,
        2,
        2,
        "gpt2",
        **large,
        offload__optimizer=OffloadDevice.nvme,
        offload__nvme_path=str(tmp_path / "nvme"),
        optim__kernel=OptimizerKernel.torch,
    )
    if not detect_machine().has_libaio:
        with pytest.raises(PlanError, match="libaio"):
            case.plan()
        pytest.skip("needs libaio")
    went_on, state = pool.run(save_and_go_on, case, tmp_path / "saved", ranks=2, timeout=800)[0]
    assert any((tmp_path / "nvme").rglob("exp_avg*.swp")), "nothing was swapped: the case shows nothing"
    ((again, found),) = pool.run(resume, case, [tmp_path / "saved"], ranks=2, timeout=200)[0]
    assert again.losses == went_on.losses
    assert all(torch.equal(found[key], state[key]) for key in state)


# -- Any model


def own(name: str, stage: int, ranks: int = 2, **more: Any) -> Cell:
    return cell(stage, ranks, 2, None, model__target=f"tests.engine.models.{name}", optim__lr=1e-2, **more)


@pytest.mark.parametrize("stage", quick([0, 1, 2, 3], 3))
def test_frozen_parameters_of_a_custom_module_match_local(stage: int, pool: RankPool) -> None:
    case = own("Mixer", stage)
    found, expected = pool.run(trace, case, ranks=2)[0], trace(0, 1, case.reference())
    assert "embed.weight" in expected.weights
    check_parity(found, expected, TOLERANCE)


SOMETIMES = [
    *(own("Sometimes", stage) for stage in (0, 1, 2)),
    *(own("Sometimes", stage, **OFFLOAD) for stage in (1, 2)),
    *(
        own("Sometimes", 3, 1, **more) for more in ({}, OFFLOAD)
    ),  # ZeRO 3 cannot train it where ranks take different branches
]


@pytest.mark.parametrize("case", quick(SOMETIMES, 4, 5), ids=str)
def test_parameters_unused_by_some_micro_batches_match_local(case: Cell, pool: RankPool) -> None:
    """Without the patches, ZeRO 3 and offload use gradients of earlier steps (loss 0.1 off)."""
    check_parity(pool.run(trace, case, ranks=case.ranks)[0], trace(0, 1, case.reference()), TOLERANCE)


# -- The process afterwards


def closing(rank: int, ranks: int) -> tuple[bool, list[int]]:
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    before, entries = nn.functional.linear, []
    case = cell(3, **CHECKPOINTING)
    for _ in range(2):
        engine = make(case, rank)
        for step in range(2):
            steps(engine, case, rank, step, step + 1)
            entries.append(len(FWD_MODULE_STACK))
        engine.close()
        entries.append(len(FWD_MODULE_STACK))
    return nn.functional.linear is before, entries


def test_zero3_close_restores_the_process(pool: RankPool) -> None:
    """torch's linear is restored, and the module stack does not grow (without the patch by 8 per step)."""
    assert pool.run(closing, ranks=2) == [(True, [1, 1, 0] * 2)] * 2


def settings_are_kept(rank: int, ranks: int) -> bool:
    case = cell(3)
    plan = case.plan()
    before = repr(plan.deepspeed)
    from toolkit.train.task import text_task

    DeepSpeedEngine(plan, text_task(plan), rank=rank, local_rank=rank).close()
    return repr(plan.deepspeed) == before


def test_deepspeed_does_not_modify_the_plan(pool: RankPool) -> None:
    assert all(pool.run(settings_are_kept, ranks=2))
