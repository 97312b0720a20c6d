"""The schema as a flat table of keys by dotted name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, get_args, get_type_hints

from toolkit.config.roots import RUN, ConfigRoot


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key of the schema.

    ``kinds`` are the accepted types without None; ``nullable`` is whether null is accepted.
    """

    name: str
    kinds: tuple[Any, ...]
    nullable: bool
    default: Any

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(
            member.name
            for kind in self.kinds
            if isinstance(kind, type) and issubclass(kind, Enum)
            for member in kind
        )


@cache
def keys_by_name(root: ConfigRoot = RUN) -> Mapping[str, ConfigKey]:
    """Return every key of the schema, in order. Keys below ``root.open`` are not part of the schema."""
    found: dict[str, ConfigKey] = {}
    _collect(root.kind, "", found)
    return found


@cache
def sections(root: ConfigRoot = RUN) -> tuple[str, ...]:
    """Return the names of all sections: ``train``, ``train.batch_ramp``, ..."""
    return tuple(dict.fromkeys(key.section for key in keys_by_name(root).values() if key.section))


def _collect(kind: type, prefix: str, found: dict[str, ConfigKey]) -> None:
    hints = get_type_hints(kind)
    for field in fields(kind):
        name, hint = prefix + field.name, hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            _collect(hint, name + ".", found)
            continue
        union = isinstance(hint, UnionType)
        alternatives = tuple(part for part in get_args(hint) if part is not type(None)) if union else (hint,)
        found[name] = ConfigKey(name, alternatives, type(None) in get_args(hint), _default(field))


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def is_open(name: str, root: ConfigRoot = RUN) -> bool:
    """Return whether ``name`` is below a key whose content is not part of the schema."""
    return any(name.startswith(above + ".") for above in root.open)


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a configuration, a section or dictionaries: ``{'train.steps': 100}``. ``{}`` is a value."""
    if is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, Mapping) and (value or not prefix):
        items = list(value.items())
    else:
        return {prefix.removesuffix("."): value}
    found: dict[str, Any] = {}
    for name, inner in items:
        found |= flatten(inner, f"{prefix}{name}.")
    return found


def format_value(value: Any) -> str:
    """``value`` as a user would type it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value.value if isinstance(value, Enum) else value)


def nearest(name: str, root: ConfigRoot) -> str | None:
    """Return the key or section that ``name`` most likely means; None if no name is similar."""
    names = [*keys_by_name(root), *sections(root)]
    last = name.rpartition(".")[2]
    same_leaf = [known for known in names if known.rpartition(".")[2] == last]
    if same_leaf:
        return difflib.get_close_matches(name, same_leaf, 1, 0.0)[0]
    parent = name.rpartition(".")[0]
    siblings = [known for known in names if known.rpartition(".")[0] == parent]
    return next(
        iter(
            difflib.get_close_matches(name, siblings, 1, 0.6)
            or difflib.get_close_matches(name, names, 1, 0.7)
        ),
        None,
    )
