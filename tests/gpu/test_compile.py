"""Compiled layers and fp8 products on one GPU. Nothing here has run yet: no GPU was at hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.runs import sized, text
from toolkit.config.kernels import CompileMode
from toolkit.config.schema import EngineName
from toolkit.engine import fp8
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.parity import rank_samples, train_steps
from toolkit.train.task import text_task

pytestmark = pytest.mark.gpu


def losses_and_graphs(rank: int, ranks: int, plan: RunPlan) -> tuple[list[float], tuple[int, int], int]:
    """Losses of six steps with an evaluation; graphs after it and at the end; graph breaks."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    results = train_steps(engine, plan, range(3), rank=rank, batches=text)
    engine.eval_step(rank_samples(engine, plan, 100, rank, text))
    before = counters["stats"]["unique_graphs"]
    results += train_steps(engine, plan, range(3, 6), rank=rank, batches=text)
    engine.close()
    losses, graphs = [each.loss for each in results], counters["stats"]["unique_graphs"]
    return losses, (before, graphs), sum(counters["graph_break"].values())


def with_keys(plan: RunPlan, **changes: Any) -> RunPlan:
    """``plan`` with keys of other sections, planned again."""
    from toolkit.plan import make_plan

    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(plan.config, section), name, value)
    return make_plan(plan.config, plan.world)


@pytest.mark.parametrize(
    ("engine", "stage"), [(EngineName.local, 0), (EngineName.deepspeed, 2), (EngineName.deepspeed, 3)]
)
def test_compiled_layers_agree_with_eager_ones(engine: EngineName, stage: int, gpu: RankPool) -> None:
    eager = gpu.run(losses_and_graphs, sized(engine, stage), timeout=300)[0][0]
    plan = with_keys(sized(engine, stage), compile__mode=CompileMode.auto)
    assert plan.kernels.compile.name == "layers"
    losses, graphs, breaks = gpu.run(losses_and_graphs, plan, timeout=600)[0]
    assert breaks == 0
    assert graphs[0] == graphs[1] <= 4, "two of layers, two of the fused loss"
    assert losses == pytest.approx(eager, abs=2e-2)


def fp8_difference(rank: int, ranks: int) -> float:
    """The largest relative difference of a product on this GPU and on the CPU."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(size, 256, generator=generator).bfloat16() for size in (128, 512))
    here = fp8.multiply(left.cuda(), right.cuda()).float().cpu()
    exact = fp8.multiply(left, right).float()
    return float((here - exact).abs().max() / exact.abs().max())


def test_fp8_products_equal_those_of_a_cpu(gpu: RankPool) -> None:
    assert gpu.run(fp8_difference)[0] < 1e-2


def test_fp8_losses_stay_near_those_of_bf16(gpu: RankPool) -> None:
    plan = sized(EngineName.deepspeed, 2)
    bf16 = gpu.run(losses_and_graphs, plan, timeout=300)[0][0]
    compiled = with_keys(sized(EngineName.deepspeed, 2), precision__fp8=True, compile__mode=CompileMode.auto)
    losses, _, breaks = gpu.run(losses_and_graphs, compiled, timeout=600)[0]
    assert breaks == 0
    assert losses == pytest.approx(bf16, abs=5e-2)
