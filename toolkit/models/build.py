"""Build the module that a plan describes; ``engine.load`` brings the weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from toolkit.config.data import DocumentMasking
from toolkit.config.kernels import AttentionKernel
from toolkit.families import get_family
from toolkit.models.attention_interface import use_kernel
from toolkit.models.hugging_face import build_skeleton
from toolkit.models.user_model import build_user_module
from toolkit.plan.hugging_face import parameters_on_meta
from toolkit.plan.types import RunPlan


def build_model(plan: RunPlan, device: torch.device | str, *, meta: bool = False) -> nn.Module:
    """Build the plan's model on ``device``, in fp32 and training mode.

    Parameters of ``model.target`` are as its constructor initialized them under the run's seed; others are
    uninitialized (see ``models/initial_weights.py``). Buffers are always as the constructor made them, or as
    ``model.pretrained`` stores them.

    Args:
        meta: put parameters on the meta device and buffers on ``device``. If ``device`` is meta, buffers are
            on the CPU, because only the constructor can compute them.

    Raises:
        UserError: ``model.target`` or ``model.hf`` cannot be built.
    """
    device = torch.device(device)
    meta = meta or device.type == "meta"
    buffer_device = torch.device("cpu") if device.type == "meta" else device
    if plan.config.model.target is not None:
        module = build_user_module(
            plan.config.model, plan.config.train.seed, documents=plan.config.data.documents
        )
        if meta:
            replace_parameters(module, lambda parameter: torch.empty_like(parameter, device="meta"))
    else:
        module = build_skeleton(plan) if plan.shape is None else _build_family(plan)
        if not meta:
            replace_parameters(module, lambda parameter: torch.empty_like(parameter, device=buffer_device))
    # ``Module.to`` would fail on meta parameters.
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(buffer_device)
    return (module if meta else module.to(buffer_device)).train()


def _build_family(plan: RunPlan) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.models.recomputation import enable_recomputation

    assert plan.shape is not None
    settings = get_family(plan.shape.family).hugging_face_config(plan.shape)
    config = AutoConfig.for_model(
        **{**settings, "use_cache": False, "dtype": "float32", "bos_token_id": None, "eos_token_id": None}
    )
    with parameters_on_meta():
        module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    use_kernel(
        module,
        AttentionKernel(plan.kernels.attention.name),
        documents=plan.config.data.documents is DocumentMasking.separate,
    )
    enable_recomputation(module, plan)
    return module


def replace_parameters(module: nn.Module, make: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Replace the memory of every parameter; tied parameters stay tied."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in replaced:
                    memory = make(parameter).detach()
                    replaced[parameter] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                part._parameters[name] = replaced[parameter]
