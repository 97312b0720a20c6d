"""What model a checkpoint is of, where its own files do not say: the run's plan or a ``config.json`` in or above its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, Problem
from toolkit.families import FAMILIES
from toolkit.families.base import ModelShape
from toolkit.families.model_files import parse_model_config, parse_model_shape

LEVELS = 3  # folders that are looked at: the checkpoint's own, then those above it


class ModelUnknown(InputError):
    """A format needs the model's sizes, and neither the user nor the files say them."""


def model_unknown(folder: Path) -> ModelUnknown:
    return ModelUnknown(
        Problem(
            "model",
            f"{folder} does not say what model it is of",
            "names and shapes of its tensors are those of a model that is known",
            "give the model: model=llama model.hidden_size=... with all of its sizes, or model=pretrained model.pretrained=FOLDER with its "
            "config.json",
        )
    )


def model_near(folder: Path) -> ModelShape | None:
    """Of the run that ``folder`` lies in (``plan.json``), else of the nearest ``config.json`` in Hugging Face's format."""
    folder = folder.absolute()
    places = [folder, *folder.parents][:LEVELS]
    for place in places:
        if (place / "attempts").is_dir():
            model = _object(place / "plan.json").get("model")
            return parse_model_shape(model, place / "plan.json") if isinstance(model, dict) else None
    for place in places:
        config = _object(place / "config.json")
        family = FAMILIES.get(str(config.get("model_type")))
        if family is not None:
            return family.resolve_shape(parse_model_config(family, config, place / "config.json"))
    return None


def _object(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; empty where there is none. What somebody else's file holds is not ours to refuse."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
