"""The model families by name: the toolkit's own, those of installed packages, and those that a run names.

A package registers a family in its ``pyproject.toml``; the object is imported when it is used::

    [project.entry-points."toolkit.families"]
    mine = "my_package.mine:MINE"
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from toolkit.errors import PlanError, Problem
from toolkit.families.base import Family
from toolkit.user_code import UserObject, load_target

GROUP = "toolkit.families"
MEMBERS = tuple(name for name in (*Family.__annotations__, *vars(Family)) if not name.startswith("_"))


class FamilyRegistry(Mapping[str, Family]):
    """Families by name, the toolkit's own first."""

    def __init__(self, built_in: Iterable[Family]) -> None:
        self._families = {family.name: family for family in built_in}
        self._by_path: dict[str, Family] = {}

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=GROUP)}

    def __getitem__(self, name: str) -> Family:
        """Return the family ``name``. Raises PlanError if the package that registers it is broken."""
        if name not in self._families and name in self._entry_points:
            entry = self._entry_points[name]
            where = f"the entry point {name} = {entry.value!r} of {entry.dist.name if entry.dist else GROUP}"
            try:
                loaded = entry.load()
            except Exception as error:  # any code of another package
                raise _broken(where, f"it raises {type(error).__name__}: {error}") from error
            self.register(loaded, where)
            if loaded.name != name:
                raise _broken(where, f"it registers the family {loaded.name}")
        return self._by_path[name] if name in self._by_path else self._families[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._families, *self._entry_points, *self._by_path)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def load(self, target: str) -> Family:
        """Import the family at ``target``, a dotted path: ``my_package.mine.MINE``.

        It replaces one of its name that was loaded by a path before, as when a notebook reloads its module.

        Raises:
            ConfigError: there is no such module or object.
            PlanError: it is not a family, or has the name of another.
        """
        family: Family = load_target(UserObject("model", target, option="family"))
        where = f"model.family={target}"
        self._check(family, where)
        if family.name in self._families or family.name in self._entry_points:
            raise _broken(where, f"there is another family {family.name}", "give it a name of its own")
        self._by_path[family.name] = family
        return family

    def register(self, family: Any, where: str) -> None:
        """Add the family of an installed package. ``where`` is what names it, for errors.

        Raises:
            PlanError: it lacks a member of ``Family``, or another family has its name.
        """
        self._check(family, where)
        if self._families.setdefault(family.name, family) is not family:
            raise _broken(where, f"there is another family {family.name}", "give it a name of its own")

    def _check(self, family: Any, where: str) -> None:
        missing = [name for name in MEMBERS if not hasattr(family, name)]
        if isinstance(family, type):
            raise _broken(where, f"{family.__name__} is a class", "register an object: MINE = Mine()")
        if missing:
            raise _broken(
                where,
                f"{type(family).__name__} has no {', '.join(missing)}",
                "derive its class from toolkit.families.decoder.Decoder, or define them",
            )


def _broken(where: str, seen: str, remedy: str = "correct the package, or uninstall it") -> PlanError:
    return PlanError(
        Problem(
            "model.family",
            f"{where}: {seen}",
            "a family is an object with the members of toolkit.families.base.Family and a name of its own",
            remedy,
        )
    )
