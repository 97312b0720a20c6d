"""Names of files that come from a manifest, an index, a pickle or a listing: checked before anything is opened or written.

    file = inside(folder, content["file"])      # raises UnsafePath for "/etc/passwd", "../x", "C:\\x", a link to another place

A name that this toolkit did not choose may come from another machine. It is a relative path in its normal form with forward slashes, and
what it names lies in the folder that it is relative to, links included.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath

MOST_NAME_BYTES, MOST_PATH_BYTES = (
    255,
    4096,
)  # of a component and of a whole path on Linux; the path's end is a NUL byte
SHOWN = 80


class UnsafePath(ValueError):
    """A name that a file or a store gave and that does not stay in its folder. The text says what it is and which rule it breaks."""


def relative_name(name: object) -> str:
    """``name``, which is a relative path below some folder. Looks at no file system: for names in a store, and for those in a manifest.

    Raises:
        UnsafePath: it is no text, empty, absolute, too long, not in its normal form (``a//b``, ``./a``), or has ``..``, a drive letter, a
            backslash or a NUL byte.
    """
    broken = _broken_rule(name) if isinstance(name, str) else f"is a {type(name).__name__}, not text"
    if broken is not None:
        raise UnsafePath(f"the path {_shown(name)} {broken}")
    return str(name)


@lru_cache(maxsize=65536)
def _broken_rule(name: str) -> str | None:
    """What is wrong with ``name``; None if nothing is."""
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
    except UnicodeEncodeError:  # JSON may hold half of a surrogate pair
        return "has characters that no file name can have"
    return f"is too long: {whole} bytes" if longest > MOST_NAME_BYTES or whole >= MOST_PATH_BYTES else None


def check_links(root: Path, *, skip: Collection[str] = ()) -> None:
    """Links below ``root`` stay below it, but for those in hidden folders.

    Args:
        skip: folders directly in ``root`` that are not looked at.

    Raises:
        UnsafePath: see :func:`inside`; for the first link that does not.
    """
    for place, folders, files in os.walk(root):
        at_top = Path(place) == root
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink() and not (at_top and name in skip):
                inside(root, path.relative_to(root).as_posix())
        folders[:] = [name for name in folders if not name.startswith(".") and not (at_top and name in skip)]


def _shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def inside(root: Path, name: object) -> Path:
    """The path of the file or folder ``name`` below ``root``. It need not exist; if it does, links on the way to it stay below ``root``.

    A folder of the Hugging Face hub's cache is ``snapshots/REVISION``, whose files are links into ``blobs`` beside ``snapshots``: these
    count as below it.

    Raises:
        UnsafePath: see :func:`relative_name`; or a link leads to another place.
    """
    path = root / relative_name(name)
    home, real = Path(os.path.realpath(root)), Path(os.path.realpath(path))
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(one) for one in homes):
        raise UnsafePath(f"the path {_shown(name)} is a link to {real}, outside {root}")
    return path
