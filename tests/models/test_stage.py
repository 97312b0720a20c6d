"""The stages of a pipeline one after another are the model: the same logits to the bit, each parameter under its own name.

pytest tests/models/test_stage.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from toolkit.families import FAMILIES
from toolkit.layout.axes import Axes
from toolkit.models.build import build_model, replace_parameters
from toolkit.models.stage import StageModel, build_stage
from toolkit.plan.types import RunPlan
from toolkit.testing.tiny import micro_batches, tiny_plan


def stages(plan: RunPlan, count: int, weights: dict[str, torch.Tensor]) -> list[StageModel]:
    assert plan.shape is not None
    tied = FAMILIES[plan.shape.family].tied_weights(plan.shape)
    found = [build_stage(replace(plan, axes=Axes(pipeline=count)), "cpu", stage) for stage in range(count)]
    for stage in found:
        assert all(parameter.is_meta for parameter in stage.parameters())
        replace_parameters(stage, lambda parameter: torch.empty(parameter.shape))
        with torch.no_grad():
            for name, parameter in stage.model.named_parameters():
                parameter.copy_(weights[tied.get(name, name)])
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [2, 3])
def test_stages_make_the_model(family: str, count: int) -> None:
    plan = tiny_plan(family, model__num_hidden_layers=3)
    whole = build_model(plan, "cpu")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(0, 0.1, generator=generator)
    weights = dict(whole.named_parameters())
    parts = stages(plan, count, weights)
    ids = micro_batches(plan, 0)[0]["input_ids"]
    with torch.no_grad():
        logits = whole(input_ids=ids, use_cache=False).logits
        assert torch.equal(through(parts, ids), logits)
        next(parts[0].parameters()).mul_(1.01)
        assert not torch.equal(through(parts, ids), logits)


def through(parts: list[StageModel], given: torch.Tensor) -> torch.Tensor:
    for part in parts:
        given = part(given)
    return given
