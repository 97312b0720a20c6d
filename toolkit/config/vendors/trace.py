"""Following DeepSpeed's configuration dictionary through its source, to learn which keys are read from it.

It is read in two ways: through functions (``get_scalar_param(param_dict, KEY, DEFAULT)``, ``param_dict.get``, ``KEY in param_dict``)
and by giving a part of it to a pydantic model. So the dictionary is followed from ``DeepSpeedConfig`` through every function that
it is passed to, and where a part ends in a model, the model's fields are its keys.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.config.vendors.models import model
from toolkit.config.vendors.node import Node, type_name
from toolkit.config.vendors.source import Module, Source

CONFIG = "runtime/config.py"
READERS = ("get_scalar_param", "get_dict_param", "get_list_param")
START = ("__init__", "_do_warning_check")  # methods of DeepSpeedConfig that see the dictionary
REMOVED = (("_REMOVED_TOP_LEVEL_CONFIG_KEYS", ""), ("_REMOVED_ZERO_CONFIG_KEYS", "zero_optimization."))

Part = tuple[str, ...]  # the keys from the root of the configuration to a part of it
ROOT: Part = ()


def read_schema(package: Path) -> Node:
    """The tree of keys of the DeepSpeed whose ``__init__.py`` lies in ``package``. Keys that it had once are ``removed``."""
    module = Source(package).module(package / CONFIG)
    owner = module.classes["DeepSpeedConfig"]
    trace = Trace()
    for method in START:
        trace.call(module, owner, _method(owner, method), {"config": (ROOT,), "self._param_dict": (ROOT,)})
    for table, prefix in REMOVED:
        for key, why in (module.constant(table) or {}).items():
            trace.node((*prefix.split(".")[:-1], key)).removed = why
    return trace.root


def _method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name)


@dataclass
class _Frame:
    """Inside one function: which names hold which parts of the configuration, and which hold constants."""

    module: Module
    owner: ast.ClassDef | None
    parts: dict[str, tuple[Part, ...]]
    constants: dict[str, Any]


@dataclass
class Trace:
    root: Node = field(default_factory=lambda: Node(fields={}))
    returned: dict[tuple[Any, ...], tuple[Part, ...]] = field(
        default_factory=dict
    )  # by function and what it was given

    def call(
        self,
        module: Module,
        owner: ast.ClassDef | None,
        function: ast.FunctionDef,
        parts: dict[str, tuple[Part, ...]],
        constants: dict[str, Any] | None = None,
    ) -> tuple[Part, ...]:
        """Follow the dictionary through ``function``; the parts of it that are returned."""
        frame = _Frame(module, owner, dict(parts), dict(constants or {}))
        for argument, default in zip(
            reversed(function.args.args), reversed(function.args.defaults), strict=False
        ):
            frame.constants.setdefault(argument.arg, module.value(default))
        mark = (
            str(module.path),
            function.name,
            tuple(sorted(parts.items())),
            repr(sorted(frame.constants.items(), key=str)),
        )
        if mark not in self.returned:
            self.returned[mark] = ()  # for a function that calls itself
            for statement in function.body:
                self.returned[mark] += self.statement(frame, statement)
        return self.returned[mark]

    def statement(self, frame: _Frame, node: ast.stmt) -> tuple[Part, ...]:
        """Branches are all followed, and a name keeps every part it ever held."""
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            parts = self.parts(frame, node.value)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = _name(target)
                if name and parts:
                    frame.parts[name] = tuple(dict.fromkeys((*frame.parts.get(name, ()), *parts)))
            return ()
        if isinstance(node, ast.Return):
            return self.parts(frame, node.value) if node.value is not None else ()
        returned: tuple[Part, ...] = ()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                returned += self.statement(frame, child)
            elif isinstance(child, ast.ExceptHandler):
                for inner in child.body:
                    returned += self.statement(frame, inner)
            elif isinstance(child, ast.expr):
                self.parts(frame, child)
        return returned

    def parts(self, frame: _Frame, node: ast.expr) -> tuple[Part, ...]:
        """The parts of the configuration that ``node`` may be; keys that are read on the way are recorded."""
        match node:
            case ast.Name() | ast.Attribute() if _name(node) in frame.parts:
                return frame.parts[_name(node)]
            case ast.Subscript():
                return self.read(
                    self.parts(frame, node.value), frame.module.value(node.slice, frame.constants), None
                )
            case ast.Compare(left=left, ops=[ast.In()], comparators=[inner]):
                self.read(self.parts(frame, inner), frame.module.value(left, frame.constants), None)
                return ()
            case ast.DictComp(generators=[ast.comprehension(target=ast.Name(id=name), iter=names)]):
                for key in frame.module.value(names) or []:
                    self.parts(
                        _Frame(frame.module, frame.owner, frame.parts, {**frame.constants, name: key}),
                        node.value,
                    )
                return (ROOT,)  # a part of the dictionary under its own keys
            case ast.Call():
                return self.called(frame, node)
        found: tuple[Part, ...] = ()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                found += self.parts(frame, child)
        return found if isinstance(node, ast.IfExp | ast.BoolOp) else ()

    def called(self, frame: _Frame, node: ast.Call) -> tuple[Part, ...]:
        given = [self.parts(frame, argument) for argument in node.args]
        name = (
            node.func.attr
            if isinstance(node.func, ast.Attribute)
            else node.func.id
            if isinstance(node.func, ast.Name)
            else ""
        )
        if isinstance(node.func, ast.Attribute):
            owner = self.parts(frame, node.func.value)
            if owner and name == "get":
                return self.read(
                    owner, frame.module.value(node.args[0], frame.constants), node.args[1:], frame
                )
            if owner and name == "keys":
                return owner
            if owner and name == "items":
                self.open(owner)
            if _name(node.func.value) == "self" and frame.owner is not None and name != "__init__":
                return self.into_self(frame, name, given)
        if name in READERS and given and given[0]:
            return self.read(
                given[0], frame.module.value(node.args[1], frame.constants), node.args[2:], frame
            )
        if name in ("copy", "deepcopy") and given and given[0]:
            self.open(given[0])
            return given[0]
        keywords = {keyword.arg: self.parts(frame, keyword.value) for keyword in node.keywords}
        for parts in (keywords[None],) if keywords.get(None) else ():
            found = frame.module.lookup(name, "classes")
            if found is not None:
                for part in parts:
                    self.node(part).merge(model(*found))
        if any(given) and "deprecated" not in name:
            return self.into(frame, name, node, given)
        return ()

    def into(
        self, frame: _Frame, name: str, node: ast.Call, given: list[tuple[Part, ...]]
    ) -> tuple[Part, ...]:
        found = frame.module.lookup(name, "functions")
        if found is not None:
            module, function, owner, names = (
                found[0],
                found[1],
                None,
                [argument.arg for argument in found[1].args.args],
            )
        elif (found := frame.module.lookup(name, "classes")) is not None and any(
            isinstance(item, ast.FunctionDef) and item.name == "__init__" for item in found[1].body
        ):
            module, owner = found
            function = _method(owner, "__init__")
            names = [argument.arg for argument in function.args.args][1:]
        else:
            return ()
        constants = {
            argument: frame.module.value(value, frame.constants)
            for argument, value in zip(names, node.args, strict=False)
        }
        parts = {argument: part for argument, part in zip(names, given, strict=False) if part}
        return self.call(
            module,
            owner,
            function,
            parts,
            {key: value for key, value in constants.items() if value is not None},
        )

    def into_self(self, frame: _Frame, name: str, given: list[tuple[Part, ...]]) -> tuple[Part, ...]:
        assert frame.owner is not None
        function = next(
            (item for item in frame.owner.body if isinstance(item, ast.FunctionDef) and item.name == name),
            None,
        )
        if function is None:
            return ()
        names = [argument.arg for argument in function.args.args][1:]
        parts = {argument: part for argument, part in zip(names, given, strict=False) if part}
        parts |= {key: value for key, value in frame.parts.items() if key.startswith("self.")}
        return self.call(frame.module, frame.owner, function, parts)

    # recording

    def node(self, path: Part) -> Node:
        node = self.root
        for key in path:
            node.fields = {} if node.fields is None else node.fields
            node = node.fields.setdefault(key, Node())
        return node

    def read(
        self, owners: tuple[Part, ...], key: Any, default: list[ast.expr] | None, frame: _Frame | None = None
    ) -> tuple[Part, ...]:
        if not isinstance(key, str):
            return ()
        found = tuple((*owner, key) for owner in owners)
        for path in found:
            node = self.node(path)
            value = frame.module.value(default[0], frame.constants) if default and frame is not None else None
            if (
                isinstance(value, bool | int | float | str | list) and value != "auto"
            ):  # which stands for values of another type
                node.accept(type_name(value))
        return found

    def open(self, paths: tuple[Part, ...]) -> None:
        """A part that is copied or walked whole may have keys that no name in the source says."""
        for path in paths:
            if path:
                self.node(path).open = True


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return f"self.{node.attr}"
    return ""
