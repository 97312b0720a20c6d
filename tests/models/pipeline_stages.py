"""Build the stages of a pipeline with given weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from toolkit.families import FAMILIES
from toolkit.layout.axes import Axes
from toolkit.models.build import replace_parameters
from toolkit.models.stage import StageModel, build_stage
from toolkit.plan.types import RunPlan


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
