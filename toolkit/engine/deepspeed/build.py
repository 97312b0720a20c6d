"""Build this rank's part of the model for DeepSpeed, with uninitialized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from toolkit.checkpoint.shard import Box
from toolkit.config.kernels import AttentionKernel
from toolkit.engine.deepspeed import context_parallel, patches, tensor_parallel
from toolkit.engine.deepspeed.partitions import ParameterBox
from toolkit.engine.optimizers import module_groups
from toolkit.engine.precision import DTYPES
from toolkit.models.build import build_model
from toolkit.models.loss_head import fuse_loss
from toolkit.plan.types import RunPlan

# Attributes that DeepSpeed reads from a parameter: sharded by tensor parallelism; an expert's, and its group.
MARKS = ("tensor_model_parallel", "allreduce", "group_name")


@dataclass(frozen=True, slots=True)
class DeepSpeedModel:
    """The module in the run's precision, the optimizer's parameter groups, and the box of each parameter."""

    module: nn.Module
    groups: list[dict[str, Any]]
    boxes: Mapping[torch.Tensor, ParameterBox]


def build_deepspeed_model(
    deepspeed: ModuleType, plan: RunPlan, settings: Mapping[str, Any], device: torch.device, *, rank: int
) -> DeepSpeedModel:
    """Build the model of ``rank`` on ``device``.

    Under ZeRO 3 each parameter is partitioned as soon as it has memory, so a rank stores at most its share
    and one whole parameter. Constructing the model inside ``zero.Init`` would patch all tensor constructors:
    it rounds buffers such as rotary frequencies to 16 bits and changes what initializers draw.
    """
    module = build_model(plan, device, meta=True)
    finish = _apply_axes(module, plan, settings, rank)
    fuse_loss(module, plan, tensor_parallel.output_layer(module) if plan.axes.tensor > 1 else None)
    groups = module_groups(module, plan.config.optim)
    if plan.axes.expert > 1:
        for number, group in enumerate(groups):
            group["name"] = f"group{number}"  # required by DeepSpeed, which splits off the experts
    whole = {spec.name: spec.shape for spec in plan.parameters}
    zero3 = None
    if settings["zero_optimization"]["stage"] == 3:
        patches.reset_zero3_counters()
        shared = tensor_parallel.data_group() if plan.axes.tensor > 1 else None
        zero3 = deepspeed.zero.Init(config_dict_or_path=dict(settings), data_parallel_group=shared)
        if zero3.mem_efficient_linear:
            # torch's linear saves a view of the gathered weight for backward, so the weight could not be
            # freed.
            zero3._enable_mem_efficient_linear()
    created: dict[nn.Parameter, Any] = {}
    boxes: dict[torch.Tensor, ParameterBox] = {}
    for path, owner, name, parameter in list(_named_parameter_slots(module)):
        if parameter not in created:
            memory = torch.empty(parameter.shape, dtype=_dtype(parameter, plan), device=device)
            created[parameter] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
            created[parameter].__dict__.update(
                {mark: getattr(parameter, mark) for mark in MARKS if hasattr(parameter, mark)}
            )
            shape = tuple(parameter.shape)
            boxes[created[parameter]] = _parameter_box(path, whole.get(path, shape), shape, plan, rank)
            if zero3 is not None:
                zero3._convert_to_deepspeed_param(created[parameter])
                created[parameter].partition()  # without zero.Init's broadcast, since it is uninitialized
        owner._parameters[name] = created[parameter]
    for group in groups:
        group["params"] = [created[parameter] for parameter in group["params"]]
    finish()
    return DeepSpeedModel(module, groups, boxes)


def _apply_axes(
    module: nn.Module, plan: RunPlan, settings: Mapping[str, Any], rank: int
) -> Callable[[], None]:
    """Shard the model over its axes. Call the returned function once the parameters have memory."""
    axes = plan.axes
    if axes.context > 1:
        context_parallel.apply_context_parallel(
            module,
            AttentionKernel(plan.kernels.attention.name),
            ranks=axes.context,
            index=axes.coordinates(rank).context,
        )
    if axes.expert > 1:
        from toolkit.engine.deepspeed import expert_parallel  # imports DeepSpeed's layers

        expert_parallel.apply_expert_parallel(module, axes.expert)
    return tensor_parallel.apply_tensor_parallel(module, settings) if axes.tensor > 1 else lambda: None


def _parameter_box(
    name: str, whole: tuple[int, ...], shape: tuple[int, ...], plan: RunPlan, rank: int
) -> ParameterBox:
    """Return the box of a local parameter of ``shape``: an axis splits one dim evenly, in rank order."""
    axes = plan.axes
    cut = [dim for dim, (full, local) in enumerate(zip(whole, shape, strict=True)) if full != local]
    if not cut:
        return ParameterBox(name, whole, Box.whole(whole), axes.coordinates(rank).tensor, axes.tensor)
    (dim,) = cut
    parts = whole[dim] // shape[dim]
    assert parts * shape[dim] == whole[dim], f"{name} is cut from {whole} to {shape}"
    assert parts == max(axes.tensor, axes.expert), f"{name} is cut into {parts}"
    offset = tuple(rank % parts * shape[dim] if at == dim else 0 for at in range(len(shape)))
    return ParameterBox(name, whole, Box(offset, shape))


def _dtype(parameter: nn.Parameter, plan: RunPlan) -> torch.dtype:
    return DTYPES[plan.config.precision.name] if parameter.is_floating_point() else parameter.dtype


def _named_parameter_slots(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (path, owner, name, parameter) of every registration; a tied parameter occurs several times."""
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}" if path else name, owner, name, parameter
