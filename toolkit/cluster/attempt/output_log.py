"""Copy the output of a process to the log of its attempt."""

from __future__ import annotations

import io
import re
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

# Colours and cursor movements of a live display, which the log does not get.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_REDRAWS = ("\r", "\x1b[1A", "\x1b[2K")


class Tee(io.TextIOBase):
    """Write to a stream and to a file. ``isatty``, ``fileno`` and ``encoding`` are those of the stream.

    A line is written in one call: ``print`` writes its text and its end separately, and another thread, or
    another rank with the same pipe, could write in between. ``flush`` writes an incomplete line.

    Output that cannot be written is lost, since it is no reason to end a run: the reader of the stream has
    gone, or the disk of the file is full.
    """

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream = stream
        self._file = file
        self._shown: TextIO = stream
        self._lock = threading.RLock()
        self._parts = threading.local()  # of each thread: the incomplete line that it has written so far

    def write(self, text: str) -> int:
        line = getattr(self._parts, "text", "") + text
        end = line.rfind("\n") + 1
        self._parts.text = line[end:]
        self._write_lines(line[:end])
        return len(text)

    def _write_lines(self, text: str) -> None:
        if not text:
            return
        with self._lock:
            if not any(redraw in text for redraw in _REDRAWS):
                with suppress(OSError):
                    self._file.write(_ESCAPES.sub("", text))
            with suppress(OSError):
                self._shown.write(text)

    @property
    def stream(self) -> TextIO:
        return self._stream

    def show_on(self, screen: TextIO | None) -> None:
        """Write lines to ``screen`` while a live display uses the terminal; None: to the stream again."""
        self.flush()
        with self._lock:
            self._shown = self._stream if screen is None else screen

    def flush(self) -> None:
        text, self._parts.text = getattr(self._parts, "text", ""), ""
        self._write_lines(text)
        if not self._file.closed:
            with suppress(OSError):
                self._file.flush()
        with suppress(OSError):
            self._shown.flush()

    def close_log(self) -> None:
        with suppress(OSError):
            self._file.close()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute there, and never set here
        return self._stream.encoding


def tee_output(path: Path) -> None:
    """Copy stdout and stderr of this process to ``path`` line by line, instead of to any earlier log."""
    file = path.open("a", encoding="utf-8", buffering=1)
    sys.stdout = Tee(unwrap_stream(sys.stdout), file)
    sys.stderr = Tee(unwrap_stream(sys.stderr), file)


def untee_output() -> None:
    """Undo :func:`tee_output` and close the log."""
    logs: list[Tee] = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, Tee):
            stream.flush()
            setattr(sys, name, stream.stream)
            logs.append(stream)
    for stream in logs:  # both streams have the same log
        stream.close_log()


def unwrap_stream(stream: TextIO) -> TextIO:
    """Return ``stream`` without the log copy."""
    return stream.stream if isinstance(stream, Tee) else stream
