"""The directory of a run by the run's name: ``runs/NAME`` stands for the one folder ``runs/NAME-<identity>``."""

from __future__ import annotations

import re
from pathlib import Path

from toolkit.errors import InputError, Problem

_IDENTITY = re.compile(r"-[0-9a-f]{8}")


def find_run(path: str | Path, key: str) -> Path:
    """``path``, if it exists or if no run has that name; else the only run directory ``path-<8 hex digits>``.

    Args:
        key: the option that ``path`` was given to, for the error.

    Raises:
        InputError: several runs have the name.
    """
    path = Path(path).expanduser()
    if path.exists() or not path.name or not path.parent.is_dir():
        return path
    found = sorted(
        folder
        for folder in path.parent.iterdir()
        if folder.name.startswith(path.name)
        and _IDENTITY.fullmatch(folder.name.removeprefix(path.name))
        and (folder / "config.yaml").is_file()
    )
    if len(found) > 1:
        newest = max(found, key=lambda folder: (folder / "config.yaml").stat().st_mtime)
        raise InputError(
            Problem(
                key,
                f"{key}={path}, which {len(found)} runs are named: {', '.join(map(str, found))}",
                "a run's name stands for its directory if one run has that name",
                f"write {key}={newest}, the newest",
            )
        )
    return found[0] if found else path
