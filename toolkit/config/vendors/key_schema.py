"""Schema of one key of an engine's configuration: the values it accepts and the keys below it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

COMPARE = {
    "ge": ("at least", lambda value, bound: value >= bound),
    "gt": ("more than", lambda value, bound: value > bound),
    "le": ("at most", lambda value, bound: value <= bound),
    "lt": ("less than", lambda value, bound: value < bound),
}
TYPE_NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a dictionary",
    "null": "null",
}


@dataclass
class KeySchema:
    """The values that an engine accepts for one of its keys.

    Attributes:
        types: names of the accepted JSON types; empty if any value is accepted.
        choices: the accepted values, if there are only a few.
        bounds: limits of a number by ``ge``, ``gt``, ``le`` and ``lt``.
        fields: the keys of a section; None for a value.
        items: the schema of each item of a list.
        open: whether a section may have more keys than ``fields``.
        deprecated: the key that the engine reads instead.
        removed: the engine's message about a key that it no longer has.
        internal: whether the engine sets the key itself.
    """

    types: list[str] = field(default_factory=list)
    choices: list[Any] = field(default_factory=list)
    bounds: dict[str, float] = field(default_factory=dict)
    fields: dict[str, KeySchema] | None = None
    items: KeySchema | None = None
    open: bool = False
    deprecated: str | None = None
    removed: str | None = None
    internal: bool = False

    def accept(self, *names: str) -> None:
        self.types += [name for name in names if name not in self.types]

    def merge(self, other: KeySchema) -> None:
        """Add the types, choices, bounds and fields of ``other``."""
        self.accept(*other.types)
        self.choices = self.choices or other.choices
        self.bounds |= other.bounds
        if other.fields is not None:
            self.fields = {**(self.fields or {}), **other.fields}

    def broken_rule(self, value: Any) -> str | None:
        """Return the rule that ``value`` breaks, as a phrase for an error; None if the value is accepted."""
        if self.fields is not None:
            return (
                None
                if isinstance(value, Mapping) or (value is None and "null" in self.types)
                else "a section with keys"
            )
        if self.choices:
            allowed = [*self.choices, *([None] if "null" in self.types else [])]
            equal = any(
                value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed
            )
            return None if equal else "one of " + ", ".join(str(choice) for choice in self.choices)
        if self.types and not any(_is(name, value) for name in self.types):
            return " or ".join(TYPE_NAMES[name] for name in self.types)
        if isinstance(value, list) and self.items is not None:
            inner = next((rule for item in value if (rule := self.items.broken_rule(item)) is not None), None)
            return f"a list, each item {inner}" if inner else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return next(
                (
                    f"{phrase} {bound:g}"
                    for name, bound in self.bounds.items()
                    for phrase, holds in (COMPARE[name],)
                    if not holds(value, bound)
                ),
                None,
            )
        return None

    def example(self) -> str:
        """Return text that could follow the key's name: ``=true``."""
        if self.fields:
            return f".{next(iter(self.fields))}=VALUE"
        examples = {
            "bool": "true",
            "int": "1",
            "float": "0.5",
            "str": "text",
            "list": "[a,b]",
            "dict": "{a: 1}",
            "null": "null",
        }
        return f"={self.choices[0] if self.choices else examples[self.types[0]] if self.types else 'VALUE'}"

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = {
            name: value
            for name in ("types", "choices", "bounds", "open", "deprecated", "removed", "internal")
            if (value := getattr(self, name))
        }
        if self.items is not None:
            plain["items"] = self.items.to_json()
        if self.fields is not None:
            plain["fields"] = {name: node.to_json() for name, node in self.fields.items()}
        return plain

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> KeySchema:
        below, items = plain.get("fields"), plain.get("items")
        return KeySchema(
            **{
                **plain,
                "fields": None if below is None else {k: KeySchema.from_json(v) for k, v in below.items()},
                "items": None if items is None else KeySchema.from_json(items),
            }
        )


def type_name(value: object) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    return next(
        name
        for kind, name in (
            (bool, "bool"),
            (int, "int"),
            (float, "float"),
            (str, "str"),
            (list | tuple, "list"),
            (Mapping, "dict"),
        )
        if isinstance(value, kind)
    )


def _is(name: str, value: object) -> bool:
    """An integer may be written 5e8, and a float without a point; true and false are not numbers."""
    if name == "int":
        return type_name(value) == "int" or (
            isinstance(value, float) and math.isfinite(value) and value.is_integer()
        )
    if name == "float":
        return type_name(value) in ("int", "float")
    return type_name(value) == name
