"""Build the module that a plan describes; ``engine.load`` brings the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from toolkit.families import get_family
from toolkit.models.target import build_target
from toolkit.plan.types import RunPlan


def build_model(plan: RunPlan, device: torch.device | str, *, meta: bool = False) -> nn.Module:
    """Build the plan's model on ``device``, in fp32 and training mode.

    Parameters of a family are uninitialized (see ``models/initial_weights.py``); those of ``model.target``
    are as its constructor initialized them under the run's seed. Buffers are always as the constructor made
    them.

    Args:
        meta: put parameters on the meta device and buffers on ``device``. If ``device`` is meta, buffers are
            on the CPU, because only the constructor can compute them.

    Raises:
        ConfigError: ``model.target`` cannot be built.
    """
    device = torch.device(device)
    meta = meta or device.type == "meta"
    buffer_device = torch.device("cpu") if device.type == "meta" else device
    if plan.shape is None:
        module = build_target(plan.config.model, plan.config.train.seed, documents=plan.config.data.documents)
        if meta:
            replace_parameters(module, lambda parameter: torch.empty_like(parameter, device="meta"))
    else:
        module = _build_family(plan)
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

    assert plan.shape is not None
    settings = get_family(plan.shape.family).hugging_face_config(plan.shape)
    config = AutoConfig.for_model(
        **{**settings, "use_cache": False, "dtype": "float32", "bos_token_id": None, "eos_token_id": None}
    )
    with _parameters_on_meta():
        module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if plan.config.train.activation_checkpointing:
        module.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
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


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters on the meta device and buffers on real devices.

    Under ``torch.device("meta")`` buffers such as rotary frequencies would be lost.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:  # a parameter that is being tied stays the same object
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    # torch registers what the hook returns, although its annotation has no return value.
    hook = register_module_parameter_registration_hook(on_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()
