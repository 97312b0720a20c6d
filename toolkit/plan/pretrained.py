"""Read the sizes of ``model.pretrained`` from its ``config.json``. No other part of planning reads files."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from toolkit.config.schema import ModelConfig, RunConfig
from toolkit.errors import InputError, PlanError, Problem
from toolkit.families import FAMILIES
from toolkit.families.model_files import parse_model_config


def resolve(config: RunConfig) -> RunConfig:
    """Fill the sizes that are null from the pretrained model's configuration.

    Raises as :func:`resolve_model`.
    """
    model = resolve_model(config.model)
    return config if model is config.model else replace(config, model=model)


def resolve_model(model: ModelConfig) -> ModelConfig:
    """As :func:`resolve`, for the model section.

    Keys of training (dropout, router loss, initial weights) do not change.

    Raises:
        InputError: the model does not exist, or no family covers its model type.
        PlanError: a size in ``model`` differs from that of the pretrained model.
    """
    if model.pretrained is None or model.target is not None:
        return model
    written = _read(model.pretrained)
    kind = written.get("model_type")
    if kind not in FAMILIES:
        raise InputError(
            Problem(
                "model.pretrained",
                f"model.pretrained={model.pretrained}, whose model_type is {kind!r}",
                f"a pretrained model is of one of the families {', '.join(FAMILIES)}",
                "wrap it in a module and train that: model.target=my.package.Model",
            )
        )
    found = parse_model_config(FAMILIES[kind], written, f"config.json of model.pretrained={model.pretrained}")
    filled: dict[str, Any] = {}
    problems: list[Problem] = []
    for field in fields(ModelConfig):
        if field.default is not None:
            continue
        ours, theirs = getattr(model, field.name), getattr(found, field.name)
        if ours is None:
            filled[field.name] = theirs
        elif theirs is not None and ours != theirs:
            problems.append(
                Problem(
                    f"model.{field.name}",
                    f"model.{field.name}={ours}, but {model.pretrained} has {theirs}",
                    "the sizes of a pretrained model are fixed",
                    f"leave out model.{field.name} (model=pretrained), or drop model.pretrained for random "
                    f"weights",
                )
            )
    if problems:
        raise PlanError(*problems)
    return replace(model, **filled)


def _read(name: str) -> dict[str, Any]:
    folder = Path(name).expanduser()
    path = folder / "config.json" if folder.is_dir() else _download(name)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _unreadable(name, "the folder has no config.json") from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(name, f"its config.json is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise _unreadable(name, "its config.json is not an object")
    return found


def _download(name: str) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise _unreadable(name, "there is no such folder")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json"))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise _unreadable(
            name, f"there is no such folder, and the hub responds: {str(error).splitlines()[0]}"
        ) from error


def _unreadable(name: str, why: str) -> InputError:
    return InputError(
        Problem(
            "model.pretrained",
            f"model.pretrained={name}: {why}",
            "model.pretrained is a folder with a config.json in Hugging Face's format, or a hub id",
            "write model.pretrained=./folder or model.pretrained=organisation/model",
        )
    )
