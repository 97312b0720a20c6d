"""Describe mistakes in a command line: arguments that cannot be parsed, unknown keys and wrong values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException

from toolkit.config import keys, search_path
from toolkit.config.numbers import parse_count
from toolkit.config.roots import RUN, ConfigRoot
from toolkit.config.search_path import EXPERIMENT
from toolkit.config.synonyms import find_synonym
from toolkit.errors import Problem, without_secrets

RENAMED_VALUES = {"train.on_nonfinite": {"continue": "skip"}}  # key -> old value -> new value


def unreadable(text: str, error: HydraException, folders: Sequence[Path] = ()) -> Problem:
    """Return the problem of an argument that cannot be parsed.

    ``folders`` are searched for experiments of that name.
    """
    if "=" not in text and text in search_path.options(folders, EXPERIMENT):
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
    """Return the problem of an unknown key, with a suggestion."""
    above = name.rpartition(".")[0]
    while above and above not in keys.keys_by_name(root) and above not in keys.sections(root):
        above = above.rpartition(".")[0]
    if above in keys.keys_by_name(root):
        key = keys.keys_by_name(root)[above]
        example = key.choices[0] if key.choices else _example(key)
        return Problem(name, seen, f"{above} is a value and has no keys", f"write {above}={example}")
    top = name.partition(".")[0]
    where = (
        f"{above} has no key {name[len(above) + 1 :]}"
        if above
        else f"there is no section or group {top}"
        if "." in name
        else f"there is no key, section or group {name}"
    )
    typed = seen.lstrip("+~").startswith(f"{name}=") and without_secrets(seen) == seen
    value = seen.partition("=")[2] if typed else None  # a remedy under another name would show a secret
    synonym = find_synonym(name, value) if root is RUN else None
    if synonym is not None:
        why, word = synonym
        return Problem(name, seen, f"{where}: {why}" if why else where, word)
    near = keys.nearest(name, root)
    if near is not None:
        remedy = f"write {near}={value}; " if value is not None and near not in keys.sections(root) else ""
        return Problem(name, seen, where, f"{remedy or f'did you mean {near}? '}--help lists all")
    group = search_path.nearest_option(name, groups) if "." not in name else None
    if group is not None:
        return Problem(name, seen, where, f"did you mean {group}? --help lists all")
    return Problem(name, seen, where, "leave it out; --help lists all keys and groups")


def wrong_value(name: str, seen: str, root: ConfigRoot = RUN) -> Problem:
    """Return the problem of a value that the type of ``name`` does not accept."""
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
    for old, new in RENAMED_VALUES.get(name, {}).items():
        if seen.endswith(f"={old}") or f"'{old}'" in seen:
            return Problem(name, seen, f"the value {old} is now called {new}", f"write {name}={new}")
    null = ", or null" if key.nullable else ""
    kind = _kind(key)
    if seen.endswith("=auto"):
        remedy = f"write {name}={'null, which lets the plan decide' if key.nullable else _example(key)}"
        return Problem(
            name,
            seen,
            f"{name} is {kind}{null}; auto is resolved by other tools",
            f"leave it out, or {remedy}",
        )
    example = key.choices[0] if key.choices else _whole(key, seen) or _example(key)
    return Problem(name, seen, f"{name} is {kind}{null}", f"write {name}={example}")


def _whole(key: keys.ConfigKey, seen: str) -> str | None:
    """Return the whole number that the value in ``seen``, 1e4 or 10k in a file, writes."""
    value = re.search(r"Value '([^']+)'", seen)
    count = parse_count(value[1]) if value is not None and key.kinds[0] is int else None
    return None if count is None else str(count)


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
