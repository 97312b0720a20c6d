"""Megatron-core with Transformer Engine's layers, against the local engine on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.cases import BF16
from toolkit.config.schema import EngineName
from toolkit.config.vendors.installed import TRANSFORMER_ENGINE
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.megatron.engine import MegatronEngine
from toolkit.plan.transformer_engine import TESTED, fits_megatron
from toolkit.plan.types import Device, RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import Cell, OptimizerCase, megatron
from toolkit.testing.parity import trace_on_rank
from toolkit.train.task import text_task

VERSION = TRANSFORMER_ENGINE.installed_version
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not VERSION or not fits_megatron(VERSION),
        reason=f"Transformer Engine {TESTED} is not installed (found: {VERSION or 'none'})",
    ),
]
CELLS = {
    "llama": megatron("llama", transformer_engine=VERSION),
    "llama-distributed-optimizer": megatron("llama", zero=1, transformer_engine=VERSION),
    "llama-recomputed": megatron("llama", recompute=True, transformer_engine=VERSION),
    "llama-documents": megatron("llama", documents=True, transformer_engine=VERSION),
    "gpt2": megatron("gpt2", transformer_engine=VERSION),
    "qwen2": megatron("qwen2", transformer_engine=VERSION),
    "qwen3": megatron("qwen3", transformer_engine=VERSION),
    "mixtral": megatron("mixtral", transformer_engine=VERSION),
    "qwen3_moe": megatron("qwen3_moe", transformer_engine=VERSION),
}
# Its kernels for fp32 may use TF32, so cells are compared in bf16: as far as bf16 layouts differ on CPUs.
BF16_LOSS = 5e-3


def plan_of(cell: Cell, **changes: Any) -> RunPlan:
    return cell.plan(OptimizerCase.ADAM, Device.CUDA, **BF16, **changes)


@pytest.mark.parametrize("name", CELLS)
def test_losses_match_the_local_engine(name: str, gpu: RankPool) -> None:
    cell = CELLS[name]
    found, right, other = (
        gpu.run(trace_on_rank, plan, timeout=300)[0]
        for plan in (plan_of(cell), plan_of(cell.reference()), plan_of(cell.reference(), train__seed=77))
    )
    assert right.losses[0] - right.losses[-1] > 0.3
    assert found.distance(right).loss < BF16_LOSS
    assert found.distance(other).loss > BF16_LOSS, "the control: other weights"


def classes(rank: int, ranks: int, plan: RunPlan) -> set[str]:
    """The classes of the model's modules and of its optimizer."""
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    assert isinstance(engine, MegatronEngine)
    model = engine._model
    found = {type(module).__name__ for chunk in model.chunks for module in chunk.modules()}
    found |= {type(master.inner).__module__.partition(".")[0] for master in model.state.masters}
    engine.close()
    torch.cuda.empty_cache()
    return found


def test_plan_decides_the_layers(gpu: RankPool) -> None:
    """Also against what is installed: without the version in the plan, Megatron-core's own layers run."""
    with_it, without = plan_of(CELLS["llama"]), plan_of(megatron("llama"))
    assert with_it.kernels.layers.name == "transformer-engine"
    assert not with_it.warnings
    assert [problem.key for problem in without.warnings] == ["engine.name"]
    found, other = (gpu.run(classes, plan, timeout=300)[0] for plan in (with_it, without))
    assert {"TELayerNormColumnParallelLinear", "TEDotProductAttention", "transformer_engine"} <= found
    assert not {name for name in other if name.startswith("TE")}
    assert EngineName.megatron is with_it.config.engine.name
