"""Where groups and experiments are found: ``conf/`` beside the package, and a folder of the user's own."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import ConfigError, Problem

ROOT = Path(__file__).resolve().parents[2] / "conf"


def folders(own: Path | None) -> tuple[Path, ...]:
    """The folders to search, first match first.

    Raises:
        ConfigError: a folder is not there, or a file of the user's has the name of one of ours, which would
            hide it.
    """
    if not ROOT.is_dir():
        raise ConfigError(
            Problem(
                "conf",
                f"there is no {ROOT}",
                "the groups lie in conf/ beside the package",
                "install from the repository: pip install -e .",
            )
        )
    if own is None:
        return (ROOT,)
    if not own.is_dir():
        raise ConfigError(
            Problem(
                "--config-dir",
                f"--config-dir={own}",
                "--config-dir names a folder that exists",
                "make it, with groups in it as in conf/: exp/mine.yaml",
            )
        )
    hidden = [name for path in own.rglob("*.yaml") if (ROOT / (name := path.relative_to(own))).exists()]
    if hidden:
        raise ConfigError(
            *(
                Problem(
                    "--config-dir",
                    f"{own / name}, and {ROOT / name}",
                    "one name stands for one file",
                    "give the file another name",
                )
                for name in sorted(hidden)
            )
        )
    return (ROOT, own)


def groups(search: Sequence[Path]) -> tuple[str, ...]:
    """Names of the groups: folders with YAML files in them."""
    found = (
        folder.name
        for root in search
        for folder in root.iterdir()
        if folder.is_dir() and any(folder.rglob("*.yaml"))
    )
    return tuple(sorted(set(found)))


def options(search: Sequence[Path], group: str) -> tuple[str, ...]:
    """What can be chosen in a group: ``stage0`` ... ; files in folders within it as ``folder/name``."""
    found = (
        path.relative_to(root / group).with_suffix("")
        for root in search
        for path in (root / group).rglob("*.yaml")
    )
    return tuple(sorted({option.as_posix() for option in found}))


def nearest_option(choice: str, among: Sequence[str]) -> str | None:
    """The option that ``choice`` most likely means, also where it is its end: ``2`` for ``stage2``."""
    ending = [option for option in among if choice and option.endswith(choice)]
    return next(iter(ending or difflib.get_close_matches(choice, among, 1, 0.5)), None)
