r"""Validate file names from a manifest, an index, a pickle or a listing before they are used.

    file = inside(folder, content["file"])  # raises UnsafePath for "/etc/passwd", "../x", an outside link

A valid name is a normalized relative path with forward slashes, and its target is in the folder that it is
relative to, also after links are followed.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath

MOST_NAME_BYTES, MOST_PATH_BYTES = (
    255,
    4096,
)  # limits of Linux for a component and a path, whose end is a NUL byte
SHOWN = 80


class Url(str):
    """A folder or file in a store. ``/`` joins, as for a ``Path``."""

    __slots__ = ()

    def __truediv__(self, name: str) -> Url:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        return Url("/".join([self.rstrip("/"), *parts]))

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.rstrip("/").rpartition("/")[2]


Location = Path | Url


class UnsafePath(ValueError):
    """A name that leads out of its folder or is malformed. The message has the name and the rule."""


def relative_name(name: object) -> str:
    """Return ``name`` if it is a valid relative path. Accesses no file system.

    Raises:
        UnsafePath: It is not text, empty, absolute, too long, not normalized (``a//b``, ``./a``), or contains
            ``..``, a drive letter, a backslash or a NUL byte.
    """
    broken = _broken_rule(name) if isinstance(name, str) else f"is a {type(name).__name__}, not text"
    if broken is not None:
        raise UnsafePath(f"the path {_shown(name)} {broken}")
    return str(name)


@lru_cache(maxsize=65536)
def _broken_rule(name: str) -> str | None:
    """Return what is wrong with ``name``, or None."""
    parts = name.split("/")
    if not name:
        return "is empty"
    if "\0" in name:
        return "has a NUL byte"
    if name.startswith("/"):
        return "is absolute"
    if "\\" in name or PureWindowsPath(name).drive:
        return "has a drive letter or a backslash"
    if ".." in parts:
        return "leads out of its folder with .."
    if name == "." or name != str(PurePosixPath(name)):
        return "is not in its normal form"
    try:
        longest, whole = max(len(os.fsencode(part)) for part in parts), len(os.fsencode(name))
    except UnicodeEncodeError:  # JSON may contain an unpaired surrogate
        return "has characters that no file name can have"
    return f"is too long: {whole} bytes" if longest > MOST_NAME_BYTES or whole >= MOST_PATH_BYTES else None


def check_links(root: Path, *, skip: Collection[str] = ()) -> None:
    """Check that links below ``root`` stay below it, except in hidden folders.

    Args:
        root: The folder.
        skip: Entries of ``root`` that are skipped.

    Raises:
        UnsafePath: See :func:`inside`; for the first such link.
    """
    for parent, folders, files in os.walk(root):
        at_top = Path(parent) == root
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not (at_top and name in skip):
                inside(root, path.relative_to(root).as_posix())
        folders[:] = [name for name in folders if not name.startswith(".") and not (at_top and name in skip)]


def _shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def inside(root: Path, name: object) -> Path:
    """Return the path ``name`` below ``root``, which need not exist. Links on the way must stay below
    ``root``.

    In the Hugging Face hub's cache, files of ``snapshots/REVISION`` are links to ``blobs`` next to
    ``snapshots``, which are allowed.

    Raises:
        UnsafePath: See :func:`relative_name`; or a link leads out of the folder.
    """
    path = root / relative_name(name)
    home, real = Path(os.path.realpath(root)), Path(os.path.realpath(path))
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(home) for home in homes):
        raise UnsafePath(f"the path {_shown(name)} is a link to {real}, outside {root}")
    return path
