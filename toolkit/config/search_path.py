"""Find groups and experiments in ``conf/``, and in the conf folder of the user's project."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import toolkit.conf
from toolkit.config.project import FILE as PROJECT_FILE
from toolkit.config.project import find_project
from toolkit.errors import ConfigError, Problem

ROOT = Path(next(iter(toolkit.conf.__path__))).resolve()
EXPERIMENT = "exp"  # the group of experiments


def folders(own: Path | None) -> tuple[Path, ...]:
    """Return the folders to search, in order: the toolkit's, then ``own`` or else that of the user's project.

    Raises:
        ConfigError: a folder does not exist, or a user's file has the name of a file in ``conf/``.
    """
    if not ROOT.is_dir():
        raise ConfigError(
            Problem(
                "conf",
                f"there is no {ROOT}",
                "the package has its groups in toolkit/conf, or a checkout has them in conf/",
                "install the package again: pip install --force-reinstall --no-deps .",
            )
        )
    key = "--config-dir"
    if own is None:
        project = find_project()
        if project is None:
            return (ROOT,)
        key, own = PROJECT_FILE, project.conf
    if not own.is_dir():
        raise ConfigError(
            Problem(
                "--config-dir",
                f"--config-dir={own}",
                "--config-dir is an existing folder",
                "create it, with groups as in conf/: exp/mine.yaml",
            )
        )
    hidden = [name for path in own.rglob("*.yaml") if (ROOT / (name := path.relative_to(own))).exists()]
    if hidden:
        raise ConfigError(
            *(
                Problem(
                    key,
                    f"{own / name}, and {ROOT / name}",
                    "file names are unique",
                    "give the file another name",
                )
                for name in sorted(hidden)
            )
        )
    return (ROOT, own)


def groups(search: Sequence[Path]) -> tuple[str, ...]:
    """Return the names of the groups: folders with YAML files."""
    found = (
        folder.name
        for root in search
        for folder in root.iterdir()
        if folder.is_dir() and any(folder.rglob("*.yaml"))
    )
    return tuple(sorted(set(found)))


def options(search: Sequence[Path], group: str) -> tuple[str, ...]:
    """Return the options of a group: ``stage0``, ...; files in nested folders are ``folder/name``."""
    found = (
        path.relative_to(root / group).with_suffix("")
        for root in search
        for path in (root / group).rglob("*.yaml")
    )
    return tuple(sorted({option.as_posix() for option in found}))


def nearest_option(choice: str, among: Sequence[str]) -> str | None:
    """Return the option that ``choice`` most likely means; ``2`` means ``stage2``. None if no option is
    similar.
    """
    ending = [option for option in among if choice and option.endswith(choice)]
    return next(iter(ending or difflib.get_close_matches(choice, among, 1, 0.5)), None)
