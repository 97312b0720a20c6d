"""FLOPs that all ranks compute in a step, by torch's counter, match the plan's hardware FLOPs.

In each engine, with and without recomputation, along each axis that splits matrices.
"""

from __future__ import annotations

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.plan.flops import hardware_flops, model_flops
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import SELECTIVE, Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.parity import train_steps
from toolkit.train.task import text_task

NEAR = 0.02
MODULES = (*SELECTIVE, ("recompute_modules", ["mlp"]))
BLOCK = (("recompute_granularity", "full"), ("recompute_method", "block"), ("recompute_num_layers", 1))
CELLS = {
    "deepspeed": deepspeed("llama", 1),
    "deepspeed-full": deepspeed("llama", 1, recompute=True),
    "deepspeed-zero3-full": deepspeed("llama", 3, data=2, recompute=True),
    "deepspeed-zero3-gpt2-full": deepspeed("gpt2", 3, recompute=True),
    "deepspeed-tensor-full": deepspeed("llama", 1, tensor=2, recompute=True),
    "deepspeed-pipeline-full": deepspeed("llama", 1, pipeline=2, recompute=True),
    "megatron": megatron("llama"),
    "megatron-full": megatron("qwen3", recompute=True),
    "megatron-selective": megatron("llama", tensor=2, own=SELECTIVE),
    "megatron-mlp": megatron("qwen2", own=MODULES),
    "megatron-block": megatron("llama", pipeline=2, layers=4, own=BLOCK),
}
QUICK = ("deepspeed-zero3-full", "megatron-selective")


def counted(rank: int, ranks: int, plan: RunPlan) -> int:
    """The FLOPs of this rank in one step."""
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        train_steps(engine, plan, range(1), rank=rank)
    engine.close()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CELLS]
)
def test_flops_of_all_ranks_match_the_plan(name: str, pool: RankPool) -> None:
    cell: Cell = CELLS[name]
    plan = cell.plan(OptimizerCase.ADAM)
    found = sum(pool.run(counted, plan, ranks=plan.world.ranks)) / plan.units_per_step
    assert hardware_flops(plan) == pytest.approx(found, rel=NEAR)
    recomputes = cell.recompute or bool(cell.own)
    assert (model_flops(plan) != pytest.approx(found, rel=NEAR)) is recomputes
