"""torch.compile of a model, as ``RunPlan.kernels.compile`` decides.

The ``forward`` of each layer is compiled in place, so parameters keep their names, and hooks that DeepSpeed
or an observer registers on a layer run outside its graph. Activation checkpointing is part of a layer's
``forward`` and so of its graph. torch.compile caches graphs by the code of ``forward`` and takes weights as
inputs, so one graph serves all layers of a class; evaluation, which computes no gradients, has a second one.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from toolkit.config.kernels import CompileMode
from toolkit.errors import ConfigError, Problem
from toolkit.models.layers import find_layers
from toolkit.plan.types import RunPlan

OFF = "TORCHDYNAMO_DISABLE"


def compile_model(module: nn.Module, plan: RunPlan) -> None:
    """Compile ``module`` or its layers in place. The first call of each compiles it.

    Layers of families have fixed shapes and no graph breaks, so that a break is an error rather than a slow
    run. Other models may have both: a break splits a graph, and a second shape compiles one for all shapes.

    Raises:
        ConfigError: the model has no layers, or torch.compile is turned off.
    """
    mode = CompileMode(plan.kernels.compile.name)
    if mode is CompileMode.none:
        return
    if os.environ.get(OFF) == "1":  # torch.compile would return every function as it is
        raise ConfigError(
            Problem(
                "compile.mode",
                f"{OFF}=1, compile.mode={plan.config.compile.mode.value}, which is {mode.value} here",
                "the variable turns torch.compile off",
                f"unset {OFF}, or write compile=none",
            )
        )
    whole = mode is CompileMode.full
    of_a_family, own_task = plan.shape is not None, plan.config.task.target is not None
    for part in [module] if whole else compiled_layers(module, plan):
        part.forward = torch.compile(
            part.forward,
            fullgraph=of_a_family and not whole,
            dynamic=False if of_a_family and not own_task else None,
            backend=plan.config.compile.backend.value,
        )


def gather_whole_layers(module: nn.Module, plan: RunPlan) -> None:
    """Let ZeRO 3 gather and release a compiled layer as a whole. Call it before ``deepspeed.initialize``.

    Otherwise ZeRO 3 has hooks on every linear layer, and each of them breaks the graph (Dynamo reaches its
    limit of recompilations with two layers). A leaf module of DeepSpeed has hooks only on itself, outside of
    the graph, and needs one all-gather instead of one per weight.
    """
    from deepspeed.utils import set_z3_leaf_module

    if plan.kernels.compile.name == CompileMode.layers.value:
        for layer in compiled_layers(module, plan):
            set_z3_leaf_module(layer, True)


def compiled_layers(module: nn.Module, plan: RunPlan) -> list[nn.Module]:
    """Return the layers of ``module``; a pipeline stage may have none.

    Raises:
        ConfigError: the model has none.
    """
    layers = find_layers(module)
    if not layers and plan.axes.pipeline == 1:
        model = plan.config.model
        raise ConfigError(
            Problem(
                "compile.mode",
                f"compile.mode=layers, {model.source_key}={model.target or model.hf.architecture}",
                "the layers of a model are the members of its torch.nn.ModuleList, and this model has none",
                "write compile=full, or compile=none",
            )
        )
    return layers
