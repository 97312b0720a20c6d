"""Pipeline stages in sequence equal the model: bitwise equal logits, each parameter under its own name."""

from __future__ import annotations

import pytest
import torch

from tests.models.pipeline_stages import stages
from toolkit.families import FAMILIES
from toolkit.models.build import build_model
from toolkit.models.stage import StageModel
from toolkit.testing.tiny import micro_batches, tiny_plan


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [2, 3])
def test_pipeline_stages_match_the_model(family: str, count: int) -> None:
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
