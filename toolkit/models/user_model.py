"""Build ``model.target``: any torch.nn.Module, named by its dotted path, with ``model.arguments``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from toolkit.config.data import DocumentMasking
from toolkit.config.model import ModelConfig
from toolkit.errors import ConfigError, Problem
from toolkit.progress import report_progress
from toolkit.user_code import UserObject, build_user_object


def build_user_module(
    model: ModelConfig, seed: int, *, documents: DocumentMasking = DocumentMasking.joined
) -> nn.Module:
    """Build the module on the CPU with the weights that its constructor draws under ``seed``.

    The random state outside does not change. With ``data.documents=separate`` the module's forward must
    accept ``position_ids`` in addition to ``input_ids`` and ``labels``.

    Raises:
        ConfigError: the class does not exist, refuses its arguments, or cannot be trained.
    """
    assert model.target is not None, "the plan is of model.target"
    given = UserObject("model", model.target, model.arguments)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), report_construction():
        torch.manual_seed(seed)
        module = build_user_object(given, nn.Module)
    check_trainable(module, "model.target", model.target)
    if documents is DocumentMasking.separate:
        _check_takes_positions(module, model)
    return module


@contextmanager
def report_construction() -> Iterator[None]:
    """Report each parameter that a module registers inside the context as progress."""

    def report(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        report_progress("building the model")

    handle = register_module_parameter_registration_hook(report)
    try:
        yield
    finally:
        handle.remove()


def hugging_face_config(model: ModelConfig, seed: int) -> dict[str, Any] | None:
    """Return the ``config.json`` of an exported ``model.target`` for transformers; None for other modules."""
    module = build_user_module(model, seed)
    config: Any = getattr(module, "config", None)
    if not hasattr(module, "save_pretrained") or not hasattr(config, "to_diff_dict"):
        return None
    return {
        **config.to_diff_dict(),
        "model_type": config.model_type,
        "architectures": [type(module).__name__],
    }


def check_trainable(module: nn.Module, key: str, value: str) -> None:
    """Refuse a module without trainable parameters, or with state that training changes besides parameters.

    Args:
        key, value: what the user wrote to select the module, for errors.

    Raises:
        ConfigError: it cannot be trained.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(
            Problem(
                key,
                f"{key}={value}: it has no parameter that requires a gradient",
                "the model must have at least one trainable parameter",
                "register weights as torch.nn.Parameter",
            )
        )
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise ConfigError(
                Problem(
                    key,
                    f"{key}={value}: its {name} ({type(part).__name__}) keeps running statistics",
                    "training changes parameters only; other state differs between ranks and is not saved",
                    "use LayerNorm or GroupNorm, or write track_running_stats=False",
                )
            )


def _check_takes_positions(module: nn.Module, model: ModelConfig) -> None:
    parameters = inspect.signature(module.forward).parameters
    if "position_ids" not in parameters:  # **kwargs is not enough, since it may be ignored
        raise _problem(
            model,
            f"its forward({', '.join(parameters)}) has no position_ids, and data.documents=separate",
            "a model that separates documents gets position_ids, which are 0 at the first token of each",
            "write forward(input_ids, labels, position_ids) and mask by them, or data.documents=joined",
        )


def _problem(model: ModelConfig, seen: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(Problem("model.target", f"model.target={model.target}: {seen}", rule, remedy))
