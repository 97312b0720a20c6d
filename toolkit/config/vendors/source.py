"""Python source, read without running it: what a name in a package's file is, followed through imports."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass
class Module:
    source: Source
    path: Path
    tree: ast.Module

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def assigned(self) -> dict[str, ast.expr]:
        return {
            target.id: node.value
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    @cached_property
    def imports(self) -> dict[str, tuple[Path, str]]:
        """Name -> the file that it is imported from, and its name there. Imports inside functions too."""
        return {
            alias.asname or alias.name: (path, alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            if (path := self.source.find(self.path, node)) is not None
            for alias in node.names
            if alias.name != "*"
        }

    @cached_property
    def stars(self) -> list[Path]:
        return [
            path
            for node in self.tree.body
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
            if (path := self.source.find(self.path, node)) is not None
        ]

    def lookup(self, name: str, kind: str) -> tuple[Module, Any] | None:
        """Where ``name`` is defined: ``kind`` is ``functions``, ``classes`` or ``assigned``."""
        if name in getattr(self, kind):
            return self, getattr(self, kind)[name]
        if name in self.imports:
            path, original = self.imports[name]
            return self.source.module(path).lookup(original, kind)
        for path in self.stars:
            found = self.source.module(path).lookup(name, kind)
            if found is not None:
                return found
        return None

    def constant(self, name: str) -> Any:
        found = self.lookup(name, "assigned")
        return found[0].value(found[1]) if found is not None else None

    def value(self, node: ast.expr | None, bound: dict[str, Any] | None = None) -> Any:
        """What a constant expression is; None where it is not constant."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if bound is not None and node.id in bound:
                return bound[node.id]
            case ast.Name():
                return self.constant(node.id)
            case ast.Attribute(value=ast.Name(id=name)) if (
                found := self.lookup(name, "classes")
            ) is not None:
                return next(
                    (
                        found[0].value(item.value)
                        for item in found[1].body
                        if isinstance(item, ast.Assign)
                        and any(
                            isinstance(target, ast.Name) and target.id == node.attr for target in item.targets
                        )
                    ),
                    None,
                )
            case ast.Dict():
                return {
                    self.value(key): self.value(value)
                    for key, value in zip(node.keys, node.values, strict=True)
                }
            case ast.List() | ast.Tuple():
                return [self.value(item) for item in node.elts]
            case ast.JoinedStr():
                return "".join(
                    str(self.value(part.value if isinstance(part, ast.FormattedValue) else part))
                    for part in node.values
                )
            case ast.UnaryOp(op=ast.USub()):
                value = self.value(node.operand)
                return -value if isinstance(value, int | float) else None
            case ast.BinOp():
                left, right = self.value(node.left), self.value(node.right)
                number = isinstance(left, int | float) and isinstance(right, int | float)
                return (left * right if isinstance(node.op, ast.Mult) else left) if number else None
        return None


class Source:
    def __init__(self, package: Path) -> None:
        self.package = package
        self.modules: dict[Path, Module] = {}

    def module(self, path: Path) -> Module:
        if path not in self.modules:
            self.modules[path] = Module(self, path, ast.parse(path.read_text(encoding="utf-8")))
        return self.modules[path]

    def find(self, importer: Path, node: ast.ImportFrom) -> Path | None:
        """The file of ``from X import ...``, if it is DeepSpeed's own."""
        parts = (node.module or "").split(".") if node.module else []
        if node.level:
            base = importer.parents[node.level - 1]
        elif parts and parts[0] == self.package.name:
            base, parts = self.package, parts[1:]
        else:
            return None
        place = base.joinpath(*parts)
        return next(
            (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None
        )
