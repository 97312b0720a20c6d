"""Experts in one grouped matrix product, whose sizes the host does not read, against transformers' loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from toolkit.families import get_family
from toolkit.models.build import build_model
from toolkit.testing.tiny import tiny_plan

LAYERS = {"mixtral": MixtralExperts, "qwen3_moe": Qwen3MoeExperts}


@pytest.mark.parametrize("idle", [False, True], ids=["all", "idle"])
@pytest.mark.parametrize("family", LAYERS)
def test_grouped_experts_equal_a_loop_over_experts(family: str, idle: bool) -> None:
    plan = tiny_plan(family)
    assert plan.shape is not None
    config: Any = AutoConfig.for_model(**get_family(family).hugging_face_config(plan.shape))
    experts = LAYERS[family](config)
    generator = torch.Generator().manual_seed(5)
    for parameter in experts.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    tokens, count, chosen = 24, plan.shape.num_local_experts, plan.shape.num_experts_per_tok
    hidden = torch.randn(tokens, plan.shape.hidden_size, generator=generator)
    weights = torch.rand(tokens, chosen, generator=generator)
    available = count - 1 if idle else count  # the last expert gets no token
    assert available >= chosen
    scores = torch.rand(tokens, available, generator=generator)
    index = scores.topk(chosen).indices
    upstream = torch.randn(tokens, plan.shape.hidden_size, generator=generator)
    found = {}
    for implementation in ("eager", "grouped_mm"):
        config._experts_implementation = implementation
        inputs = [value.clone().requires_grad_() for value in (hidden, weights)]
        output = experts(inputs[0], index, inputs[1])
        gradients = torch.autograd.grad(output, [*inputs, *experts.parameters()], upstream)
        found[implementation] = [output.detach(), *gradients]
    for ours, theirs in zip(found["grouped_mm"], found["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert all(bool(value.isfinite().all()) for value in found["grouped_mm"])
    if idle:
        assert all(not value[-1].any() for value in found["grouped_mm"][3:]), "no gradient of the idle expert"


@pytest.mark.parametrize("family", LAYERS)
def test_families_with_experts_use_grouped_products(family: str) -> None:
    model: Any = build_model(tiny_plan(family), "cpu", meta=True)
    assert model.config._experts_implementation == "grouped_mm"
