"""Build ``model.target``: any torch.nn.Module, named by its dotted path, with ``model.arguments``."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from toolkit.config.data import DocumentMasking
from toolkit.config.schema import ModelConfig
from toolkit.errors import ConfigError, Problem
from toolkit.plan.model_target import check_model_target

TARGET_RULE = "model.target is a class derived from torch.nn.Module, or a function annotated to return one"


def build_target(
    model: ModelConfig, seed: int, *, documents: DocumentMasking = DocumentMasking.joined
) -> nn.Module:
    """Build the module on the CPU with the weights that its constructor draws under ``seed``.

    The random state outside does not change. With ``data.documents=separate`` the module's forward must
    accept ``position_ids`` in addition to ``input_ids`` and ``labels``.

    Raises:
        ConfigError: the class does not exist, refuses its arguments, or cannot be trained.
    """
    factory = _import_factory(model)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        try:
            module = factory(**model.arguments)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # raised inside the user's code, whose traceback helps most
            given = ", ".join(model.arguments) or "none"
            raise _problem(
                model,
                f"it does not accept the arguments given ({given}): {error}",
                "model.arguments are the arguments of the class",
                "write +model.arguments.NAME=VALUE for each required argument, and no unknown ones",
            ) from error
    if not isinstance(module, nn.Module):
        seen = f"it returns a {type(module).__name__}"
        raise _problem(model, seen, TARGET_RULE, "return the type in the annotation")
    _check(module, model)
    if documents is DocumentMasking.separate:
        _check_takes_positions(module, model)
    return module


def hugging_face_config(model: ModelConfig, seed: int) -> dict[str, Any] | None:
    """The ``config.json`` of an exported ``model.target`` for transformers; None for other modules."""
    module = build_target(model, seed)
    config: Any = getattr(module, "config", None)
    if not hasattr(module, "save_pretrained") or not hasattr(config, "to_diff_dict"):
        return None
    return {
        **config.to_diff_dict(),
        "model_type": config.model_type,
        "architectures": [type(module).__name__],
    }


def _import_factory(model: ModelConfig) -> Callable[..., nn.Module]:
    """Import the class or function, and check its type before calling it.

    A configuration may come from somebody else, and calling any function of any package means running any
    code.

    Raises:
        ConfigError: it is neither a module class nor annotated to return a module.
    """
    assert model.target is not None, "the plan is of model.target"
    path, _, name = model.target.rpartition(".")
    check_model_target(model)
    found = importlib.import_module(path)
    factory = getattr(found, name, None)
    if not isinstance(factory, type) and not inspect.isfunction(factory):
        near = (
            ", ".join(
                key
                for key, value in vars(found).items()
                if isinstance(value, type) and issubclass(value, nn.Module)
            )
            or "none"
        )
        raise _problem(
            model,
            f"{path} has no class {name}; its modules: {near}",
            "the part after the last dot is a class of that module",
            "correct the name",
        )
    if isinstance(factory, type):
        if not issubclass(factory, nn.Module):
            raise _problem(
                model,
                f"{name} is a class that is not derived from torch.nn.Module",
                TARGET_RULE,
                "name a class that is derived from it",
            )
    elif not _returns_module(factory):
        raise _problem(
            model,
            f"the function {name} is not annotated to return a torch.nn.Module",
            TARGET_RULE,
            f"annotate it: def {name}(...) -> torch.nn.Module; or name the class itself",
        )
    return factory


def _returns_module(function: Callable[..., Any]) -> bool:
    """Whether the return annotation of ``function`` is a module class."""
    try:
        given = typing.get_type_hints(function).get("return")
    except (NameError, TypeError, AttributeError):  # a name imported for type checkers only
        return False
    return isinstance(given, type) and issubclass(given, nn.Module)


def _check(module: nn.Module, model: ModelConfig) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise _problem(
            model,
            "it has no parameter that requires a gradient",
            "there is something to train",
            "register weights as torch.nn.Parameter",
        )
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise _problem(
                model,
                f"its {name} ({type(part).__name__}) keeps running statistics",
                "training changes parameters only; other state differs between ranks and is not saved",
                "use LayerNorm or GroupNorm, or write track_running_stats=False",
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
