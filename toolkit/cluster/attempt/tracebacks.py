"""Reduce tracebacks to the frames of the user's code, without those of the toolkit and installed packages."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import toolkit

_ROOT = Path(toolkit.__file__).resolve().parent
_INSTALLED = (
    Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_NOT_USER_CODE = tuple(f"{path}/" for path in {_ROOT, _ROOT.parent / "launch", *_INSTALLED})


def is_user_file(filename: str) -> bool:
    """Return whether a file belongs neither to the toolkit, nor to an installed package, nor to Python."""
    return not filename.startswith("<") and not str(Path(filename).resolve()).startswith(_NOT_USER_CODE)


def format_user_frames(error: BaseException) -> str | None:
    """Return the traceback of ``error`` with only the frames of the user's files; None if there are none.

    Chained exceptions are included if they passed through the user's files.
    """
    shown = traceback.TracebackException.from_exception(error)
    return "".join(shown.format()) if _keep_user_frames(shown) else None


def _keep_user_frames(shown: traceback.TracebackException) -> bool:
    shown.stack = traceback.StackSummary.from_list(
        [frame for frame in shown.stack if is_user_file(frame.filename)]
    )
    if shown.__cause__ is not None and not _keep_user_frames(shown.__cause__):
        shown.__cause__ = None
    if shown.__context__ is not None and not _keep_user_frames(shown.__context__):
        shown.__context__ = None
    return len(shown.stack) > 0 or shown.__cause__ is not None
