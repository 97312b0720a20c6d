"""Read the description of ``model.pretrained`` from its ``config.json``. No other planning reads files."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from toolkit.config.model import HuggingFaceConfig, ModelConfig
from toolkit.config.schema import RunConfig
from toolkit.errors import InputError, PlanError, Problem
from toolkit.families import FAMILIES
from toolkit.families.model_files import parse_model_config
from toolkit.plan import hugging_face
from toolkit.plan.deepspeed import merge


def resolve(config: RunConfig) -> RunConfig:
    """Complete the model section from the pretrained model's configuration.

    Raises as :func:`resolve_model`.
    """
    model = resolve_model(config.model)
    return config if model is config.model else replace(config, model=model)


def resolve_model(model: ModelConfig) -> ModelConfig:
    """Resolve the model section as :func:`resolve` does.

    A model of a family gets the sizes that are null. Any other model of transformers gets its class, its
    model type and the fields of its configuration (``model.hf``); ``model.hf.architecture`` requests this for
    a model of a family, too. Keys of training (dropout, router loss, initial weights) do not change.

    Raises:
        InputError: the model does not exist, or neither a family nor a class of transformers is known for it.
        PlanError: a size in ``model`` differs from that of the pretrained model, or ``model.hf.config`` has
            an unknown field.
    """
    if model.target is not None or (model.pretrained is None and model.hf.architecture is None):
        return model
    if model.pretrained is None:
        hugging_face.check_fields(model)
        return model
    written = _read(model.pretrained)
    kind = written.get("model_type")
    if model.hf.architecture is not None or not isinstance(kind, str) or kind not in FAMILIES:
        return _resolve_hugging_face(model, model.pretrained, written)
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


def _resolve_hugging_face(model: ModelConfig, name: str, written: dict[str, Any]) -> ModelConfig:
    kind, classes = written.get("model_type"), written.get("architectures")
    _check_sizes(name, written)
    if not isinstance(kind, str):
        raise _unreadable(name, f"the model_type in its config.json is {kind!r}")
    if model.hf.model_type not in (None, kind):
        raise PlanError(
            Problem(
                "model.hf.model_type",
                f"model.hf.model_type={model.hf.model_type}, but {name} has {kind}",
                "a pretrained model has one type",
                "leave out model.hf.model_type",
            )
        )
    architecture = model.hf.architecture
    if architecture is None:
        if not isinstance(classes, list) or not classes:
            raise InputError(
                Problem(
                    "model.pretrained",
                    f"model.pretrained={name}, whose model_type is {kind!r} and whose config.json has no "
                    "architectures",
                    f"a pretrained model is of one of the families {', '.join(FAMILIES)}, or its class in "
                    "transformers is known",
                    f"write model=huggingface model.pretrained={name} "
                    "model.hf.architecture=AutoModelForCausalLM, or another class",
                )
            )
        architecture = str(classes[0])
    resolved = replace(
        model, hf=HuggingFaceConfig(architecture=architecture, model_type=kind, config=model.hf.config)
    )
    hugging_face.check_fields(resolved, known=tuple(written))
    own = {key: value for key, value in written.items() if key not in hugging_face.NOT_ARCHITECTURE}
    resolved.hf.config = merge(own, model.hf.config)
    return resolved


def _check_sizes(name: str, written: dict[str, Any], above: str = "") -> None:
    """Refuse sizes that no model has: a config.json may be untrusted, and building it would take hours."""
    for key, value in written.items():
        if isinstance(value, dict):
            _check_sizes(name, value, f"{above}{key}.")
        elif isinstance(value, int):
            counted = any(part in key for part in ("layers", "heads", "experts", "blocks"))
            if value > (4096 if counted else 2**31):
                raise _unreadable(name, f"{above}{key}={value} in its config.json is out of bounds")


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
