"""``model.target``: any torch.nn.Module, named by its dotted path and built from ``model.arguments``."""

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
from toolkit.plan.target import check_target

GIVES = "model.target is a class derived from torch.nn.Module, or a function whose annotation says that it returns one"


def build_target(
    model: ModelConfig, seed: int, *, documents: DocumentMasking = DocumentMasking.joined
) -> nn.Module:
    """The module on the CPU with the weights that its constructor draws under ``seed``; random state outside is unchanged.

    With ``documents`` kept apart its forward takes ``position_ids`` beside ``input_ids`` and ``labels``.

    Raises:
        ConfigError: there is no such class, it refuses its arguments, or it is no module that can be trained here.
    """
    factory = _find(model)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        try:
            module = factory(**model.arguments)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # it comes from inside the user's code: the traceback is what helps
            given = ", ".join(model.arguments) or "none"
            raise _problem(
                model,
                f"it does not accept the arguments given ({given}): {error}",
                "model.arguments are the arguments of the class",
                "write +model.arguments.NAME=VALUE for each that it needs, and none that it lacks",
            ) from error
    if not isinstance(module, nn.Module):
        raise _problem(model, f"it gives a {type(module).__name__}", GIVES, "return what the annotation says")
    _check(module, model)
    if documents is DocumentMasking.separate:
        _check_takes_positions(module, model)
    return module


def configuration(model: ModelConfig, seed: int) -> dict[str, Any] | None:
    """What transformers opens an exported ``model.target`` by (``config.json``); None where the module is none of its own."""
    module = build_target(model, seed)
    config: Any = getattr(module, "config", None)
    if not hasattr(module, "save_pretrained") or not hasattr(config, "to_diff_dict"):
        return None
    return {
        **config.to_diff_dict(),
        "model_type": config.model_type,
        "architectures": [type(module).__name__],
    }


def _find(model: ModelConfig) -> Callable[..., nn.Module]:
    """The class or function. Raises ConfigError before it is called if it is neither, or gives no module by its type.

    The name may come from a configuration that somebody else wrote, and calling any function of any package is running any code.
    """
    assert model.target is not None, "the plan is of model.target"
    path, _, name = model.target.rpartition(".")
    check_target(model)
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
                GIVES,
                "name a class that is derived from it",
            )
    elif not _gives_module(factory):
        raise _problem(
            model,
            f"the function {name} does not say that it returns a torch.nn.Module",
            GIVES,
            f"annotate it: def {name}(...) -> torch.nn.Module; or name the class itself",
        )
    return factory


def _gives_module(function: Callable[..., Any]) -> bool:
    """By the annotation of what it returns."""
    try:
        given = typing.get_type_hints(function).get("return")
    except (
        NameError,
        TypeError,
        AttributeError,
    ):  # an annotation that names what is imported for type checkers only
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
                "state that training changes is a parameter: ranks would disagree on other state, and checkpoints lack it",
                "take LayerNorm or GroupNorm, or write track_running_stats=False",
            )


def _check_takes_positions(module: nn.Module, model: ModelConfig) -> None:
    parameters = inspect.signature(module.forward).parameters
    if "position_ids" not in parameters:  # one that takes any name may as well ignore it
        raise _problem(
            model,
            f"its forward({', '.join(parameters)}) has no position_ids, and data.documents=separate",
            "a model that keeps documents apart is told where they begin: position_ids is 0 at the first token of each",
            "write forward(input_ids, labels, position_ids) and mask attention by them, or data.documents=joined",
        )


def _problem(model: ModelConfig, seen: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError(Problem("model.target", f"model.target={model.target}: {seen}", rule, remedy))
