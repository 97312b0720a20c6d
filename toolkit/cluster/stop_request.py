"""A request to stop: a signal, a notice, or the death of the launcher. It sets a flag; the loop saves and leaves when it looks.

A thread does the watching, since Python runs signal handlers only between two instructions of the main thread, which may sit in
a collective for minutes. It also ends the process when the user insists, or when saving does not end in the time allowed.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.environment import Launch, Launcher
from toolkit.errors import ExitCode

POLL_SECONDS = 0.5
# A terminal's Ctrl-C reaches a rank once by itself and again through its launcher: that is one request.
ECHO_SECONDS = 1.0
SIGNAL_BURST_SECONDS = 0.1  # within which signals are of one cause
MAX_STARTUP_SECONDS = 600.0  # seconds: beyond it, the clocks of processes and of this one are not the same
# Slurm sends whichever its job asked for (sbatch --signal): SIGUSR1 and SIGUSR2 are what people ask for.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    started: str

    @staticmethod
    def read(pid: int) -> ProcessId | None:
        """None where it is gone, or a zombie that nobody has collected yet."""
        fields = _read_stat(pid)
        return None if fields is None or fields[0] in "ZX" else ProcessId(pid, fields[19])

    def is_alive(self) -> bool:
        return ProcessId.read(self.pid) == self


def process_start_time() -> float:
    """When this process was started, in seconds since 1970: some of a start is over before its first line of Python runs."""
    now = time.time()
    fields = _read_stat(os.getpid())
    assert fields is not None, "this process is there"
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return now - age if 0 <= age < MAX_STARTUP_SECONDS else now


def find_launchers(launch: Launch) -> list[ProcessId]:
    """The processes above this rank whose death means that nobody waits for it any more.

    ``deepspeed`` is two of them: the runner that the user sees, and ``deepspeed.launcher.launch`` on each node. A signal
    ends the runner alone. The shell above is not watched: nohup is a fair use.
    """
    if launch.launcher is Launcher.NONE:
        return []
    found: list[ProcessId] = []
    pid = os.getppid()
    while (process := ProcessId.read(pid)) is not None and (not found or _is_deepspeed(pid)):
        found.append(process)
        if not _is_deepspeed(pid):
            break
        pid = _parent_pid(pid)
    return found


class StopRequest:
    """Called, it gives the reason to stop, or None.

    Until :meth:`arm`, there is nothing to save, and a request ends the process at once. SIGINT, more than a second after any request,
    does so too: somebody insists. Other signals that come again do not: launchers and Slurm repeat them while the ranks are saving.

    Attributes:
        abort: called by the watching thread right before it ends the process, with the reason and the exit code.
        heard: called by the watching thread when the first signal has come, once there is something to save, with its name.
        signal: the one that made the request, if it was one.
    """

    def __init__(self) -> None:
        self.abort: Callable[[str, ExitCode], None] = lambda reason, code: None
        self.on_signal: Callable[[str], None] = lambda name: None
        self.signal: signal.Signals | None = None
        self._watched: Sequence[ProcessId] = ()
        self._grace_seconds: float | None = None
        self._own_seconds: float | None = None  # that the request itself allows, in place of the grace
        self._armed = False
        self._closed = False
        self._reason: str | None = None
        self._interrupted = False
        self._requested_at = 0.0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def __call__(self) -> str | None:
        return self._reason

    def request(self, reason: str, seconds: float | None = None) -> None:
        """From any thread: stop, within ``seconds``, or the grace that :meth:`arm` was told. The first request counts."""
        if self._reason is None:
            self._own_seconds = seconds
            self._requested_at = time.monotonic()
            self._reason = reason

    def seconds_left(self) -> float | None:
        """Until the process is ended in any case; None where nobody asked, or there is no such bound."""
        limit = self._limit()
        return None if self._reason is None or limit is None else limit - self._waited()

    def install(self, watched: Sequence[ProcessId] = ()) -> None:
        """Take over SIGINT, SIGTERM and, unless nohup has it ignored, SIGHUP; the death of a ``watched`` process is a request too.
        From the main thread."""
        self._watched = watched
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(
                    number, lambda *_: None
                )  # with a handler in place, the number is written to the pipe
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # our parent has kept them back until now
        os.register_at_fork(after_in_child=_reset_signals_in_child)
        threading.Thread(target=self._watch, name="stop-request", daemon=True).start()

    def arm(self, grace_seconds: float | None) -> None:
        """From now on the caller looks and saves. ``grace_seconds`` after a request the process is ended in any case; None: never."""
        self._grace_seconds = grace_seconds
        self._armed = True

    def close(self) -> None:
        """End the watching. A launcher that still sends a signal, while the interpreter shuts down, must not spoil the exit code."""
        self._closed = True
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if self._watched else signal.SIG_DFL)

    def _watch(self) -> None:
        while not self._closed:
            for number in self._signals():
                self._signalled(number)
            if self._reason is None and (
                dead := [process.pid for process in self._watched if not process.is_alive()]
            ):
                self.request(f"the launcher (process {dead[0]}) is gone")
            if self._reason is None or self._closed:
                continue
            if not self._armed:
                self._end(f"{self._reason} before training began", ExitCode.STOPPED)
            limit = self._limit()
            if limit is not None and self._waited() > limit:
                faulthandler.dump_traceback(2)  # where the saving hangs
                bound = (
                    f"cluster.grace_seconds={limit:g}"
                    if self._own_seconds is None
                    else f"the {limit:g} s that there were"
                )
                self._end(f"{self._reason}, and saving took more than {bound}", ExitCode.FAILURE)

    def _signals(self) -> list[signal.Signals]:
        """What has come within ``POLL_SECONDS``, SIGINT first: of Ctrl-C under a launcher, the launcher makes a SIGTERM too, whose handler
        may run before that of the SIGINT."""
        if not select.select([self._wake_read], [], [], POLL_SECONDS)[0]:
            return []
        time.sleep(SIGNAL_BURST_SECONDS)
        return sorted(
            (signal.Signals(number) for number in os.read(self._wake_read, 64)),
            key=lambda number: number is not signal.SIGINT,
        )

    def _signalled(self, number: signal.Signals) -> None:
        if number is signal.SIGINT and not self._closed:
            if self._reason is not None and self._waited() > ECHO_SECONDS:
                words = "SIGINT twice" if self._interrupted else f"{self._reason}, then SIGINT"
                self._end(f"{words}: ended without saving", ExitCode.FAILURE)
            self._interrupted = True
        if number in SIGNALS and self.signal is None:
            self.signal, first = number, self._reason is None
            self.request(number.name)
            if first and self._armed and not self._closed:
                self.on_signal(number.name)

    def _limit(self) -> float | None:
        return self._grace_seconds if self._own_seconds is None else self._own_seconds

    def _waited(self) -> float:
        return time.monotonic() - self._requested_at

    def _end(self, reason: str, code: ExitCode) -> None:
        try:
            self.abort(reason, code)
        finally:
            os._exit(code)


def _reset_signals_in_child() -> None:
    """A forked worker shares the pipe, and would report its own end as a request to stop this process."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _read_stat(pid: int) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the state on: state, parent, ..., start time at [19]. None: no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def _parent_pid(pid: int) -> int:
    fields = _read_stat(pid)
    return int(fields[1]) if fields else 0


def _is_deepspeed(pid: int) -> bool:
    """Whether the process is one of DeepSpeed's launchers: ``python -m deepspeed.launcher.launch``, or ``.../bin/deepspeed``."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return any(
        word.startswith("deepspeed.launcher.") or Path(word).name in ("deepspeed", "deepspeed.pt", "ds")
        for word in words[:4]
    )
