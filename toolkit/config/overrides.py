"""Check each command-line argument before the composition, so that all mistakes are reported together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toolkit.config import keys, search
from toolkit.config.roots import RUN, ConfigRoot
from toolkit.errors import ConfigError, Problem

CONFIG_DIR = ("--config-dir", "-cd")
MULTIRUN = ("-m", "--multirun")
EXPERIMENT = "exp"


@dataclass(slots=True)
class ParsedOverrides:
    """Checked overrides for Hydra, and the folders with groups.

    ``changes`` are settings below an open key without a plus, which are valid only if an experiment's file
    sets them.
    """

    search: tuple[Path, ...]
    overrides: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)


def parse_overrides(arguments: Sequence[str], root: ConfigRoot = RUN) -> ParsedOverrides:
    """Check every argument.

    Raises:
        ConfigError: with a problem for each invalid argument.
    """
    plain, own, problems = split_options(arguments)
    parsed = ParsedOverrides(search.folders(own))
    checker = _Checker(parsed.search, root)
    for typed in plain:
        text = _long(typed, root)
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            problems.append(unreadable(text, error, parsed.search if EXPERIMENT in checker.groups else ()))
            continue
        found = list(checker.check(override))
        problems += found
        if found:
            continue
        if override.type is OverrideType.CHANGE and keys.is_open(override.key_or_group, root):
            parsed.changes.append(text)
        else:
            parsed.overrides.append(_for_hydra(override, root))
    if problems:
        raise ConfigError(*problems)
    return parsed


def _long(text: str, root: ConfigRoot) -> str:
    """``target.path=PATH`` for ``target=PATH``. In OmegaConf a name is either a section or a value."""
    name, equals, value = text.partition("=")
    return f"{dict(root.short).get(name, name)}={value}" if equals else text


def split_options(arguments: Sequence[str]) -> tuple[list[str], Path | None, list[Problem]]:
    """Arguments without options that begin with a dash, the user's configuration folder, and problems."""
    plain: list[str] = []
    problems: list[Problem] = []
    own: Path | None = None
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            plain.append(argument)
        elif name in CONFIG_DIR:
            folder = value if equals else next(rest, "")
            if not folder:
                problems.append(
                    Problem(
                        name, argument, "--config-dir is followed by a folder", "write --config-dir=FOLDER"
                    )
                )
            own = Path(folder).expanduser().absolute() if folder else own
        elif name in MULTIRUN:
            problems.append(
                Problem(
                    argument,
                    argument,
                    "only python launch/train.py -m starts a sweep",
                    "leave it out, or write python launch/train.py -m with the same arguments",
                )
            )
        else:
            problems.append(
                Problem(
                    argument,
                    argument,
                    "an option is --help or --config-dir=FOLDER; everything else is KEY=VALUE",
                    "leave it out; launch/plan.py with the same arguments shows what would run",
                )
            )
    return plain, own, problems


def _for_hydra(override: Override, root: ConfigRoot) -> str:
    """The override as Hydra needs it.

    A setting below an open key may exist already, from an experiment's file, so it is added or changed. For a
    key of type text, ``007`` and ``1e3`` are text and not the numbers 7 and 1000.
    """
    assert override.input_line is not None
    text = override.input_line
    if override.key_or_group in root.open:
        return "++" + text.lstrip("+")
    if override.type is OverrideType.ADD and keys.is_open(override.key_or_group, root):
        return "+" + text
    key = keys.keys_by_name(root).get(override.key_or_group)
    if key is not None and key.kinds == (str,) and isinstance(override.value(), int | float):
        name, _, value = text.partition("=")
        return f"{name}='{value.strip()}'"
    return text


@cache
def default_config(root: ConfigRoot = RUN) -> DictConfig:
    """The schema with its defaults as an OmegaConf object. Callers must copy it before they modify it."""
    return OmegaConf.structured(root.kind)


class _Checker:
    def __init__(self, folders: Sequence[Path], root: ConfigRoot) -> None:
        self.folders = folders
        self.root = root
        self.groups = search.groups(folders) if root.groups is None else root.groups

    def check(self, override: Override) -> Iterator[Problem]:
        name, text = override.key_or_group, override.input_line or ""
        if not name:
            yield Problem(
                text,
                text,
                "an argument is KEY=VALUE, GROUP=OPTION or +exp=NAME",
                "write the key before the =",
            )
        elif override.is_sweep_override():
            value = text.partition("=")[2]
            yield Problem(
                name,
                text,
                "several values need a sweep, which is started with -m",
                f"write python launch/train.py -m, or one value; write a list as {name}=[{value}], text with "
                f"commas in quotes",
            )
        elif override.package is not None:
            yield Problem(
                name,
                text,
                "the package of a group cannot be changed",
                f"write {text.replace('@' + override.package, '')}",
            )
        elif name.startswith("sweep.") and self.root is RUN:
            yield Problem(
                name,
                text,
                "the keys of a sweep need -m",
                f"write python launch/train.py -m {text}, or leave it out",
            )
        elif name == "hydra" or name.startswith(("hydra.", "hydra/")):
            yield Problem(
                name,
                text,
                "Hydra is used only for composition, without folders and logs",
                "write run.dir=FOLDER for the run directory, or --config-dir=FOLDER for your own files",
            )
        elif name in self.groups:
            yield from self._group(override)
        elif not keys.is_open(name, self.root):
            yield from self._key(override)

    def _group(self, override: Override) -> Iterator[Problem]:
        name, text = override.key_or_group, override.input_line or ""
        choices = search.options(self.folders, name)
        if override.type is OverrideType.DEL:
            yield Problem(
                name,
                text,
                f"a run has exactly one option of the group {name}",
                f"write {name}=OPTION, one of {', '.join(choices)}",
            )
            return
        value = override.value()
        choice = value if isinstance(value, str) else (text.partition("=")[2])
        if choice not in choices:
            near = search.nearest_option(choice, choices)
            plus = "+" if name == EXPERIMENT else ""
            yield Problem(
                name,
                text,
                f"the options of {name} are {', '.join(choices)}",
                f"write {plus}{name}={near}" if near else f"write {plus}{name}=OPTION with one of them",
            )
        elif name == EXPERIMENT and override.type is not OverrideType.ADD:
            yield Problem(name, text, "an experiment is added with a plus", f"write +exp={choice}")
        elif name != EXPERIMENT and override.type is not OverrideType.CHANGE:
            yield Problem(
                name,
                text,
                f"the option of the group {name} is changed without a plus",
                f"write {name}={choice}",
            )

    def _key(self, override: Override) -> Iterator[Problem]:
        name, text = override.key_or_group, override.input_line or ""
        known = keys.keys_by_name(self.root).get(name)
        if known is None and name not in keys.sections(self.root):
            yield unknown_key(name, text, self.groups, self.root)
        elif override.type is OverrideType.DEL:
            yield Problem(
                name,
                text,
                "a key of the schema cannot be deleted",
                f"write {name}=null"
                if known and known.nullable
                else f"leave it out: then {name} has its default",
            )
        elif override.type is OverrideType.ADD and name not in self.root.open:
            yield Problem(
                name,
                text,
                f"{name} is a key of the schema, which is changed without a plus",
                f"write {text.lstrip('+')}",
            )
        else:
            yield from self._value(override)

    def _value(self, override: Override) -> Iterator[Problem]:
        """Assign the value to a default section, which checks its type."""
        name, text = override.key_or_group, override.input_line or ""
        section, _, inside = name.partition(".")
        config = default_config(self.root)[section].copy() if inside else default_config(self.root).copy()
        try:
            OmegaConf.update(config, inside or name, override.value(), force_add=False)
        except OmegaConfBaseException as error:
            full_key = getattr(error, "full_key", None) or name
            yield wrong_value(full_key if full_key in keys.keys_by_name(self.root) else name, text, self.root)


def unreadable(text: str, error: HydraException, folders: Sequence[Path] = ()) -> Problem:
    """The problem of an argument that cannot be parsed.

    ``folders`` are searched for experiments of that name.
    """
    if "=" not in text and text in search.options(folders, EXPERIMENT):
        return Problem(text, text, "an experiment is added with +exp=", f"write +exp={text}")
    name = text.partition("=")[0]
    if "=" not in text:
        return Problem(
            name,
            text,
            "an argument is KEY=VALUE, GROUP=OPTION or +exp=NAME",
            f"write {text}=VALUE; --help lists the keys",
        )
    why = str(error).splitlines()[0].strip()
    if re.search(r"\s[\w.+~]+=", text):
        return Problem(
            name, text, "each KEY=VALUE is a separate argument", f"write {text} without quotes around it"
        )
    return Problem(
        name,
        text,
        f"values with spaces, quotes, brackets or commas are quoted ({why})",
        f"write '{name}=\"...\"', with outer quotes for the shell",
    )


def unknown_key(name: str, seen: str, groups: Sequence[str] = (), root: ConfigRoot = RUN) -> Problem:
    """The problem of an unknown key, with a suggestion."""
    above = name.rpartition(".")[0]
    while above and above not in keys.keys_by_name(root) and above not in keys.sections(root):
        above = above.rpartition(".")[0]
    if above in keys.keys_by_name(root):
        return Problem(name, seen, f"{above} is a value and has no keys", f"write {above}=VALUE")
    near = keys.nearest(name, root)
    if near is None and "." not in name:
        near = search.nearest_option(name, groups)
    top = name.partition(".")[0]
    where = (
        f"{above} has no key {name[len(above) + 1 :]}"
        if above
        else f"there is no section or group {top}"
        if "." in name
        else f"there is no key, section or group {name}"
    )
    return Problem(
        name,
        seen,
        where,
        f"did you mean {near}? --help lists all" if near else "--help lists all keys and groups",
    )


def wrong_value(name: str, seen: str, root: ConfigRoot = RUN) -> Problem:
    """The problem of a value that the type of ``name`` does not accept."""
    key = keys.keys_by_name(root).get(name)
    if key is None and keys.is_open(name, root):
        return Problem(
            name, seen, "a setting below an open key is a value or {a: 1, ...}", f"write +{name}=VALUE"
        )
    if key is None:
        inside = [known for known in keys.keys_by_name(root) if known.startswith(name + ".")]
        return Problem(
            name, seen, f"{name} is a section, not a value", f"set its keys: {', '.join(inside[:4])}, ..."
        )
    null = ", or null" if key.nullable else ""
    kind = _kind(key)
    example = key.choices[0] if key.choices else _example(key)
    return Problem(name, seen, f"{name} is {kind}{null}", f"write {name}={example}")


def _kind(key: keys.ConfigKey) -> str:
    if key.choices:
        return f"one of {', '.join(key.choices)}"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        list[float]: "a list of numbers",
        list[str]: "a list of texts",
        list[Any]: "a list",
    }
    return " or ".join(names.get(kind, "a dictionary") for kind in key.kinds)


def _example(key: keys.ConfigKey) -> str:
    examples = {int: "8", float: "0.1", bool: "true", str: "text"}
    if isinstance(key.default, list):
        return "[" + ",".join(str(item) for item in key.default) + "]"
    if key.default not in (None, {}):
        return str(key.default).lower() if isinstance(key.default, bool) else str(key.default)
    return examples.get(key.kinds[0], "{}")
