"""Objects of the user's own code: ``KEY.target`` names one by its dotted path, ``KEY.arguments`` are its
arguments.

    check_user_code(config)                    before any process starts; imports nothing
    hook = build_user_object(given, Hook)      in each process that needs the object
    with user_code("hooks.mine", hook): ...    a failure names the key and the line of the user's code
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import linecache
import pkgutil
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from toolkit.config.project import find_project
from toolkit.config.schema import RunConfig
from toolkit.config.user_objects import SINK_TARGETS, sink_target
from toolkit.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class UserObject:
    """An object that the configuration names.

    Attributes:
        key: the key above ``target``: ``model``, ``hooks.mine``.
        target: dotted path to a class or function: ``my.package.Model``.
        arguments: keyword arguments for calling it.
        option: the last part of the key whose value is the path.
    """

    key: str
    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    option: str = "target"

    @property
    def name(self) -> str:
        """The key of the dotted path: ``model.target``."""
        return f"{self.key}.{self.option}"

    def problem(self, seen: str, rule: str, remedy: str) -> ConfigError:
        """Return the error that this object causes."""
        return ConfigError(Problem(self.name, f"{self.name}={self.target}: {seen}", rule, remedy))


def user_objects(config: RunConfig) -> Iterator[UserObject]:
    """Yield every object of the user's own code that ``config`` names."""
    if config.model.target is not None:
        yield UserObject("model", config.model.target, config.model.arguments)
    if config.model.family is not None and "." in config.model.family:
        yield UserObject("model", config.model.family, option="family")
    if config.task.target is not None:
        yield UserObject("task", config.task.target, config.task.arguments)
    if config.optim.target is not None:
        yield UserObject("optim", config.optim.target, config.optim.arguments)
    if config.schedule.target is not None:
        yield UserObject("schedule", config.schedule.target, config.schedule.arguments)
    if config.data.target is not None:
        yield UserObject("data", config.data.target, config.data.arguments)
    for section, objects in (("hooks", config.hooks), ("metrics", config.metrics)):
        for name, given in objects.items():
            if given.get("target") is not None:
                yield UserObject(f"{section}.{name}", given["target"], given.get("arguments") or {})
    yield from sink_objects(config)


def sink_objects(config: RunConfig) -> Iterator[UserObject]:
    """Yield the sinks of ``monitor.sinks``."""
    for name, given in config.monitor.sinks.items():
        target = sink_target(name, given)
        if target is not None:
            yield UserObject(f"monitor.sinks.{name}", target, given.get("arguments") or {})


def check_user_code(config: RunConfig) -> None:
    """Check every object of the user's own code against the source of its module, without importing it,
    which would load torch and run the code.

    Raises:
        ConfigError: a module does not exist or does not have the name, or belongs to Python's standard
            library, whose functions may start processes.
    """
    for given in user_objects(config):
        check_target(given)
        package = next((package for target, package in SINK_TARGETS.values() if target == given.target), None)
        if package is not None and importlib.util.find_spec(package) is None:
            raise given.problem(
                f"the package {package} is not installed",
                "a sink of a service needs its package",
                f"pip install {package}, or leave out {given.key}",
            )


def check_target(given: UserObject) -> None:
    """Check one object as :func:`check_user_code` does."""
    project = find_project()
    for folder in (Path.cwd(), *([project.folder] if project is not None else [])):
        if str(folder) not in sys.path:  # sys.path of a console script lacks the working folder
            sys.path.append(str(folder))
    module, _, name = given.target.rpartition(".")
    top = module.partition(".")[0]
    if not module:
        raise given.problem(
            "it has no dot",
            "a target is the dotted path of a module and a name in it",
            f"write {given.name}=my.package.{name or 'Name'}",
        )
    if top in sys.stdlib_module_names:
        raise given.problem(
            f"{top} belongs to Python's standard library",
            "a target belongs to a package, or to a file in the working folder",
            f"write {given.name}=my.package.Name",
        )
    missing, file = _look_up(module)
    if missing is not None:
        raise given.problem(
            f"there is no module {missing}",
            "the part before the last dot is an importable module",
            f"run from the folder that holds {top}, install the package, or set PYTHONPATH",
        )
    names = _names_in(file)
    if names is not None and name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        raise given.problem(
            f"the module {module} has no {name}",
            "the part after the last dot is a class or function of the module",
            f"write {given.name}={module}.{close[0]}"
            if close
            else f"correct the name; the module is in {file}",
        )


def load_target(given: UserObject) -> Any:
    """Import the object that ``given.target`` names, without calling it.

    Raises:
        ConfigError: as :func:`check_target`. Errors that the module raises pass, with a note that names the
            key and the line.
    """
    check_target(given)
    module, _, name = given.target.rpartition(".")
    with user_code(given.key, module):
        found = importlib.import_module(module)
    if not hasattr(found, name):
        raise given.problem(
            f"the module {module} has no {name}",
            "the part after the last dot is a class or function of the module",
            f"correct the name; the module is in {found.__file__}",
        )
    return getattr(found, name)


def check_arguments(given: UserObject, factory: Callable[..., Any]) -> None:
    """Check that ``factory`` accepts the arguments, without calling it.

    Raises:
        ConfigError: an argument is unknown, or a required one is missing.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # implemented in C without a signature
        return
    try:
        signature.bind(**given.arguments)
    except TypeError as error:
        required = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        raise given.problem(
            f"it does not accept the arguments given ({', '.join(given.arguments) or 'none'}): {error}",
            f"{given.key}.arguments are the arguments of {factory.__name__}{signature}",
            f"write +{given.key}.arguments.NAME=VALUE for {', '.join(required)}"
            if required
            else f"leave out what {factory.__name__} does not accept",
        ) from error


def build_user_object(given: UserObject, kind: type | tuple[type, ...] = object) -> Any:
    """Import the target, call it with its arguments and check the type of the result.

    Raises:
        ConfigError: the target cannot be imported, does not accept the arguments, or does not return a
            ``kind``. Errors that its code raises pass, with a note that names the key and the line.
    """
    factory = load_target(given)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    check_kind(given, factory, kinds)
    check_arguments(given, factory)
    with user_code(given.key, factory):
        built = factory(**given.arguments)
    if not isinstance(built, kinds):
        raise given.problem(
            f"it returns a {type(built).__name__}",
            _kind_rule(given, kinds),
            "return the type in the annotation",
        )
    return built


def check_kind(given: UserObject, factory: Any, kinds: tuple[type, ...]) -> None:
    """Check, without calling it, that ``factory`` is a class of one of ``kinds`` or a function that returns
    one.

    Raises:
        ConfigError: it is something else.
    """
    rule, names = _kind_rule(given, kinds), _kind_names(kinds)
    if not inspect.isclass(factory) and not inspect.isfunction(factory):
        raise given.problem(f"it is a {type(factory).__name__}", rule, "name a class or function")
    if object not in kinds and not _builds(factory, kinds):
        # A configuration may come from somebody else, and calling any function means running any code.
        raise given.problem(
            f"the class {factory.__name__} is not derived from {names}"
            if inspect.isclass(factory)
            else f"the function {factory.__name__} is not annotated to return a {names}",
            rule,
            f"derive {describe_source(factory)} from {names}"
            if inspect.isclass(factory)
            else f"annotate {describe_source(factory)}: def {factory.__name__}(...) -> {kinds[0].__name__}",
        )


def _kind_rule(given: UserObject, kinds: tuple[type, ...]) -> str:
    names = _kind_names(kinds)
    return f"{given.name} is a class derived from {names}, or a function annotated to return one"


def _kind_names(kinds: tuple[type, ...]) -> str:
    return " or ".join(dict.fromkeys(each.__name__ for each in kinds))


def _builds(factory: Callable[..., Any], kinds: tuple[type, ...]) -> bool:
    """Return whether ``factory`` is a class of ``kinds``, or a function that is annotated to return one."""
    if inspect.isclass(factory):
        return issubclass(factory, kinds)
    try:
        returned = typing.get_type_hints(factory).get("return")
    except (NameError, TypeError, AttributeError):  # a name imported for type checkers only
        return False
    return inspect.isclass(returned) and issubclass(returned, kinds)


@contextmanager
def user_code(key: str, target: object) -> Iterator[None]:
    """Add to an error that passes the key of the user's code that raised it and the line."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, ConfigError):
            error.add_note(f"{key} ({describe_source(target)}) raised this error in {error_location(error)}")
        raise


def describe_source(target: object) -> str:
    """Return ``file.py:12`` of a class, a function, or the class of an object; the name of a module."""
    if isinstance(target, str):
        return target
    code = target if inspect.isclass(target) or inspect.isroutine(target) else type(target)
    try:
        file = inspect.getsourcefile(code)
        line = _class_line(code) if inspect.isclass(code) else inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return getattr(code, "__qualname__", repr(code))
    return f"{file}:{line}"


def _class_line(code: type) -> int:
    # ``inspect`` parses the whole file to find a class. In CPython 3.11, parsing in two threads at once can
    # raise a SystemError in either of them, and the threads of sinks describe classes while training runs.
    own = [member.__code__.co_firstlineno for member in vars(code).values() if inspect.isfunction(member)]
    lines = linecache.getlines(inspect.getsourcefile(code) or "")
    starts = [
        number
        for number, line in enumerate(lines, 1)
        if re.match(rf"\s*class\s+{code.__name__}\b", line) and number <= min(own, default=number)
    ]
    if not starts:
        raise OSError(f"the source of {code.__name__} is not available")
    return starts[-1]


def error_location(error: BaseException) -> str:
    """Return ``file.py:12``, where ``error`` was raised; the innermost line outside of installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename != __file__]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "an unknown line"


def _names_in(file: str | None) -> frozenset[str] | None:
    """Return the names that the source of a module binds at its top level, also inside ``if`` and ``try``.

    None if the source is missing or binds names in ways that only running it would show.
    """
    if file is None or not file.endswith(".py"):
        return None
    try:
        return _parse_names(file, Path(file).stat().st_mtime_ns)
    except (OSError, SyntaxError):  # the later import raises a clearer error
        return None


# A file is parsed once, because parsing in two threads at once can raise a SystemError in CPython 3.11, and
# the threads of sinks load targets that the main thread has checked.
@lru_cache(maxsize=128)
def _parse_names(file: str, changed_ns: int) -> frozenset[str] | None:
    tree = ast.parse(Path(file).read_bytes())
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
    return None if names & dynamic else frozenset(names)


def _look_up(module: str) -> tuple[str | None, str | None]:
    """Return the first missing one of ``a``, ``a.b``, ``a.b.c``, None if all exist; and the file of the
    last.
    """
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
    # Not sys.meta_path, whose finders need the parent of a package without __init__.py to be imported.
    importers = (pkgutil.get_importer(location) for location in locations)
    specs = [spec for each in importers if each is not None and (spec := each.find_spec(name)) is not None]
    return next((spec for spec in specs if spec.loader is not None), specs[0] if specs else None)
