"""FLOPs by formula compared with torch's counter, on the models that the toolkit builds.

The counter sees operations dispatched to torch. With the attention kernel that multiplies whole matrices it
counts by the formulas' convention: the whole attention matrix, and a backward pass of twice the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from toolkit.families import get_family
from toolkit.families.base import ModelShape
from toolkit.models.build import build_model
from toolkit.plan.flops import FORWARD_AND_BACKWARD, hardware_flops, model_flops
from toolkit.plan.types import RunPlan
from toolkit.testing.tiny import FAMILIES, LENGTH, VOCABULARY, tiny_plan
from toolkit.train.task import NextTokenTask

SEQUENCES = 2
NEAR = 0.02
# Similar models that must differ by more than 2%.
WRONG: dict[str, dict[str, Any]] = {
    "gpt2": {"num_attention_heads": 8},
    "llama": {"num_key_value_heads": 1},
    "qwen2": {"num_key_value_heads": 4},
    "qwen3": {"num_key_value_heads": 4},
    "mixtral": {"num_experts_per_tok": 1},
    "qwen3_moe": {"num_experts_per_tok": 1},
}


def counted(plan: RunPlan, backward: bool) -> float:
    """FLOPs per token of a forward pass and, if requested, the backward pass of the loss."""
    model: Any = filled(build_model(plan, "cpu"))
    if get_family(plan.config.model.family or "").traits.experts:
        model.set_experts_implementation(
            "eager"
        )  # one matrix product per expert; the counter does not support grouped products
    batch = {
        name: torch.arange(SEQUENCES * LENGTH).reshape(SEQUENCES, LENGTH) % VOCABULARY
        for name in ("input_ids", "labels")
    }
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = NextTokenTask().loss_sum(model, batch)
        if backward:
            loss.backward()
    return counter.get_total_flops() / (SEQUENCES * LENGTH)


def filled(module: nn.Module) -> nn.Module:
    """Give uninitialized parameters values."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02)
    return module


def shape_of(plan: RunPlan) -> ModelShape:
    assert plan.shape is not None
    return plan.shape


def forward(shape: ModelShape) -> float:
    return get_family(shape.family).forward_flops(shape, LENGTH).total


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_flops_match_torch(family: str) -> None:
    plan = tiny_plan(family)
    found = counted(plan, backward=False)
    assert forward(shape_of(plan)) == pytest.approx(found, rel=NEAR)
    assert forward(replace(shape_of(plan), **WRONG[family])) != pytest.approx(found, rel=NEAR)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_flops_are_three_times_forward(family: str) -> None:
    plan = tiny_plan(family)
    found = counted(plan, backward=True)
    assert model_flops(plan) == pytest.approx(found, rel=NEAR)
    assert hardware_flops(plan) == model_flops(plan)


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in FAMILIES), ("gpt2", {"model__dropout": 0.1})],
    ids=[*FAMILIES, "gpt2-dropout"],
)
def test_hardware_flops_include_recomputation(family: str, changes: Mapping[str, Any]) -> None:
    """Control: model FLOPs are too small, and full recomputation is too large."""
    plan = tiny_plan(family, train__activation_checkpointing="full", **changes)
    found = counted(plan, backward=True)
    assert hardware_flops(plan) == pytest.approx(found, rel=NEAR)
    assert model_flops(plan) != pytest.approx(found, rel=NEAR)
    parts = get_family(family).forward_flops(shape_of(plan), LENGTH)
    everything = FORWARD_AND_BACKWARD * parts.total + parts.blocks
    stops_early = not get_family(family).traits.experts and not changes
    assert (everything != pytest.approx(found, rel=NEAR)) is stops_early
