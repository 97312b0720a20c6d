"""Find a run directory by the run's name: ``runs/NAME`` stands for the only folder
``runs/NAME-<identity>``."""

from __future__ import annotations

import re
from pathlib import Path

from toolkit.checkpoint_folder import resolve_pointer
from toolkit.errors import InputError, Problem

_IDENTITY = re.compile(r"-[0-9a-f]{8}")


def find_run(path: str | Path, key: str) -> Path:
    """Return ``path`` if it exists or no run has that name, else the only run directory ``path-<8 hex
    digits>``. The path of ``checkpoints/best`` or ``checkpoints/latest`` becomes that of the checkpoint.

    Args:
        path: Path or name of a run.
        key: The option with this value, for the error.

    Raises:
        InputError: Several runs have the name.
    """
    path = resolve_pointer(Path(path).expanduser())
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
                f"{key}={path} matches {len(found)} runs: {', '.join(map(str, found))}",
                "a run's name identifies its directory only if it is unique",
                f"write {key}={newest}, the newest",
            )
        )
    return found[0] if found else path
