"""A pydantic model's fields, read from its class in the source."""

from __future__ import annotations

import ast
from typing import Any

from toolkit.config.vendors.node import Node
from toolkit.config.vendors.source import Module

# What annotations name; a type that is not here is left to the vendor to check.
TYPES = {
    "bool": "bool",
    "int": "int",
    "float": "float",
    "str": "str",
    "Path": "str",
    "list": "list",
    "List": "list",
    "tuple": "list",
    "Tuple": "list",
    "dict": "dict",
    "Dict": "dict",
    "None": "null",
}
ENUMS = ("Enum", "IntEnum", "StrEnum")


def model(module: Module, owner: ast.ClassDef) -> Node:
    """A section whose keys are the fields of the class, inherited ones and aliases too."""
    node = Node(fields={})
    for base in owner.bases:
        found = module.lookup(base.id, "classes") if isinstance(base, ast.Name) else None
        if found is not None:
            node.merge(model(*found))
    assert node.fields is not None
    for item in owner.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            field = _annotated(module, item.annotation)
            names = [item.target.id, *_options(module, item.value, field)]
            node.fields |= dict.fromkeys(names, field)  # DeepSpeed's models take the name and the alias
    return node


def _annotated(module: Module, annotation: ast.expr) -> Node:
    match annotation:
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            node = _annotated(module, inner)
            if node.types or node.choices or node.fields is not None:
                node.accept("null")
            return node
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=parts)):
            node = Node()
            inner_nodes = [_annotated(module, part) for part in parts]
            if all(inner.types for inner in inner_nodes):
                node.accept(*(name for inner in inner_nodes for name in inner.types))
            return node
        case ast.Name(id=name) if (alias := module.lookup(name, "assigned")) is not None:
            return _annotated(*alias)
        case ast.Subscript(value=ast.Name(id="Literal")):
            choices = module.value(annotation.slice)
            return Node(choices=choices if isinstance(choices, list) else [choices])
        case ast.Subscript(value=ast.Name(id="List" | "list"), slice=inner):
            return Node(types=["list"], items=_annotated(module, inner))
        case ast.Subscript(value=ast.Name(id=name)) if name in TYPES:
            return Node(types=[TYPES[name]])
        case ast.Constant(value=None):
            return Node(types=["null"])
        case ast.Name(id=name) if name in TYPES:
            return Node(types=[TYPES[name]])
        case ast.Name(id=name) if (found := module.lookup(name, "classes")) is not None:
            inner_module, owner = found
            if _is_enum(owner):
                return Node(choices=_members(inner_module, owner))
            return model(inner_module, owner)
    return Node()


def _options(module: Module, default: ast.expr | None, node: Node) -> list[str]:
    """What ``Field(...)`` says; the aliases."""
    if not (
        isinstance(default, ast.Call) and isinstance(default.func, ast.Name) and default.func.id == "Field"
    ):
        return []
    aliases: list[str] = []
    for keyword in default.keywords:
        value: Any = module.value(keyword.value)
        if keyword.arg in ("ge", "gt", "le", "lt") and isinstance(value, int | float):
            node.bounds[keyword.arg] = value
        elif keyword.arg == "alias":
            aliases.append(value)
        elif keyword.arg == "exclude":
            node.internal = bool(value)
        elif keyword.arg == "json_schema_extra" and isinstance(value, dict) and value.get("deprecated"):
            node.deprecated = value.get("new_param") or "nothing"
    return aliases


def _is_enum(owner: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id in ENUMS for base in owner.bases)


def _members(module: Module, owner: ast.ClassDef) -> list[Any]:
    values = (module.value(item.value) for item in owner.body if isinstance(item, ast.Assign))
    return list(dict.fromkeys(value for value in values if isinstance(value, str | int)))
