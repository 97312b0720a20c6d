"""The words that may follow on a command line of ``dmt``, for the completion of shells."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from toolkit.commands import COMMANDS
from toolkit.errors import UserError

RUN_COMMANDS = ("train", "plan", "doctor", "submit")  # they take the keys of a run
OPTIONS = {"train": ["-m"], "plan": ["--json"], "doctor": ["--json"]}
CONFIG_DIR = "--config-dir="


def print_candidates(arguments: Sequence[str]) -> None:
    """Print one candidate per line.

    Args:
        arguments: the shell, and its line up to the cursor.
    """
    shell, line = arguments
    try:
        words = shlex.split(line) + [""] * line[-1:].isspace()
    except ValueError:  # inside quotes
        return
    typed = words[-1]
    for candidate in candidates(words[1:]):
        if candidate.startswith(typed):
            print(candidate[_replaced_from(typed) if shell == "bash" else 0 :])


def _replaced_from(word: str) -> int:
    """Return where the part of ``word`` begins that bash replaces: behind the last word break in it."""
    breaks = os.environ.get("COMP_WORDBREAKS", "=:")
    return max((word.rfind(mark) + 1 for mark in "=:" if mark in breaks), default=0)


def candidates(words: Sequence[str]) -> list[str]:
    """Return candidates for the last of ``words``, which follow ``dmt`` on the command line.

    A name ends with ``=`` if its value follows, and with a dot if it is a section; other names are whole
    arguments. Without any, the shell completes file names.
    """
    *before, current = words
    if not before:
        return [*COMMANDS, "completion", "--help", "--version"]
    if before[0] == "completion":
        return ["bash", "zsh", "fish"]
    try:
        return list(_of_command(before[0], before[1:], current))
    except UserError:  # the folder after --config-dir does not exist yet
        return []


def _of_command(command: str, before: Sequence[str], current: str) -> Iterator[str]:
    if current.startswith("-"):
        yield from ["--help", *OPTIONS.get(command, [])]
        if command in RUN_COMMANDS:
            yield CONFIG_DIR
        return
    from toolkit.config import keys, search_path
    from toolkit.config.roots import PLAN, PREPARE, RESHARD, RUN

    root = {"prepare": PREPARE, "reshard": RESHARD, **dict.fromkeys(RUN_COMMANDS, RUN)}.get(command)
    if root is None:
        return
    own = next((word.partition("=")[2] for word in before if word.startswith(CONFIG_DIR)), None)
    folders = search_path.folders(Path(own).expanduser() if own else None)
    groups = search_path.groups(folders) if root.groups is None else root.groups
    name, equals, value = current.partition("=")
    known = {**keys.keys_by_name(root), **(keys.keys_by_name(PLAN) if command == "plan" else {})}
    if equals:
        yield from _values(name, value, known.get(name), folders, groups)
        return
    plain = [group for group in groups if group != "exp"]
    if "--help" in before:
        yield from [*plain, *keys.sections(root), *keys.keys_by_name(root)]
        return
    short = {key: name for name, key in root.short}
    names = [*(f"{group}=" for group in plain), *(f"{short.get(key, key)}=" for key in known)]
    if "exp" in groups:
        names.append("+exp=")
    yield from _next_parts((name for name in names if name.startswith(current)), len(current))


def _next_parts(names: Iterable[str], typed: int) -> Iterator[str]:
    """Yield each name up to the next dot, as shells complete paths up to the next slash."""
    yield from dict.fromkeys(
        name if (dot := name.find(".", typed)) < 0 else name[: dot + 1] for name in names
    )


def _values(
    name: str, value: str, key: object, folders: Sequence[Path], groups: Sequence[str]
) -> Iterator[str]:
    from toolkit.config import search_path
    from toolkit.config.keys import ConfigKey

    found: list[str] = []
    if name.lstrip("+") in groups:
        found = list(search_path.options(folders, name.lstrip("+")))
    elif isinstance(key, ConfigKey):
        found = [*key.choices, *(["true", "false"] if bool in key.kinds else [])]
        found += ["null"] if found and key.nullable else []
    earlier = value[: value.rfind(",") + 1]  # of a sweep: zero=stage1,stage2
    yield from (f"{name}={earlier}{option}" for option in found)
