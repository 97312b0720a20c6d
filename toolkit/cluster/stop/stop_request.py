"""Requests to stop: a signal, a preemption notice, or the death of the launcher. The training loop polls a
flag and saves.

A thread watches for them, since Python runs signal handlers only between two instructions of the main thread,
which may be blocked in a collective for minutes. The thread also ends the process if the user insists or if
saving takes too long.
"""

from __future__ import annotations

import _thread
import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.errors import ExitCode

POLL_SECONDS = 0.5
# Ctrl-C in a terminal reaches a rank directly and again through its launcher; count both as one request.
ECHO_SECONDS = 1.0
SIGNAL_BURST_SECONDS = 0.1  # signals this close together have one cause
RECORD_SECONDS = 20.0  # for the record of an end, which may block on a file system that does not respond
# seconds; a larger age means that the clocks are inconsistent
MAX_STARTUP_SECONDS = 600.0
# Slurm sends the signal chosen with sbatch --signal; SIGUSR1 and SIGUSR2 are common choices.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class ProcessHandle:
    """A process identified by its PID and start time, so that a reused PID is not mistaken for it."""

    pid: int
    started: str

    @staticmethod
    def read(pid: int) -> ProcessHandle | None:
        """Return the process; None if it has ended (also as a zombie)."""
        fields = _read_stat(pid)
        return None if fields is None or fields[0] in "ZX" else ProcessHandle(pid, fields[19])

    def is_alive(self) -> bool:
        """Return whether the process is alive; True if that is unknown, as with too many open files."""
        try:
            return ProcessHandle.read(self.pid) == self
        except OSError:
            return True


def process_start_time() -> float:
    """Return the Unix time at which this process started, which is before its first line of Python ran."""
    now = time.time()
    fields = _read_stat(os.getpid())
    assert fields is not None, "/proc must list this process"
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return now - age if 0 <= age < MAX_STARTUP_SECONDS else now


def find_launchers(launch: Launch) -> list[ProcessHandle]:
    """Return the launcher processes above this rank, and its relay; if one dies, the rank should stop.

    ``deepspeed`` has two of them: the runner started by the user, and ``deepspeed.launcher.launch`` on each
    node. A signal ends only the runner. The shell above is not watched, so that nohup works.
    """
    if launch.launcher is Launcher.NONE:
        return []
    launchers: list[ProcessHandle] = []
    pid = launch.launcher_pid
    while (process := ProcessHandle.read(pid)) is not None and (not launchers or _is_deepspeed(pid)):
        launchers.append(process)
        if not _is_deepspeed(pid):
            break
        pid = parent_pid(pid)
    if launch.relay is not None and (relay := ProcessHandle.read(launch.relay.pid)) is not None:
        launchers.append(relay)
    return launchers


class StopRequest:
    """The state of a stop request. Calling the object returns the reason to stop, or None.

    Until :meth:`arm` there is nothing to save, and a request ends the process at once. So does a SIGINT more
    than a second after any other request. Other repeated signals do not, because launchers and Slurm repeat
    them while the ranks save.

    Attributes:
        abort: called by the watching thread just before it ends the process, with the reason and the exit
            code.
        on_signal: called by the watching thread with the first signal's name, once there is something to
            save.
        signal: the first signal that was received, even after another request; None: there was none.
        leaves: the request concerns this node only, which goes away: its launcher has died, a cloud takes the
            machine back, or it computes wrong values.
    """

    def __init__(self) -> None:
        self.abort: Callable[[str, ExitCode], None] = lambda reason, code: None
        self.on_signal: Callable[[str], None] = lambda name: None
        self.signal: signal.Signals | None = None
        self.leaves = False
        self._watched: Sequence[ProcessHandle] = ()
        self._grace_seconds: float | None = None
        self._limit_name = ""
        # deadline set by the request itself, instead of the grace period
        self._own_seconds: float | None = None
        self._armed = False
        self._closed = False
        self._ending = False
        self._reason: str | None = None
        self._interrupted = False
        self._requested_at = 0.0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def __call__(self) -> str | None:
        return self._reason

    def request(self, reason: str, seconds: float | None = None, *, leaves: bool = False) -> None:
        """Request a stop within ``seconds`` (None: the grace period of :meth:`arm`), from any thread. The
        first request wins.
        """
        if self._reason is None:
            self._own_seconds, self.leaves = seconds, leaves
            self._requested_at = time.monotonic()
            self._reason = reason

    def seconds_left(self) -> float | None:
        """Return the seconds until the process is terminated; None if no stop was requested or there is no
        limit.
        """
        limit = self._limit()
        return None if self._reason is None or limit is None else limit - self._waited()

    def install(self, watched: Sequence[ProcessHandle] = ()) -> None:
        """Handle SIGINT, SIGTERM and, unless nohup ignores it, SIGHUP; also watch the ``watched`` processes.

        Call it from the main thread.
        """
        self._watched = watched
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                # a handler is needed for the signal number to be written to the pipe
                signal.signal(number, self._received)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the supervisor blocked them until now
        os.register_at_fork(after_in_child=_reset_signals_in_child)
        threading.Thread(target=self._watch, name="stop-request", daemon=True).start()

    def _received(self, number: int, frame: object) -> None:
        """Do nothing: the watching thread reads the signal from the pipe."""

    def arm(self, grace_seconds: float | None, limit: str = "cluster.grace_seconds") -> None:
        """From now on the caller polls and saves. The process ends ``grace_seconds`` after a request; None:
        no limit.

        Args:
            limit: what sets ``grace_seconds``, for the message if saving takes longer.
        """
        self._grace_seconds, self._limit_name = grace_seconds, limit
        self._armed = True

    def wait_if_ending(self) -> None:
        """Block if the watching thread is ending the run, so that the caller records no other reason. That
        thread ends this process, or raises KeyboardInterrupt here.
        """
        if self._ending:
            threading.Event().wait()

    def close(self) -> None:
        """Stop watching. Later signals from a launcher must not change the exit code during interpreter
        shutdown.
        """
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
                self.request(f"the launcher (process {dead[0]}) has ended", leaves=True)
            if self._reason is None or self._closed:
                continue
            if not self._armed:
                self._end(f"{self._reason} before training began", ExitCode.STOPPED)
            limit = self._limit()
            if limit is not None and self._waited() > limit:
                faulthandler.dump_traceback(2)  # show where saving hangs
                bound = (
                    f"{self._limit_name}={limit:g}"
                    if self._own_seconds is None
                    else f"the announced {limit:g} s"
                )
                self._end(f"{self._reason}, and saving took more than {bound}", ExitCode.FAILURE)

    def _signals(self) -> list[signal.Signals]:
        """Return the signals received within ``POLL_SECONDS``, SIGINT first.

        On Ctrl-C a launcher also sends SIGTERM, which may arrive before the SIGINT.
        """
        wakes = select.poll()  # select() fails if the program has opened more than 1024 files
        wakes.register(self._wake_read, select.POLLIN)
        if not wakes.poll(POLL_SECONDS * 1000):
            return []
        time.sleep(SIGNAL_BURST_SECONDS)
        return sorted(  # a program may handle further signals, whose numbers need not have a name
            (signal.Signals(number) for number in os.read(self._wake_read, 64) if number in SIGNALS),
            key=lambda number: number is not signal.SIGINT,
        )

    def _signalled(self, number: signal.Signals) -> None:
        if number is signal.SIGINT and not self._closed:
            if self._reason is not None and self._waited() > ECHO_SECONDS:
                text = "SIGINT twice" if self._interrupted else f"{self._reason}, then SIGINT"
                self._end(f"{text}: ended without saving", ExitCode.FAILURE)
            self._interrupted = True
        if self.signal is None:
            self.signal, first = number, self._reason is None
            self.request(number.name)
            if first and self._armed and not self._closed:
                self.on_signal(number.name)

    def _limit(self) -> float | None:
        return self._grace_seconds if self._own_seconds is None else self._own_seconds

    def _waited(self) -> float:
        return time.monotonic() - self._requested_at

    def _end(self, reason: str, code: ExitCode) -> None:
        self._ending = True
        try:
            limit = threading.Timer(RECORD_SECONDS, os._exit, [code])
            limit.daemon = True
            with suppress(RuntimeError):  # too many threads
                limit.start()
            self.abort(reason, code)
        finally:
            os._exit(code)


class ProgramStopRequest(StopRequest):
    """The stop request of a run in a program or notebook of the user, which never ends that process.

    Until :meth:`arm` Ctrl-C raises KeyboardInterrupt as usual. After it, the first Ctrl-C makes the run save
    and stop. A second one, and a save that takes longer than the grace period, raise KeyboardInterrupt.

    Args:
        launchers: watched from :meth:`arm` on.
    """

    def __init__(self, launchers: Sequence[ProcessHandle]) -> None:
        super().__init__()
        self._launchers = launchers
        self._earlier: dict[signal.Signals, Any] = {}
        self._earlier_wakeup = -1
        self._raises = False

    def arm(self, grace_seconds: float | None, limit: str = "cluster.grace_seconds") -> None:
        if threading.current_thread() is threading.main_thread():  # others cannot handle signals
            self._earlier = {number: signal.getsignal(number) for number in SIGNALS}
            self._earlier_wakeup = signal.set_wakeup_fd(-1)
            self.install(self._launchers)
        super().arm(grace_seconds, limit)

    def close(self) -> None:
        """Stop watching and restore the signal handlers."""
        self._closed = True
        if self._earlier:
            signal.set_wakeup_fd(self._earlier_wakeup)
        else:
            self._close_pipe()
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _watch(self) -> None:
        super()._watch()
        self._close_pipe()

    def _close_pipe(self) -> None:
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _received(self, number: int, frame: object) -> None:
        if self._raises:
            raise KeyboardInterrupt

    def _end(self, reason: str, code: ExitCode) -> None:
        self._ending = True
        try:
            self.abort(reason, code)
        finally:
            self._closed = self._raises = True
            _thread.interrupt_main()


def _reset_signals_in_child() -> None:
    """Reset signal handling in a forked worker, which would otherwise report its own signals through the
    shared pipe.
    """
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if isinstance(getattr(signal.getsignal(number), "__self__", None), StopRequest):
            signal.signal(number, signal.SIG_DFL)


def _read_stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on (start time at [19]); None if there is no
    such process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def parent_pid(pid: int) -> int:
    """Return the PID of the parent of a process; 0 if there is no such process."""
    fields = _read_stat(pid)
    return int(fields[1]) if fields else 0


def _is_deepspeed(pid: int) -> bool:
    """Return whether the process is a launcher of DeepSpeed: ``python -m deepspeed.launcher.launch`` or
    ``.../bin/deepspeed``.
    """
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return any(
        word.startswith("deepspeed.launcher.") or Path(word).name in ("deepspeed", "deepspeed.pt", "ds")
        for word in arguments[:4]
    )
