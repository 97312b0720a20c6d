"""What model a checkpoint is of, where its own files do not say: the run's plan or a ``config.json`` in or above its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import InputError, Problem, UserError
from toolkit.families import FAMILIES
from toolkit.families.base import ModelShape, shape_of

LEVELS = 3  # folders that are looked at: the checkpoint's own, then those above it


class ModelUnknown(InputError):
    """A format needs the model's sizes, and neither the user nor the files say them."""


def model_unknown(folder: Path) -> ModelUnknown:
    return ModelUnknown(Problem(
        "model", f"{folder} does not say what model it is of", "names and shapes of its tensors are those of a model that is known",
        "give the model: model=llama model.hidden_size=... with all of its sizes, or model=pretrained model.pretrained=FOLDER with its "
        "config.json"))


def model_near(folder: Path) -> ModelShape | None:
    """Of the run that ``folder`` lies in (``plan.json``), else of the nearest ``config.json`` in Hugging Face's format."""
    folder = folder.absolute()
    places = [folder, *folder.parents][:LEVELS]
    for place in places:
        if (place / "attempts").is_dir():
            model = _object(place / "plan.json").get("model")
            return shape_of(model) if isinstance(model, dict) else None
    for place in places:
        config = _object(place / "config.json")
        if str(config.get("model_type")) in FAMILIES:
            return of_hugging_face(place / "config.json", config)
    return None


def of_hugging_face(path: Path, config: Mapping[str, Any]) -> ModelShape:
    """The model that ``config``, the content of ``path``, describes; its ``model_type`` is known.

    Raises:
        InputError: its values are not those of a model.
    """
    family = FAMILIES[str(config["model_type"])]
    try:
        return family.settle(family.from_hugging_face_config(config))
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(Problem(str(path), f"{path} describes no model ({type(error).__name__}: {str(error)[:200]})",
                                 "config.json is as transformers writes it", "download or export the folder again")) from error


def _object(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; empty where there is none. What somebody else's file holds is not ours to refuse."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
