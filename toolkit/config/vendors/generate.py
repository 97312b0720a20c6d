"""Write the schema files of the installed DeepSpeed and Megatron-core.

    python -m toolkit.config.vendors.generate     # writes <distribution>-<version>.json next to this module

Megatron-core's keys are the fields of three dataclasses. DeepSpeed reads its dictionary in two ways: through
functions (``get_scalar_param(param_dict, KEY, DEFAULT)``, ``param_dict.get``, ``KEY in param_dict``) and by
passing a part of it to a pydantic model. The script follows the dictionary from ``DeepSpeedConfig`` through
the source of every function that receives it. If a part ends in a pydantic model, the fields of the model are
its keys.

This is the only module that imports the engines to read their configuration. Runs load the JSON files.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from toolkit.config.vendors.installed import DEEPSPEED, FOLDER, MEGATRON
from toolkit.config.vendors.key_schema import KeySchema, type_name

# section -> module and name of Megatron-core's dataclass
MEGATRON_CLASSES = {
    "transformer": ("megatron.core.transformer.transformer_config", "TransformerConfig"),
    "ddp": ("megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
    "optimizer": ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
}
DEEPSPEED_CONFIG = "deepspeed.runtime.config"
READERS = ("get_scalar_param", "get_dict_param", "get_list_param")
START = ("__init__", "_do_warning_check")  # methods of DeepSpeedConfig that receive the dictionary
REMOVED = (("_REMOVED_TOP_LEVEL_CONFIG_KEYS", ""), ("_REMOVED_ZERO_CONFIG_KEYS", "zero_optimization."))
TYPES = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    Path: "str",
    list: "list",
    tuple: "list",
    dict: "dict",
}

KeyPath = tuple[str, ...]  # keys from the root of the dictionary to a part of it
ROOT: KeyPath = ()


def main() -> None:
    for package, read in ((DEEPSPEED, read_deepspeed), (MEGATRON, read_megatron)):
        if package.installed:
            file = FOLDER / f"{package.distribution}-{package.installed_version}.json"
            file.write_text(schema_text(read()), encoding="utf-8")
            print(f"wrote {file}")


def schema_text(schema: KeySchema) -> str:
    return json.dumps(schema.to_json(), indent=1) + "\n"


def read_megatron() -> KeySchema:
    """Return the sections ``transformer``, ``ddp`` and ``optimizer`` of the installed Megatron-core.

    A name may be in several.
    """
    return KeySchema(
        fields={
            section: read_class(getattr(import_module(module), name))
            for section, (module, name) in MEGATRON_CLASSES.items()
        }
    )


def read_deepspeed() -> KeySchema:
    """Return every key that the installed DeepSpeed reads. Keys of earlier versions are marked as
    ``removed``.
    """
    module = import_module(DEEPSPEED_CONFIG)
    trace = ConfigTracer()
    for method in START:
        arguments: dict[str, tuple[KeyPath, ...]] = {"config": (ROOT,), "self._param_dict": (ROOT,)}
        trace.call(getattr(module.DeepSpeedConfig, method), module.DeepSpeedConfig, arguments)
    for table, prefix in REMOVED:
        for key, why in getattr(module, table, {}).items():
            trace.key((*prefix.split(".")[:-1], key)).removed = why
    return trace.root


# -- classes


def read_class(owner: type) -> KeySchema:
    """Return the fields of a dataclass or of a pydantic model, with inherited fields and aliases."""
    schemas: dict[str, KeySchema] = {}
    if is_dataclass(owner):
        hints = typing.get_type_hints(owner)
        schemas = {item.name: read_type(hints[item.name]) for item in fields(owner)}
    for name, info in getattr(owner, "model_fields", {}).items():
        key = read_type(info.annotation)
        for bound in info.metadata:
            key.bounds |= {
                side: getattr(bound, side) for side in ("ge", "gt", "le", "lt") if hasattr(bound, side)
            }
        key.internal = bool(info.exclude)
        extra = info.json_schema_extra or {}
        if isinstance(extra, dict) and extra.get("deprecated"):
            key.deprecated = extra.get("new_param") or "nothing"
        schemas |= dict.fromkeys([name, *filter(None, [info.alias])], key)  # DeepSpeed accepts both names
    return KeySchema(fields=schemas)


def read_type(hint: Any) -> KeySchema:
    """Return the schema of an annotation. The engine checks values of types that are not known here."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _read_union(arguments)
    if origin is typing.Literal:
        return KeySchema(choices=list(arguments))
    if origin is list:
        return KeySchema(types=["list"], items=read_type(arguments[0]))
    if (origin or hint) in TYPES:
        return KeySchema(types=[TYPES[origin or hint]])
    if inspect.isclass(hint) and issubclass(hint, Enum):
        values = (member.value for member in hint)
        return KeySchema(choices=[value for value in values if isinstance(value, str | int)])
    if inspect.isclass(hint) and (is_dataclass(hint) or hasattr(hint, "model_fields")):
        return read_class(hint)
    return KeySchema()


def _read_union(members: tuple[Any, ...]) -> KeySchema:
    inner = [read_type(member) for member in members if member is not type(None)]
    if len(inner) == 1:
        schema = inner[0]
    else:
        schema = KeySchema()
        if all(key.types for key in inner):
            schema.accept(*(name for key in inner for name in key.types))
    if type(None) in members and (schema.types or schema.choices or schema.fields is not None):
        schema.accept("null")
    return schema


# -- DeepSpeed's functions


@cache
def _source(function: Any) -> ast.FunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


@cache
def _local_imports(module: types.ModuleType) -> dict[str, tuple[str, str]]:
    """Return the names that functions of ``module`` import inside their bodies -> (module, name there)."""
    tree = ast.parse(inspect.getsource(module))
    package = module.__spec__.parent if module.__spec__ is not None else None
    return {
        alias.asname or alias.name: (
            resolve_name("." * node.level + (node.module or ""), package),
            alias.name,
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _lookup(module: types.ModuleType, name: str) -> Any:
    """Return the object that ``name`` stands for in the functions of ``module``; None if there is none."""
    if hasattr(module, name):
        return getattr(module, name)
    if name in _local_imports(module):
        source, original = _local_imports(module)[name]
        if source.startswith("deepspeed"):
            return getattr(import_module(source), original, None)
    return None


@dataclass
class _Frame:
    """State inside one function: which names hold which parts of the dictionary, and which hold constants."""

    module: types.ModuleType
    owner: type | None
    parts: dict[str, tuple[KeyPath, ...]]
    constants: dict[str, Any]

    def value(self, node: ast.expr | None) -> Any:
        """Return the value of a constant expression; None if it is not constant."""
        if node is None or any(isinstance(inner, ast.Call) for inner in ast.walk(node)):
            return None
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        scope = {name: self.constants.get(name, _lookup(self.module, name)) for name in names}
        try:
            value = eval(compile(ast.Expression(node), "deepspeed", "eval"), {"__builtins__": {}}, scope)
        except Exception:  # noqa: BLE001  # not a constant: any error is possible
            return None
        value = value.value if isinstance(value, Enum) else value
        value = list(value) if isinstance(value, tuple) else value
        return value if isinstance(value, bool | int | float | str | list | dict) else None


@dataclass
class ConfigTracer:
    """Follows the configuration dictionary through functions and records the keys that are read from it."""

    root: KeySchema = field(default_factory=lambda: KeySchema(fields={}))
    # By function and arguments.
    returned: dict[tuple[Any, ...], tuple[KeyPath, ...]] = field(default_factory=dict)

    def call(
        self,
        function: Any,
        owner: type | None,
        parts: dict[str, tuple[KeyPath, ...]],
        constants: dict[str, Any] | None = None,
    ) -> tuple[KeyPath, ...]:
        """Follow the dictionary through ``function``. Returns the parts of it that the function returns."""
        node = _source(function)
        frame = _Frame(sys.modules[function.__module__], owner, dict(parts), dict(constants or {}))
        for argument, default in zip(reversed(node.args.args), reversed(node.args.defaults), strict=False):
            frame.constants.setdefault(argument.arg, frame.value(default))
        call = (function, tuple(sorted(parts.items())), repr(sorted(frame.constants.items(), key=str)))
        if call not in self.returned:
            self.returned[call] = ()  # for a function that calls itself
            for statement in node.body:
                self.returned[call] += self.statement(frame, statement)
        return self.returned[call]

    def statement(self, frame: _Frame, node: ast.stmt) -> tuple[KeyPath, ...]:
        """Follow all branches; a name keeps every part that is ever assigned to it."""
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            parts = self.parts(frame, node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = _name(target)
                if name and parts:
                    frame.parts[name] = tuple(dict.fromkeys((*frame.parts.get(name, ()), *parts)))
            return ()
        if isinstance(node, ast.Return):
            return self.parts(frame, node.value) if node.value is not None else ()
        returned: tuple[KeyPath, ...] = ()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                returned += self.statement(frame, child)
            elif isinstance(child, ast.ExceptHandler):
                for inner in child.body:
                    returned += self.statement(frame, inner)
            elif isinstance(child, ast.expr):
                self.parts(frame, child)
        return returned

    def parts(self, frame: _Frame, node: ast.expr) -> tuple[KeyPath, ...]:
        """Return the parts of the dictionary that ``node`` may be. Records the keys that the expression
        reads.
        """
        match node:
            case ast.Name() | ast.Attribute() if _name(node) in frame.parts:
                return frame.parts[_name(node)]
            case ast.Subscript():
                return self.read(self.parts(frame, node.value), frame.value(node.slice))
            case ast.Compare(left=left, ops=[ast.In()], comparators=[inner]):
                self.read(self.parts(frame, inner), frame.value(left))
                return ()
            case ast.DictComp(generators=[ast.comprehension(target=ast.Name(id=name), iter=names)]):
                for key in frame.value(names) or []:
                    constants = {**frame.constants, name: key}
                    self.parts(_Frame(frame.module, frame.owner, frame.parts, constants), node.value)
                return (ROOT,)  # a part of the dictionary under its own keys
            case ast.Call():
                return self.called(frame, node)
        parts = [part for child in _expressions(node) for part in self.parts(frame, child)]
        return tuple(parts) if isinstance(node, ast.IfExp | ast.BoolOp) else ()

    def called(self, frame: _Frame, node: ast.Call) -> tuple[KeyPath, ...]:
        given = [self.parts(frame, argument) for argument in node.args]
        name = _name(node.func).removeprefix("self.")
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
            owner = self.parts(frame, node.func.value)
            if owner and name == "get":
                return self.read(owner, frame.value(node.args[0]), _default(frame, node.args[1:]))
            if owner and name == "keys":
                return owner
            if owner and name == "items":
                self.open(owner)
            if _name(node.func.value) == "self" and frame.owner is not None and name != "__init__":
                return self.follow_method(frame, name, given)
        if name in READERS and given and given[0]:
            return self.read(given[0], frame.value(node.args[1]), _default(frame, node.args[2:]))
        if name in ("copy", "deepcopy") and given and given[0]:
            self.open(given[0])
            return given[0]
        for keyword in node.keywords:
            parts = self.parts(frame, keyword.value)
            argument_type = _lookup(frame.module, name)
            if keyword.arg is None and inspect.isclass(argument_type):
                for part in parts:
                    self.key(part).merge(read_class(argument_type))
        if any(given) and "deprecated" not in name:
            return self.follow(frame, name, node, given)
        return ()

    def follow(
        self, frame: _Frame, name: str, node: ast.Call, given: list[tuple[KeyPath, ...]]
    ) -> tuple[KeyPath, ...]:
        """Follow the dictionary into a function or a constructor of DeepSpeed."""
        callee = _lookup(frame.module, name)
        if not getattr(callee, "__module__", "").startswith("deepspeed"):
            return ()
        owner, function, skipped = None, callee, 0
        if inspect.isclass(callee) and "__init__" in vars(callee):
            owner, function, skipped = callee, vars(callee)["__init__"], 1
        if not inspect.isfunction(function):
            return ()
        names = [argument.arg for argument in _source(function).args.args][skipped:]
        constants = {
            argument: value
            for argument, passed in zip(names, node.args, strict=False)
            if (value := frame.value(passed)) is not None
        }
        return self.call(function, owner, _passed(names, given), constants)

    def follow_method(
        self, frame: _Frame, name: str, given: list[tuple[KeyPath, ...]]
    ) -> tuple[KeyPath, ...]:
        function = vars(frame.owner).get(name)
        if not inspect.isfunction(function):
            return ()
        names = [argument.arg for argument in _source(function).args.args][1:]
        attributes = {key: value for key, value in frame.parts.items() if key.startswith("self.")}
        return self.call(function, frame.owner, {**_passed(names, given), **attributes})

    # recording

    def key(self, path: KeyPath) -> KeySchema:
        schema = self.root
        for name in path:
            schema.fields = {} if schema.fields is None else schema.fields
            schema = schema.fields.setdefault(name, KeySchema())
        return schema

    def read(self, owners: tuple[KeyPath, ...], name: Any, default: Any = None) -> tuple[KeyPath, ...]:
        """Record that ``name`` is read from the parts ``owners``; the type of ``default`` is its type."""
        if not isinstance(name, str):
            return ()
        paths = tuple((*owner, name) for owner in owners)
        for path in paths:
            key = self.key(path)
            # "auto" stands for values of another type.
            if isinstance(default, bool | int | float | str | list) and default != "auto":
                key.accept(type_name(default))
        return paths

    def open(self, paths: tuple[KeyPath, ...]) -> None:
        """A part that is copied or iterated as a whole may have keys that the source does not name."""
        for path in paths:
            if path:
                self.key(path).open = True


def _default(frame: _Frame, arguments: list[ast.expr]) -> Any:
    return frame.value(arguments[0]) if arguments else None


def _passed(names: list[str], given: list[tuple[KeyPath, ...]]) -> dict[str, tuple[KeyPath, ...]]:
    return {name: parts for name, parts in zip(names, given, strict=False) if parts}


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    return (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return f"self.{node.attr}"
    return ""


if __name__ == "__main__":
    main()
