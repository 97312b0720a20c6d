"""Check that ``model.target`` exists without importing it, which would load torch and run user code."""

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


def check_model_target(model: ModelConfig) -> None:
    """Check ``model.target`` against the names in the source of its module.

    Raises:
        ConfigError: the module does not exist, does not have the name, or belongs to Python's standard
            library, whose functions may start processes.
    """
    if model.target is None:
        return
    here = str(Path.cwd())
    if here not in sys.path:  # sys.path of a console script lacks the working folder
        sys.path.append(here)
    module = model.target.rpartition(".")[0]
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(
            Problem(
                "model.target",
                f"model.target={model.target}",
                f"{module.partition('.')[0]} belongs to Python's standard library, which has no models",
                "write model.target=my.package.Model: a torch.nn.Module of a package or of a file in the "
                "working folder",
            )
        )
    missing, found = _look_up(module)
    if missing is not None:
        raise ConfigError(
            Problem(
                "model.target",
                f"model.target={model.target}: there is no module {missing}",
                "the part before the last dot is an importable module",
                f"run from the folder that holds {module.partition('.')[0]}, install the package, or set "
                f"PYTHONPATH",
            )
        )
    name, names = model.target.rpartition(".")[2], _names_in(found)
    if names is not None and name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        remedy = (
            f"write model.target={module}.{close[0]}"
            if close
            else f"correct the name; the module is in {found}"
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
    """Names that the source of a module binds at its top level, also inside ``if`` and ``try``.

    None if the source is missing or binds names in ways that only running it would show.
    """
    if file is None or not file.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError):  # the later import raises a clearer error
        return None
    names: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # names bound inside are local
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)  # names that are only read are included too
        waiting += ast.iter_child_nodes(node)
    dynamic = {"*", "__getattr__", "sys", "globals", "locals", "vars", "setattr", "exec"}
    return None if names & dynamic else names


def _look_up(module: str) -> tuple[str | None, str | None]:
    """The first missing one of ``a``, ``a.b``, ``a.b.c``, None if all exist; and the file of the last."""
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
        locations = list(spec.submodule_search_locations or ())
    return None, file


def _find(name: str, locations: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module like the import system, but without importing the packages above it."""
    if locations is None:
        return importlib.util.find_spec(name)
    found = (finder.find_spec(name, locations) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)
