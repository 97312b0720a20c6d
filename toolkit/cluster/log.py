"""What is printed also goes to the attempt's log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from toolkit.cluster.tee import Tee


def log_to(path: Path) -> None:
    """From now on, stdout and stderr of this process are added to ``path`` line by line, and no longer to another log."""
    file = path.open("a", encoding="utf-8", buffering=1)
    sys.stdout = Tee(bare(sys.stdout), file)
    sys.stderr = Tee(bare(sys.stderr), file)


def bare(stream: TextIO) -> TextIO:
    """``stream`` without the log."""
    return stream.stream if isinstance(stream, Tee) else stream
