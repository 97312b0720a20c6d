"""The user's project: the folder whose ``pyproject.toml`` has a table ``[tool.dmt]``.

    [tool.dmt]
    conf = "conf"

A command that runs in that folder or below it also searches ``conf`` for groups and experiments, and imports
the user's modules from the folder.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import ConfigError, Problem

FILE = "pyproject.toml"
TABLE = "[tool.dmt]"
DEFAULT_CONF = "conf"


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with the configuration groups of a user.

    Attributes:
        folder: holds ``pyproject.toml``, and the user's modules.
        conf: holds groups and experiments.
    """

    folder: Path
    conf: Path

    def __str__(self) -> str:
        return f"project {self.folder}: {self.conf.relative_to(self.folder)} has its groups and experiments"


def find_project() -> Project | None:
    """Return the project that the working folder is in; None if it is in none.

    Raises:
        ConfigError: the nearest file with the table is not TOML, or its table is wrong.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        file = folder / FILE
        try:
            text = file.read_text(encoding="utf-8")
        except OSError:  # there is none, or it belongs to somebody else
            continue
        if TABLE in text and (project := _read(file, text)) is not None:
            return project
    return None


def _read(file: Path, text: str) -> Project | None:
    """Return the project of a file; None if the table is in a comment."""
    rule = f"{TABLE} has one key: conf, the folder of groups and experiments below {file.parent}"
    remedy = f'write conf = "{DEFAULT_CONF}" below {TABLE}'
    try:
        table = tomllib.loads(text).get("tool", {}).get("dmt")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            Problem(FILE, f"{file}: {error}", f"{FILE} is TOML", "correct that line")
        ) from error
    if table is None:
        return None
    name = table.get("conf", DEFAULT_CONF)
    unknown = [key for key in table if key != "conf"]
    if unknown or not isinstance(name, str):
        seen = f"{unknown[0]} = {table[unknown[0]]!r}" if unknown else f"conf = {name!r}"
        raise ConfigError(Problem(FILE, f"{file}: {seen}", rule, remedy))
    conf = (file.parent / name).resolve()
    if not conf.is_relative_to(file.parent.resolve()) or not conf.is_dir():
        raise ConfigError(
            Problem(
                FILE,
                f"{file}: conf = {name!r}, which is no folder below it",
                rule,
                f"create {conf}, or {remedy}",
            )
        )
    return Project(file.parent.resolve(), conf)
