"""Type what the remedy of an error says, as a user would, and see whether the error is gone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from toolkit.config import engine_keys, keys, search_path
from toolkit.config.compose import compose
from toolkit.config.roots import RUN
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, PlanError, Problem, Severity
from toolkit.plan.make import make_plan
from toolkit.plan.types import World

_VALUE = r"""(?:\[[^\]]*\]|\{[^}]*\}|'[^']*'|"[^"]*"|[^\s,;()?'"]*[^\s,;()?'".:])"""
_WORD = re.compile(rf"""'?(?<![\w.+/-])(\+?[a-z_]+(?:[./]\w+)*={_VALUE})""")
_LEAVE = re.compile(r"leave (?:it|them) out|leave out (\S+\w)|leave (\S+) out")
# Placeholders that a user replaces by something of their own.
PLACEHOLDERS = {"FOLDER": "data/mine", "NAME": "gpt2", "my.package.Model": "my.package.Model", "N": "2"}


@dataclass(frozen=True)
class Choice:
    """One way to follow a remedy: words to type, and keys to leave out (empty text: the key of the error)."""

    words: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    without_all: bool = False  # without every word that the error quotes: "them" in the remedy


def choices(remedy: str) -> list[Choice]:
    """The ways to follow a remedy that consist of words to type."""
    found = []
    for part in _split(remedy):
        words = tuple(_filled(word) for word in _WORD.findall(part))
        without = tuple(match[1] or match[2] or "" for match in _LEAVE.finditer(part))
        if words or without:
            found.append(Choice(words, without, "them" in part.split()))
    return found


def _split(remedy: str) -> list[str]:
    """The remedy at its commas, semicolons and ors, except inside brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for match in re.finditer(r"[\[{(]|[\]})]|['\"]|[;?]|, |: | or ", remedy):
        text = match[0]
        if text in "'\"":
            quote = "" if quote == text else quote or text
        elif quote:
            continue
        elif text in "[{(":
            depth += 1
        elif text in "]})":
            depth -= 1
        elif not depth:
            parts.append(remedy[start : match.start()])
            start = match.end()
    return [*parts, remedy[start:]]


def _filled(word: str) -> str:
    name, _, value = word.partition("=")
    return f"{name}={PLACEHOLDERS.get(value, value)}"


@cache
def composed(words: tuple[str, ...]) -> RunConfig:
    """The configuration of a command. Callers do not change it."""
    return compose(words)


def typed_problems(words: Sequence[str], world: World | None) -> list[Problem]:
    """The problems of a command: of its arguments, else of its plan if there is a ``world``."""
    try:
        config = composed(tuple(words))
        found = engine_keys.problems(config)
        return found if found or world is None else list(make_plan(config, world).warnings)
    except (ConfigError, PlanError) as error:
        return list(error.problems)


def follow(words: Sequence[str], problem: Problem, choice: Choice, *, replace: bool) -> list[str]:
    """The command of a user who follows ``choice``.

    Args:
        replace: the words of the remedy replace the word at fault.
    """
    gone = {name or problem.key for name in choice.without}
    if choice.without_all:
        gone |= {key_of(word) for word in _WORD.findall(problem.seen)}
    if replace and choice.words:
        gone.add(problem.key)
    new = {key_of(word) for word in choice.words}
    kept = [word for word in words if not _replaced(key_of(word), new | gone)]
    return [*kept, *choice.words]


def _replaced(name: str, new: set[str]) -> bool:
    groups = search_path.groups(search_path.folders(None))
    return any(
        name == other
        or (
            name.startswith(f"{other}.")
            and (other in groups or keys.is_open(other + ".x", RUN) or "." in other)
        )
        or (other.startswith(f"{name}.") and keys.is_open(name + ".x", RUN))
        for other in new
    )


def key_of(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].partition("@")[0]


def is_error(problem: Problem) -> bool:
    return problem.severity is Severity.ERROR


def words_of(config: Any) -> list[str]:
    """The words with which a user types a configuration, from the defaults of every run."""
    base = _defaults()
    known = keys.keys_by_name(RUN)
    return [
        f"{'' if name in known else '+'}{name}={typed(value)}"
        for name, value in keys.flatten(config).items()
        if name not in base or base[name] != value
    ]


@cache
def _defaults() -> Mapping[str, Any]:
    """The keys of a run without any word, by name."""
    return keys.flatten(compose([]))


def typed(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return engine_keys.format_value(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {typed(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, str) and not re.fullmatch(r"[\w./-]+", value):
        return f"'{value}'"
    return str(value)
