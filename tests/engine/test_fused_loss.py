"""``train.loss_kernel=fused`` trains as the plain loss does, in every engine and layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.cases import quick
from toolkit.config.kernels import LossKernel
from toolkit.config.schema import EngineName, Precision
from toolkit.engine.protocol import MicroBatch
from toolkit.errors import ConfigError
from toolkit.models import loss_head
from toolkit.models.build import build_model
from toolkit.models.loss_head import fuse_loss, loss_arguments
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import NO_SP, ODD, TOLERANCE, VPP, Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.measure import Measured, measure
from toolkit.testing.tiny import micro_batches, tiny_plan
from toolkit.train.task import IGNORE_INDEX, NextTokenTask, text_task

STEPS = 3
EXACT = replace(TOLERANCE, loss=1e-6, norm=1e-6, gradient=2e-6, weight=1e-6, evaluation=1e-6)
FUSED: dict[str, Any] = {"train__loss_kernel": LossKernel.fused, "train__loss_chunk": 24}
CELLS = [
    deepspeed("llama", 3, data=2),
    deepspeed("llama", 3, tensor=2),  # a vocabulary that AutoTP divides
    deepspeed("gpt2", 1, pipeline=2),  # tied embeddings
    megatron("llama", tensor=2, label="sp-padded", vocabulary=ODD),
    *(Cell(engine=EngineName.local, family=family) for family in ("gpt2", "llama", "qwen2", "qwen3")),
    *(Cell(engine=EngineName.local, family=family) for family in ("mixtral", "qwen3_moe")),
    *(deepspeed("llama", stage, data=2) for stage in range(3)),
    deepspeed("gpt2", 3, data=2),
    deepspeed("llama", 1, context=2),
    deepspeed("mixtral", 1, data=2, expert=2),
    deepspeed("llama", 1, pipeline=2, documents=True),
    megatron("llama"),
    megatron("llama", tensor=2, label="nosp", own=NO_SP),
    megatron("gpt2", tensor=2, pipeline=2, label="sp"),
    megatron("llama", pipeline=2, layers=4, label="vpp2", own=VPP),
    megatron("llama", context=2),
    megatron("mixtral", data=2, expert=2),
]


def weighted(plan: RunPlan, step: int, data_rank: int) -> list[MicroBatch]:
    """Micro-batches with weights; samples that begin with a small token, also all of one, have no label."""
    return [
        {
            **batch,
            "labels": batch["labels"].masked_fill(batch["input_ids"][:, :1] < 96, IGNORE_INDEX),
            "loss_weights": 0.5 + batch["input_ids"] % 7 / 4,
        }
        for batch in micro_batches(plan, step, data_rank)
    ]


def on_rank(rank: int, ranks: int, plan: RunPlan, wrong: bool = False) -> Measured:
    correct = loss_head.linear_cross_entropy
    if wrong:
        loss_head.linear_cross_entropy = lambda *given, **more: 1.001 * correct(*given, **more)
    try:
        return measure(rank, ranks, plan, steps=STEPS, gradients=True, batches=weighted)
    finally:
        loss_head.linear_cross_entropy = correct


@pytest.fixture(scope="module")
def plain(pool: RankPool) -> dict[Cell, Measured]:
    return {}


def measured(pool: RankPool, cell: Cell, **more: Any) -> Measured:
    found: Measured = pool.run(on_rank, cell.plan(OptimizerCase.SGD, **more), ranks=cell.ranks)[0]
    return found


def expected(pool: RankPool, cell: Cell, plain: dict[Cell, Measured]) -> Measured:
    reference = cell.reference()
    if reference not in plain:
        plain[reference] = measured(pool, reference)
    return plain[reference]


@pytest.mark.parametrize("cell", quick(CELLS, 3), ids=lambda cell: cell.name)
def test_fused_loss_trains_as_the_plain_one(cell: Cell, pool: RankPool, plain: dict[Cell, Measured]) -> None:
    differences = measured(pool, cell, **FUSED).differences(expected(pool, cell, plain))
    assert not differences.over(EXACT), differences


def test_control_a_loss_that_is_a_thousandth_too_large(pool: RankPool, plain: dict[Cell, Measured]) -> None:
    """It also shows that DeepSpeed's pipeline runs the fused loss."""
    cell = deepspeed("gpt2", 1, pipeline=2)
    plan = cell.plan(OptimizerCase.SGD, **FUSED)
    found: Measured = pool.run(on_rank, plan, True, ranks=cell.ranks)[0]
    differences = found.differences(expected(pool, cell, plain))
    assert differences.loss > 1e-4
    assert differences.gradient is not None
    assert differences.gradient > 1e-4


def test_bf16_losses_stay_close_to_the_plain_ones(pool: RankPool) -> None:
    """Both round hidden states and weights to bf16; the difference after three steps is below 2e-3."""
    cell, more = Cell(engine=EngineName.local, family="llama"), {"precision__name": Precision.bf16}
    differences = measured(pool, cell, **more, **FUSED).differences(measured(pool, cell, **more))
    assert differences.loss < 2e-3


@pytest.mark.full
def test_megatrons_own_fusion_excludes_padded_rows(pool: RankPool) -> None:
    """It computes in fp32 and rounds gradients to bf16, as the plain loss does."""
    more = {"precision__name": Precision.bf16}
    cell = megatron("llama", tensor=2, label="sp-padded", vocabulary=ODD)
    fusion = replace(cell, own=(("cross_entropy_loss_fusion", True),))
    differences = measured(pool, fusion, **more).differences(measured(pool, cell, **more))
    assert differences.loss < 1e-4


def test_router_loss_is_added(pool: RankPool) -> None:
    cell, more = Cell(engine=EngineName.local, family="mixtral"), {"model__router_aux_loss_coef": 0.5}
    differences = measured(pool, cell, **more, **FUSED).differences(measured(pool, cell, **more))
    assert not differences.over(EXACT), differences


def test_evaluation_has_logits_only_for_metrics() -> None:
    plan = tiny_plan(**FUSED)
    model, batch = fuse_loss(build_model(plan, "cpu"), plan).eval(), micro_batches(plan, 0)[0]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    task = text_task(plan)
    assert isinstance(task, NextTokenTask)
    with torch.no_grad():
        with_logits = task.evaluate(model, batch)
        task.predicts = False
        without = task.evaluate(model, batch)
    assert with_logits["preds"].shape == (*batch["labels"].shape, 264)
    assert list(without) == ["loss"]
    assert float(without["loss"]) == pytest.approx(float(with_logits["loss"]), rel=1e-6)


def test_a_model_that_changes_its_logits_is_refused() -> None:
    plan = tiny_plan(**FUSED)
    model = build_model(plan, "cpu")
    output_layer = model.get_output_embeddings()
    output_layer.register_forward_hook(lambda module, given, logits: logits.tanh() * 30)
    fuse_loss(model, plan)
    batch = micro_batches(plan, 0)[0]
    with pytest.raises(ConfigError, match=r"soft-capping(.|\n)*train\.loss_kernel=plain"):
        model(input_ids=batch["input_ids"], **loss_arguments(model, batch))


def test_an_output_layer_with_a_bias_is_refused() -> None:
    plan = tiny_plan(**FUSED)
    model = build_model(plan, "cpu")
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(264))
    with pytest.raises(ConfigError, match="bias"):
        fuse_loss(model, plan)
