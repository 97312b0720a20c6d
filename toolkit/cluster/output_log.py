"""Copy the output of a process to the log of its attempt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from toolkit.progress import Tee


def tee_output(path: Path) -> None:
    """Copy stdout and stderr of this process to ``path`` line by line, instead of to any earlier log."""
    file = path.open("a", encoding="utf-8", buffering=1)
    sys.stdout = Tee(unwrap_stream(sys.stdout), file)
    sys.stderr = Tee(unwrap_stream(sys.stderr), file)


def unwrap_stream(stream: TextIO) -> TextIO:
    """Return ``stream`` without the log copy."""
    return stream.stream if isinstance(stream, Tee) else stream
