"""The model as DeepSpeed wants it, with memory for weights but no weights: ``engine.load`` brings those."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from toolkit.engine import deepspeed_compat as compat
from toolkit.engine.optimizers import parameter_groups
from toolkit.engine.precision import DTYPES
from toolkit.models.build import build_model
from toolkit.plan.types import RunPlan


def build(
    deepspeed: ModuleType, plan: RunPlan, settings: Mapping[str, Any], device: torch.device
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """The module on ``device`` in the run's precision, and its parameter groups.

    Under ZeRO 3 each parameter is cut as soon as it has memory, so no rank ever holds more than its share and one whole
    parameter. DeepSpeed's own way, constructing under ``zero.Init``, patches every constructor of tensors meanwhile: it rounds
    buffers such as rotary frequencies to 16 bits and changes what initialisers draw.
    """
    module = build_model(plan, device, meta=True)
    groups = parameter_groups(module, plan.config.optim)
    zero3 = None
    if plan.config.zero.stage == 3:
        compat.number_from_zero()
        zero3 = deepspeed.zero.Init(config_dict_or_path=dict(settings))
        if zero3.mem_efficient_linear:
            # torch's linear saves a view of the gathered weight for backward and so keeps it from being freed.
            zero3._enable_mem_efficient_linear()
    made: dict[nn.Parameter, Any] = {}  # one for all places of a tied parameter
    for owner, name, parameter in list(_places(module)):
        if parameter not in made:
            memory = torch.empty(parameter.shape, dtype=_dtype(parameter, plan), device=device)
            made[parameter] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            if zero3 is not None:
                zero3._convert_to_deepspeed_param(made[parameter])
                made[parameter].partition()  # without the broadcast of ``zero.Init``: there is nothing in it yet
        owner._parameters[name] = made[parameter]
    for group in groups:
        group["params"] = [made[parameter] for parameter in group["params"]]
    return module, groups


def _dtype(parameter: nn.Parameter, plan: RunPlan) -> torch.dtype:
    return DTYPES[plan.config.precision.name] if parameter.is_floating_point() else parameter.dtype


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every place that names a parameter; a tied parameter has several."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, parameter
