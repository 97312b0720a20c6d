"""One display for all long work: description, done of total, throughput, time left.

    with Progress() as progress, progress.task("tokenising", total=12_000_000, unit="B") as task:
        task.advance(65536)

On a terminal the tasks are live bars; elsewhere (a log file, a pipe) each task prints a line at a bounded rate. Only the
rank or process that a person watches shows anything: the others take ``Progress.silent()``.
"""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as Bars
    from rich.progress import TaskID

Clock = Callable[[], float]  # seconds
BAR_WIDTH = 12


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
        self._shown: TextIO = stream
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
            self._shown.write(text)

    @property
    def stream(self) -> TextIO:
        return self._stream

    def show_on(self, screen: TextIO | None) -> None:
        """Show lines by ``screen`` in place of the stream, while a live display has the terminal; None: by the stream again."""
        self.flush()
        with self._lock:
            self._shown = self._stream if screen is None else screen

    def flush(self) -> None:
        text, self._parts.text = getattr(self._parts, "text", ""), ""
        self._put(text)
        self._file.flush()
        self._shown.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute there, and never set here
        return self._stream.encoding


class ThroughputWindow:
    """Throughput over the last ``window_seconds``: a slow start (compilation, cold caches) leaves the estimate."""

    def __init__(self, start_seconds: float, done: float, window_seconds: float = 30.0) -> None:
        self._window = window_seconds
        self._marks: deque[tuple[float, float]] = deque([(start_seconds, done)])
        self._latest = (start_seconds, done)

    def record(self, now_seconds: float, done: float) -> None:
        self._latest = (now_seconds, done)
        if now_seconds - self._marks[-1][0] >= self._window / 50:  # bounds memory, whatever the rate of calls
            self._marks.append(self._latest)
        while len(self._marks) > 1 and now_seconds - self._marks[1][0] >= self._window:
            self._marks.popleft()

    def per_second(self) -> float | None:
        """None while nothing is known."""
        (start, before), (now, done) = self._marks[0], self._latest
        return (done - before) / (now - start) if now > start and done > before else None


class ProgressTask:
    """One piece of work under way. Belongs to one thread."""

    def __init__(
        self, display: _Display, clock: Clock, description: str, total: float | None, unit: str, done: float
    ) -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.done = done
        self.note = ""
        self._display = display
        self._clock = clock
        self._start = (clock(), done)
        self._pace = ThroughputWindow(*self._start)
        self._open = True
        display.begin(self)

    def advance(self, amount: float = 1, note: str = "") -> None:
        """``amount`` more units are done; ``note`` (the loss, a file name) replaces the one shown."""
        self.done += amount
        self.note = note
        self._pace.record(self._clock(), self.done)
        self._display.update(self)

    def finish(self) -> None:
        """Take the task off the display; its last state stays readable. Repeating it does nothing."""
        if self._open:
            self._open = False
            self._display.end(self)

    def measures(self) -> str:
        """``3.2 MB/12.1 MB  1.2 MB/s  eta 0:08  loss 3.21``: what is known of it."""
        parts = [quantity(self.done, self.unit) if self.total is None else self._of_total(self.total)]
        rate = self._pace.per_second()
        if rate is not None:
            parts.append(f"{quantity(rate, self.unit)}/s")
            if self.total is not None and self.done < self.total:
                parts.append(f"eta {duration((self.total - self.done) / rate)}")
        return "  ".join([*parts, self.note] if self.note else parts)

    def summary(self) -> str:
        """What was done, in how long and at which mean throughput; what was done before is counted apart."""
        seconds, amount = self._clock() - self._start[0], self.done - self._start[1]
        rate = f" ({quantity(amount / seconds, self.unit)}/s)" if seconds > 0 and amount else ""
        note = f"  {self.note}" if self.note else ""
        whole = f", {quantity(self.done, self.unit)} in all" if self._start[1] else ""
        return f"{quantity(amount, self.unit)} in {duration(seconds)}{rate}{whole}{note}"

    def _of_total(self, total: float) -> str:
        return f"{quantity(self.done, self.unit)}/{quantity(total, self.unit)}"

    def __enter__(self) -> ProgressTask:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


class _Display(Protocol):
    def begin(self, task: ProgressTask) -> None: ...
    def update(self, task: ProgressTask) -> None: ...
    def end(self, task: ProgressTask) -> None: ...


class _Nothing:
    def begin(self, task: ProgressTask) -> None:
        pass

    def update(self, task: ProgressTask) -> None:
        pass

    def end(self, task: ProgressTask) -> None:
        pass


class _Lines:
    def __init__(self, stream: TextIO, clock: Clock, line_seconds: float) -> None:
        self._stream = stream
        self._clock = clock
        self._line_seconds = line_seconds
        self._next: dict[ProgressTask, float] = {}

    def begin(self, task: ProgressTask) -> None:
        self._next[task] = self._clock() + self._line_seconds

    def update(self, task: ProgressTask) -> None:
        now = self._clock()
        if now >= self._next[task]:
            self._next[task] = now + self._line_seconds
            self._write(f"{task.description}: {task.measures()}")

    def end(self, task: ProgressTask) -> None:
        del self._next[task]
        self._write(f"{task.description}: {task.summary()}")

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")  # one call, so that lines of several threads do not mix
        self._stream.flush()


class _Bars:
    """rich's live display, on while a task is open, so that it never holds the terminal for nothing. What is printed meanwhile appears
    above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: Bars | None = None
        self._rows: dict[ProgressTask, TaskID] = {}
        self._logs: list[Tee] = []

    def begin(self, task: ProgressTask) -> None:
        if self._bars is None:
            self._bars = self._start()
        self._rows[task] = self._bars.add_task(task.description, total=task.total, measures="")
        self.update(task)

    def update(self, task: ProgressTask) -> None:
        assert self._bars is not None
        self._bars.update(self._rows[task], completed=task.done, measures=task.measures())

    def end(self, task: ProgressTask) -> None:
        assert self._bars is not None
        row = self._rows.pop(task)
        self._bars.update(row, total=task.done or 1, completed=task.done or 1, measures=task.summary())
        if not self._rows:
            self._bars.stop()
            for log in self._logs:
                log.show_on(None)
            self._bars, self._logs = None, []

    def _start(self) -> Bars:
        from rich.console import Console
        from rich.file_proxy import FileProxy
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars
        from rich.table import Column

        # Of a narrow terminal the measures lose their end; the bar stays.
        columns: list[Any] = [
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, min_width=8)),
            BarColumn(bar_width=BAR_WIDTH, table_column=Column(no_wrap=True, min_width=BAR_WIDTH)),
            TextColumn(
                "{task.fields[measures]}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
        ]
        console = Console(file=self._stream.stream if isinstance(self._stream, Tee) else self._stream)
        self._logs = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, Tee)]
        bars = Bars(
            *columns,
            console=console,
            redirect_stdout=not self._logs,
            redirect_stderr=not self._logs,
            expand=True,
        )
        for log in self._logs:  # the log has the lines, never the bars
            log.show_on(cast(TextIO, FileProxy(console, log.stream)))
        bars.start()
        return bars


class Progress:
    """The display. Tasks may be open at the same time, in several threads (training, and a save in the background)."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        terminal: bool | None = None,
        line_seconds: float = 5.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """
        Args:
            stream: where to show; stderr by default, so that what a command prints stays clean.
            terminal: live bars or plain lines; found out from ``stream`` by default.
            line_seconds: least time between two plain lines of a task.

        Attributes:
            live: whether there are bars.
        """
        stream = sys.stderr if stream is None else stream
        self.live = stream.isatty() if terminal is None else terminal
        self._clock = clock
        self._display: _Display = _Bars(stream) if self.live else _Lines(stream, clock, line_seconds)
        self._tasks: list[ProgressTask] = []

    @classmethod
    def silent(cls) -> Progress:
        """The null object: same calls, nothing shown."""
        progress = cls(terminal=False)
        progress._display = _Nothing()
        return progress

    def task(
        self, description: str, total: float | None = None, unit: str = "items", *, done: float = 0
    ) -> ProgressTask:
        """Begin a piece of work of ``total`` units (None: unknown), ``done`` of them before (they do not count as throughput)."""
        task = ProgressTask(self._display, self._clock, description, total, unit, done)
        self._tasks = [other for other in self._tasks if other._open] + [task]
        return task

    def close(self) -> None:
        """Finish the tasks that are still open."""
        for task in self._tasks:
            task.finish()
        self._tasks = []

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def quantity(value: float, unit: str) -> str:
    """``12.1 MB``, ``3.48M tokens``, ``734 files``. Counts below 100,000 are written out."""
    if unit != "B" and value < 1e5:
        number = f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
        return f"{number} {unit}"
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            scaled = value / size
            number = f"{scaled:.0f}" if scaled >= 100 else f"{scaled:.3g}"
            return f"{number} {prefix}B" if unit == "B" else f"{number}{prefix} {unit}"
    return f"{value:.0f} {unit}"


def duration(seconds: float) -> str:
    """``0:08``, ``12:30``, ``3:05:00``, ``2d 3:05:00``."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
