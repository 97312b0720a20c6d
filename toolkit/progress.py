"""Progress display for long work: description, amount done, throughput and time left.

    with Progress() as progress, progress.task("tokenising", total=12_000_000, unit="B") as task:
        task.advance(65536)

On a terminal, and in a notebook with ipywidgets, rich draws live bars. In a log file or pipe each task
prints a line at a bounded rate. Ranks and processes whose output is not watched use ``Progress.silent()``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast, runtime_checkable

if TYPE_CHECKING:
    from types import TracebackType

    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

Clock = Callable[[], float]  # seconds
BAR_WIDTH = 12
SPEED_SECONDS = 30.0  # window of the throughput: a slow start (compilation, cold caches) leaves the estimate


@runtime_checkable
class LoggedStream(Protocol):
    """A stream whose lines are also written to a log, such as ``toolkit.cluster.attempt.output_log.Tee``."""

    @property
    def stream(self) -> TextIO:
        """The stream without the log."""

    def show_on(self, screen: TextIO | None) -> None:
        """Write lines to ``screen`` while a live display uses the terminal; None: to the stream again."""


class ProgressTask:
    """One task of a :class:`Progress`. Used by one thread."""

    def __init__(
        self, progress: Progress, description: str, total: float | None, unit: str, done: float
    ) -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.done = done
        self.note = ""
        self.open = True
        self._progress = progress
        self._start = (progress.clock(), done)

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Add ``amount`` units. ``note`` (the loss, a file name) replaces the previous note."""
        self.done += amount
        self.note = note
        self._progress.update(self)

    def finish(self) -> None:
        """End the task and show its summary. Further calls do nothing."""
        if self.open:
            self.open = False
            self._progress.end(self)

    def measures(self, speed: float | None) -> str:
        """``3.2 MB/12.1 MB  1.2 MB/s  eta 0:08  loss 3.21``; ``speed``: units per second or None."""
        of_total = "" if self.total is None else f"/{quantity(self.total, self.unit)}"
        parts = [quantity(self.done, self.unit) + of_total]
        seconds, amount = self._progress.clock() - self._start[0], self.done - self._start[1]
        if speed is None and seconds > 0 and amount > 0:
            speed = amount / seconds
        if speed:
            parts.append(f"{quantity(speed, self.unit)}/s")
            if self.total is not None and self.done < self.total:
                parts.append(f"eta {duration((self.total - self.done) / speed)}")
        return "  ".join([*parts, self.note] if self.note else parts)

    def summary(self) -> str:
        """Amount, duration and mean throughput of this task. The initial ``done`` is reported separately."""
        seconds, amount = self._progress.clock() - self._start[0], self.done - self._start[1]
        rate = f" ({quantity(amount / seconds, self.unit)}/s)" if seconds > 0 and amount else ""
        total = f", {quantity(self.done, self.unit)} in all" if self._start[1] else ""
        note = f"  {self.note}" if self.note else ""
        return f"{quantity(amount, self.unit)} in {duration(seconds)}{rate}{total}{note}"

    def __enter__(self) -> ProgressTask:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


class Progress:
    """The display.

    Several tasks may be open at the same time, in several threads (training and a background save).
    """

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
            stream: where to show progress; default stderr, so that stdout has only a command's output.
            terminal: whether to draw live bars; default: whether ``stream`` is a terminal or a notebook.
            line_seconds: minimum time between two lines of a task if there are no bars.
            clock: current time in seconds.

        Attributes:
            live: whether there are bars.
        """
        self._stream = sys.stderr if stream is None else stream
        self.live = (self._stream.isatty() or in_notebook()) if terminal is None else terminal
        self.clock = clock
        self._line_seconds = line_seconds
        self._silent = False
        self._rich: RichProgress | None = None
        self._rows: dict[ProgressTask, TaskID] = {}  # the open tasks
        self._next_line: dict[ProgressTask, float] = {}
        self._logged: list[LoggedStream] = []

    @classmethod
    def silent(cls) -> Progress:
        """Return a display that shows nothing."""
        progress = cls(terminal=False)
        progress._silent = True
        return progress

    def task(
        self, description: str, total: float | None = None, unit: str = "items", *, done: float = 0
    ) -> ProgressTask:
        """Start a task of ``total`` units (None: unknown).

        ``done`` units were done before and do not count as throughput.
        """
        task = ProgressTask(self, description, total, unit, done)
        if not self._silent:
            if self._rich is None:
                self._rich = self._start()
            self._rows[task] = self._rich.add_task(description, total=total, completed=int(done), measures="")
            self._next_line[task] = self.clock() + self._line_seconds
            if self.live:
                self.update(task)
        return task

    def update(self, task: ProgressTask) -> None:
        """Show the state of ``task``."""
        if self._silent:
            return
        assert self._rich is not None
        row = self._rows[task]
        self._rich.update(row, completed=task.done)
        if not self.live and self.clock() < self._next_line[task]:
            return
        measures = task.measures(self._rich.tasks[self._rich.task_ids.index(row)].speed)
        if self.live:
            self._rich.update(row, measures=measures)
        else:
            self._next_line[task] = self.clock() + self._line_seconds
            self._write_line(f"{task.description}: {measures}")

    def end(self, task: ProgressTask) -> None:
        """Show the summary of ``task``. After the last open task the terminal is released."""
        if self._silent:
            return
        assert self._rich is not None
        row = self._rows.pop(task)
        del self._next_line[task]
        if not self.live:
            self._rich.remove_task(row)
            self._write_line(f"{task.description}: {task.summary()}")
            return
        self._rich.update(row, total=task.done or 1, completed=task.done or 1, measures=task.summary())
        if not self._rows:
            self._rich.stop()
            for log in self._logged:
                log.show_on(None)
            self._rich, self._logged = None, []

    def close(self) -> None:
        """Finish all open tasks."""
        for task in list(self._rows):
            task.finish()

    def _write_line(self, line: str) -> None:
        self._stream.write(line + "\n")  # one call, so that lines of several threads do not mix
        self._stream.flush()

    def _start(self) -> RichProgress:
        from rich.console import Console
        from rich.file_proxy import FileProxy
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        # On a narrow terminal the measures are truncated and the bar stays.
        measures_column = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        columns: list[Any] = [
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, min_width=8)),
            BarColumn(bar_width=BAR_WIDTH, table_column=Column(no_wrap=True, min_width=BAR_WIDTH)),
            TextColumn("{task.fields[measures]}", markup=False, table_column=measures_column),
        ]
        console = Console(
            file=self._stream.stream if isinstance(self._stream, LoggedStream) else self._stream
        )
        if self.live:
            self._logged = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, LoggedStream)]
        progress = RichProgress(
            *columns,
            console=console,
            redirect_stdout=not self._logged,
            redirect_stderr=not self._logged,
            expand=True,
            speed_estimate_period=SPEED_SECONDS,
            get_time=self.clock,
        )
        if self.live:
            for log in self._logged:  # the log gets the printed lines, but not the bars
                log.show_on(cast(TextIO, FileProxy(console, log.stream)))
            progress.start()
        return progress

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_listener: Callable[[str], None] | None = None


def set_progress_listener(listener: Callable[[str], None] | None) -> None:
    """Pass what long work of this process reports to ``listener``, from any thread; None removes it."""
    global _listener
    _listener = listener


def report_progress(what: str) -> None:
    """Report that ``what``, a part of work that may take minutes, has made progress.

    The watchdog listens, so that reading or drawing the state of a run is not mistaken for a hang.
    """
    if _listener is not None:
        _listener(what)


def in_notebook() -> bool:
    """Return whether rich can draw live bars in the notebook that runs in this process."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell" and find_spec("ipywidgets") is not None


def quantity(value: float, unit: str) -> str:
    """``12.1 MB``, ``3.48M tokens``, ``734 files``. Counts below 100,000 have no prefix."""
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
