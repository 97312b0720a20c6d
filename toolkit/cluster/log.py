"""What is printed also goes to the attempt's log."""

from __future__ import annotations

import io
import re
import sys
import threading
from pathlib import Path
from typing import TextIO

# Colours and cursor movements of a live display; the log has the lines that stay.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_REDRAWS = ("\r", "\x1b[1A", "\x1b[2K")


class Tee(io.TextIOBase):
    """Writes to a stream and to a file. Asked about itself, it answers as the stream.

    Whole lines are written in one call: ``print`` writes a line's text and its end in two, between which another thread, or another rank
    with the same pipe, may write. ``flush`` writes what there is of a line.
    """

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream = stream
        self._file = file
        self._lock = threading.RLock()
        self._parts = threading.local()  # of each thread: the part of a line that it has written so far

    def write(self, text: str) -> int:
        line = getattr(self._parts, "text", "") + text
        end = line.rfind("\n") + 1
        self._parts.text = line[end:]
        self._put(line[:end])
        return len(text)

    def _put(self, text: str) -> None:
        if not text:
            return
        with self._lock:
            if not any(redraw in text for redraw in _REDRAWS):
                self._file.write(_ESCAPES.sub("", text))
            self._stream.write(text)

    @property
    def stream(self) -> TextIO:
        return self._stream

    def flush(self) -> None:
        text, self._parts.text = getattr(self._parts, "text", ""), ""
        self._put(text)
        self._file.flush()
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute there, and never set here
        return self._stream.encoding


def log_to(path: Path) -> None:
    """From now on, stdout and stderr of this process are added to ``path`` line by line, and no longer to another log."""
    file = path.open("a", encoding="utf-8", buffering=1)
    sys.stdout = Tee(bare(sys.stdout), file)
    sys.stderr = Tee(bare(sys.stderr), file)


def bare(stream: TextIO) -> TextIO:
    """``stream`` without the log."""
    return stream.stream if isinstance(stream, Tee) else stream
