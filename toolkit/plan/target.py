"""``model.target`` names a module that can be found. Looked up without importing it: that would take torch's seconds, and run code."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from toolkit.config.schema import ModelConfig
from toolkit.errors import ConfigError, Problem


def check_target(model: ModelConfig) -> None:
    """Nothing is imported; so whether the module has the class is for the ranks to say.

    Raises:
        ConfigError: there is no such module, or it is one of Python's standard library, whose functions may start processes.
    """
    if model.target is None:
        return
    here = str(Path.cwd())
    if here not in sys.path:  # a console script's sys.path lacks the working folder, where a user's own package lies
        sys.path.append(here)
    module = model.target.rpartition(".")[0]
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(Problem(
            "model.target", f"model.target={model.target}", f"{module.partition('.')[0]} is of Python's own library, which has no models",
            "write model.target=my.package.Model: a torch.nn.Module of a package or of a file in the working folder"))
    missing = _missing(module)
    if missing is not None:
        raise ConfigError(Problem(
            "model.target", f"model.target={model.target}: there is no module {missing}",
            "the part before the last dot is an importable module",
            f"run from the folder that holds {module.partition('.')[0]}, install the package, or set PYTHONPATH"))


def _missing(module: str) -> str | None:
    """The first of ``a``, ``a.b``, ``a.b.c`` that is not there; None where all are."""
    name = ""
    locations: Sequence[str] | None = None  # at the top: sys.path
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        if name in sys.modules:
            locations = list(getattr(sys.modules[name], "__path__", ()))
            continue
        spec = _find(name, locations)
        if spec is None:
            return name
        locations = list(spec.submodule_search_locations or ())  # a module that is no package has none below it
    return None


def _find(name: str, locations: Sequence[str] | None) -> ModuleSpec | None:
    """As the import system looks, but for a submodule without importing its package."""
    if locations is None:
        return importlib.util.find_spec(name)
    found = (finder.find_spec(name, locations) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)
