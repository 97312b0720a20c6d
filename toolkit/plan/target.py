"""``model.target`` names what a module has. Looked up without importing it: that would take torch's seconds, and run code."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from toolkit.config.schema import ModelConfig
from toolkit.errors import ConfigError, Problem


def check_target(model: ModelConfig) -> None:
    """Nothing is imported: the module's source shows which names it has.

    Raises:
        ConfigError: there is no such module, it does not have the name, or it is one of Python's standard library,
            whose functions may start processes.
    """
    if model.target is None:
        return
    here = str(Path.cwd())
    if (
        here not in sys.path
    ):  # a console script's sys.path lacks the working folder, where a user's own package lies
        sys.path.append(here)
    module = model.target.rpartition(".")[0]
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            Problem(
                "model.target",
                f"model.target={model.target}",
                f"{module.partition('.')[0]} is of Python's own library, which has no models",
                "write model.target=my.package.Model: a torch.nn.Module of a package or of a file in the working folder",
            )
        )
    missing, found = _look_up(module)
    if missing is not None:
        raise ConfigError(
            Problem(
                "model.target",
                f"model.target={model.target}: there is no module {missing}",
                "the part before the last dot is an importable module",
                f"run from the folder that holds {module.partition('.')[0]}, install the package, or set PYTHONPATH",
            )
        )
    name, names = model.target.rpartition(".")[2], _names_in(found)
    if names is not None and name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        remedy = (
            f"write model.target={module}.{close[0]}"
            if close
            else f"correct the name; {found} has the module"
        )
        raise ConfigError(
            Problem(
                "model.target",
                f"model.target={model.target}: the module {module} has no {name}",
                "the part after the last dot is a class or function of the module",
                remedy,
            )
        )


def _names_in(file: str | None) -> set[str] | None:
    """What the module in ``file`` binds at its top level, at whatever depth of ``if`` and ``try``, by its source.

    None if that cannot be known without running it: there is no source, or the module binds names in other ways.
    """
    if file is None or not file.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError):  # importing it tells more
        return None
    names: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # what is bound inside is not the module's
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)  # also those that are only read: too many are known rather than too few
        waiting += ast.iter_child_nodes(node)
    unknown = {
        "*",
        "__getattr__",
        "sys",
        "globals",
        "locals",
        "vars",
        "setattr",
        "exec",
    }  # ways to bind names unseen
    return None if names & unknown else names


def _look_up(module: str) -> tuple[str | None, str | None]:
    """The first of ``a``, ``a.b``, ``a.b.c`` that is not there, None if all are; and the file of the last."""
    name = ""
    file: str | None = None
    locations: Sequence[str] | None = None  # at the top: sys.path
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        if name in sys.modules:
            locations = list(getattr(sys.modules[name], "__path__", ()))
            file = getattr(sys.modules[name], "__file__", None)
            continue
        spec = _find(name, locations)
        if spec is None:
            return name, None
        file = spec.origin
        locations = list(
            spec.submodule_search_locations or ()
        )  # a module that is no package has none below it
    return None, file


def _find(name: str, locations: Sequence[str] | None) -> ModuleSpec | None:
    """As the import system looks, but for a submodule without importing its package."""
    if locations is None:
        return importlib.util.find_spec(name)
    found = (finder.find_spec(name, locations) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)
