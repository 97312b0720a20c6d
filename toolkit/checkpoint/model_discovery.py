"""Find the model of a checkpoint whose own files do not describe it: in the run's plan or a
``config.json`` at or above its folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, Problem
from toolkit.families import FAMILIES
from toolkit.families.base import ModelShape
from toolkit.families.model_files import parse_model_config, parse_model_shape
from toolkit.paths import Location

LEVELS = 3  # the checkpoint's folder and the ones above it that are searched


class UnknownModelError(InputError):
    """A format needs the model's sizes, and neither the user nor the files give them."""


def unknown_model_error(folder: Location) -> UnknownModelError:
    return UnknownModelError(
        Problem(
            "model",
            f"{folder} does not describe its model",
            "names and shapes of tensors are checked against those of the model",
            "describe the model: model=llama model.hidden_size=... with all of its sizes, or "
            "model=pretrained model.pretrained=FOLDER with its "
            "config.json",
        )
    )


def find_model(folder: Path) -> ModelShape | None:
    """Return the model of the run that ``folder`` belongs to (``plan.json``), else of the nearest Hugging
    Face ``config.json``.
    """
    folder = folder.absolute()
    folders = [folder, *folder.parents][:LEVELS]
    for parent in folders:
        if (parent / "attempts").is_dir():
            model = _read_object(parent / "plan.json").get("model")
            return parse_model_shape(model, parent / "plan.json") if isinstance(model, dict) else None
    for parent in folders:
        config = _read_object(parent / "config.json")
        family = FAMILIES.get(str(config.get("model_type")))
        if family is not None:
            return family.resolve_shape(parse_model_config(family, config, parent / "config.json"))
    return None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one: an unreadable file of another program is not an
    error here.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
