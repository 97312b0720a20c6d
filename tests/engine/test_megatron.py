"""The Megatron-core engine: resume in its layouts, evaluation, the CPU backend, and the patches.

    pytest tests/engine/test_megatron.py             two ranks
    pytest tests/engine/test_megatron.py -m full     resumes in layouts of both engines, four ranks

test_matrix.py compares it with ``local``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.engine.cases import BF16, DROPOUT, FP16, SGD, quick
from tests.engine.resuming import Saved, check_pairs, check_same, neighbours
from toolkit.config.schema import EngineName
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.megatron import cpu
from toolkit.engine.megatron.engine import check_transformer_engine
from toolkit.errors import PlanError
from toolkit.plan.types import Device, RunPlan
from toolkit.testing import matrix
from toolkit.testing.dist import RankPool, RanksFailed, rank_pool
from toolkit.testing.matrix import OptimizerCase, deepspeed, megatron
from toolkit.testing.tiny import micro_batches
from toolkit.train.task import text_task


@dataclass(frozen=True)
class Layout:
    """A cell of the matrix in the form that resuming.py expects."""

    cell: matrix.Cell
    more: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join(
            [
                self.cell.name.replace("/", "-"),
                *(f"{key}={getattr(value, 'name', value)}" for key, value in self.more),
            ]
        )

    @property
    def ranks(self) -> int:
        return self.cell.ranks

    def plan(self) -> RunPlan:
        return self.cell.plan(OptimizerCase.ADAM, **dict(self.more))


def layout(cell: matrix.Cell, **more: Any) -> Layout:
    return Layout(cell, tuple(more.items()))


MOMENTUM = {**SGD, "optim__momentum": 0.9}
SAME = [
    layout(megatron("gpt2", tensor=2), **DROPOUT),
    layout(megatron("gpt2", data=2, zero=1), **DROPOUT),
    layout(megatron("mixtral", data=2, expert=2, zero=1)),
    pytest.param(layout(megatron("gpt2", context=2), **DROPOUT), marks=pytest.mark.full),
    pytest.param(
        layout(
            megatron(
                "gpt2",
                tensor=2,
                pipeline=2,
                layers=4,
                own=(("virtual_pipeline_model_parallel_size", 2),),
                label="vpp2",
            ),
            **DROPOUT,
        ),
        marks=pytest.mark.full,
    ),
    pytest.param(layout(megatron("gpt2", pipeline=2, data=2, zero=1), **DROPOUT), marks=pytest.mark.full),
    pytest.param(layout(megatron("llama", data=2, zero=1), **BF16), marks=pytest.mark.full),
    pytest.param(layout(megatron("llama", tensor=2), **BF16), marks=pytest.mark.full),
    pytest.param(layout(megatron("llama", data=2, zero=1), **FP16), marks=pytest.mark.full),
    pytest.param(layout(megatron("llama", tensor=2), **FP16), marks=pytest.mark.full),
    pytest.param(layout(megatron("llama", tensor=2), **MOMENTUM), marks=pytest.mark.full),
]
PAIRS = [
    layout(matrix.Cell(engine=EngineName.local, family="gpt2")),
    layout(deepspeed("gpt2", 3, data=2)),
    layout(megatron("gpt2", tensor=2)),
    layout(megatron("gpt2", pipeline=2)),
    layout(megatron("gpt2", context=2)),
    layout(megatron("gpt2", data=2, zero=1)),
    layout(megatron("gpt2", tensor=2, pipeline=2)),
    layout(megatron("gpt2", pipeline=2, data=2, zero=1)),
    layout(megatron("gpt2", tensor=2, data=2, zero=1)),
]


@pytest.mark.parametrize("case", quick(SAME, 0), ids=str)
def test_resume_in_the_same_layout_is_bitwise(case: Layout, saved: Saved, pool: RankPool) -> None:
    check_same(case, saved, pool)


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "sources"),
    list(neighbours(PAIRS)),
    ids=lambda part: str(part) if isinstance(part, Layout) else "",
)
def test_resume_in_another_layout(
    target: Layout, sources: list[Layout], saved: Saved, pool: RankPool
) -> None:
    check_pairs(target, sources, saved, pool)


def test_dropout_changes_the_loss(pool: RankPool) -> None:
    """Otherwise the cells with dropout would prove nothing."""
    dropping, without = (
        pool.run(one_step, megatron("gpt2", tensor=2).plan(OptimizerCase.ADAM, **more), None, ranks=2)[0]
        for more in (DROPOUT, {})
    )
    assert abs(dropping - without) > 1e-3


def evaluate(rank: int, ranks: int, plan: RunPlan, batches: int) -> list[tuple[float, int]]:
    """Evaluate twice, with a training step between that must not depend on the first evaluation."""
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    found = [
        engine.eval_step(micro_batches(plan, 0, plan.axes.coordinates(rank).data)[:batches]) for _ in range(2)
    ]
    engine.close()
    return [(result.loss_sum, result.tokens) for result in found]


def test_evaluation_accepts_any_number_of_micro_batches(pool: RankPool) -> None:
    """Virtual stages need a multiple of the pipeline ranks; three is not a multiple of two."""
    virtual = megatron(
        "llama", pipeline=2, layers=4, own=(("virtual_pipeline_model_parallel_size", 2),), label="vpp2"
    )
    local = matrix.Cell(engine=EngineName.local, family="llama", layers=4)
    (ours, again), *_ = pool.run(evaluate, virtual.plan(OptimizerCase.ADAM), 3, ranks=2)
    ((theirs, _),) = pool.run(evaluate, local.plan(OptimizerCase.ADAM), 3, ranks=1)
    assert ours == again
    assert ours[1] == theirs[1]
    assert ours[0] == pytest.approx(theirs[0], abs=1e-3 * 1e-5 * ours[1] + 1e-4)


# ---- defects of the pinned version, and the CPU backend


@pytest.fixture
def fresh() -> Iterator[RankPool]:
    """A rank without any patch of Megatron-core."""
    with rank_pool(1) as ranks:
        yield ranks


def one_step(rank: int, ranks: int, plan: RunPlan, without: str | None) -> float:
    from toolkit.engine.megatron import patches

    if without is not None:
        setattr(patches, without, lambda: None)
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    from toolkit.engine.protocol import StepSettings

    loss = engine.train_step(micro_batches(plan, 0, 0), StepSettings(0, 1e-3)).loss
    engine.close()
    return loss


PATCHES: dict[str, tuple[matrix.Cell, OptimizerCase, str]] = {
    "bind_general_gemm": (megatron("mixtral"), OptimizerCase.ADAM, "te_general_gemm"),
    "default_fp8_to_none": (
        megatron(
            "llama",
            own=(("recompute_granularity", "selective"), ("recompute_modules", ["layernorm"])),
            label="norms",
        ),
        OptimizerCase.ADAM,
        "FP8GlobalStateManager",
    ),
    "shard_any_optimizer": (megatron("llama", zero=1), OptimizerCase.SGD, "Only Adam"),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_each_patch_is_needed(patch: str, fresh: RankPool) -> None:
    cell, case, error = PATCHES[patch]
    plan = cell.plan(case)
    with pytest.raises(RanksFailed, match=error):
        fresh.run(one_step, plan, patch)
    fresh.run(one_step, plan, None)


def one_step_next_to_a_gpu(rank: int, ranks: int, plan: RunPlan) -> float:
    torch.cuda.is_available = lambda: True  # as in a program of the user that has used a GPU before
    return one_step(rank, ranks, plan, None)


@pytest.mark.parametrize("settings", [{}, FP16], ids=["fp32", "fp16"])
def test_run_planned_for_cpus_ignores_gpus(settings: dict[str, Any]) -> None:
    plan = megatron("gpt2").plan(OptimizerCase.ADAM, **settings)
    with rank_pool(1) as ranks:
        assert ranks.run(one_step_next_to_a_gpu, plan) == ranks.run(one_step, plan, None)


def outside(rank: int, ranks: int) -> tuple[str, str]:
    """What other modules see of torch while Megatron-core runs on the CPU."""
    cpu.enable()
    try:
        torch.zeros(1).cuda()
    except (AssertionError, RuntimeError) as error:
        moved = type(error).__name__
    return torch.zeros(1).type(), moved


def test_cpu_backend_does_not_change_torch_for_other_modules(fresh: RankPool) -> None:
    kind, moved = fresh.run(outside)[0]
    assert kind == "torch.FloatTensor"
    assert moved in ("AssertionError", "RuntimeError")


def test_transformer_engine_that_cannot_be_imported_is_an_error() -> None:
    """The plan chose its layers, and Megatron-core would silently take others. It is not installed here."""
    without, with_it = (
        megatron("llama", transformer_engine=version).plan(OptimizerCase.ADAM, Device.CUDA)
        for version in (None, "2.11.0")
    )
    check_transformer_engine(without)
    with pytest.raises(PlanError, match=r"Transformer Engine 2\.11\.0 cannot be imported"):
        check_transformer_engine(with_it)
