"""Run a sink in a separate process, so that its computing, imports and waits do not slow down training.

A thread is not enough for a busy sink: Python runs one thread at a time, and each call into torch would wait
up to 5 ms to reacquire the interpreter.

The process ends with the training process, however that one dies: rows sent before are still written, and the
sink is closed as after a failure, within ``close_seconds``. It ignores the signals that end training.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import toolkit
from toolkit.errors import ExitCode
from toolkit.monitor.sink import Kind, Row, Sink
from toolkit.monitor.sinks.queued import STOP_CLOSE_SECONDS, QueuedSink

log = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
KILL_SECONDS = 10.0  # upper bound for the kernel to end a process
ANSWER_SECONDS = 1.0  # for its last message after it has given up
NICE = 19  # of the sink's process once the sink is open: training has priority
ROOT = Path(toolkit.__file__).resolve().parents[1]  # the folder on the module search path
STARTED, WARNING, ENDED = "started", "warning", "ended"  # message types sent by the process


class ProcessEnded(RuntimeError):
    """The sink's process ended; the message is the last one it sent."""


class _Detached:
    """A process that is not a child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def ended(self, seconds: float = 0.0) -> bool:
        """Wait at most ``seconds`` and return whether it has ended."""
        return bool(select.select([self._descriptor], [], [], seconds)[0])

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Wait for its end after it has finished or was killed."""
        self.ended(KILL_SECONDS)
        os.close(self._descriptor)


class SubprocessSink(Sink):
    """Each call returns when the process has read the message; a queue in that process decouples it from a
    slow sink.

    Args:
        make: creates the sink in its process; must be importable, and its ``arguments`` picklable.
        name: the sink's name in messages.
        close_seconds: how long the process may take to finish before it is killed.

    Raises:
        ProcessEnded: by any call after the sink has raised.
    """

    def __init__(
        self,
        make: Callable[..., Sink],
        arguments: Mapping[str, Any],
        name: str,
        *,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._name, self._close_seconds = name, close_seconds
        child_reads, parent_writes = os.pipe()
        parent_reads, child_writes = os.pipe()
        # removed here, because the process ends without running its exit hooks
        self._temporary = tempfile.mkdtemp(prefix="sink-")
        command = [
            sys.executable,
            "-P",
            "-m",
            __name__,
            str(child_reads),
            str(child_writes),
            str(close_seconds),
            self._temporary,
        ]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        starter = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(child_reads, child_writes),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": self._temporary},
            start_new_session=True,
        )
        os.close(child_reads)
        os.close(child_writes)
        assert starter.stdin is not None
        self._liveness_pipe = starter.stdin  # never written to; reaches end of file when this process dies
        self._requests, self._answers = (
            Connection(parent_writes, readable=False),
            Connection(parent_reads, writable=False),
        )
        self._process = _Detached(self._first_answer())
        starter.wait()
        self._send((make, dict(arguments), name, close_seconds))

    @property
    def name(self) -> str:
        return self._name

    def log(self, kind: Kind, row: Row) -> None:
        self._send(("log", (kind, dict(row))))

    def log_summary(self, name: str, value: str | float) -> None:
        self._send(("log_summary", (name, value)))

    def log_image(self, name: str, path: Path) -> None:
        self._send(("log_image", (name, path)))

    def close(self, exit_code: int) -> None:
        try:
            self._send(("close", (exit_code,)))
            deadline = time.monotonic() + self._close_seconds + ANSWER_SECONDS
            while not self._ended(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"its process did not finish within {self._close_seconds:g} s")
        finally:
            if not self._process.ended():  # it has finished, or it never will
                kill_children(self._process.pid)
                self._process.kill()
            self._process.close()
            # already removed, unless the process was killed
            shutil.rmtree(self._temporary, ignore_errors=True)
            for pipe in (self._requests, self._answers, self._liveness_pipe):
                pipe.close()

    def _first_answer(self) -> int:
        """Return the process id. Raises ProcessEnded if the process could not be started."""
        try:
            what, pid = self._answers.recv()
        except EOFError:
            raise ProcessEnded("its process could not be started") from None
        assert what == STARTED, f"{what} before the process has sent its id"
        return int(pid)

    def _send(self, message: object) -> None:
        if not self._ended(0.0):
            with suppress(BrokenPipeError):
                self._requests.send(message)
                return
        while not self._ended(None):
            pass
        raise ProcessEnded("its process ended before its work was done")

    def _ended(self, seconds: float | None) -> bool:
        """Wait for the next message and return whether the process has ended normally.

        Raises:
            ProcessEnded: it has ended with an error.
        """
        if not self._answers.poll(seconds):
            return False
        try:
            what, text = self._answers.recv()
        except EOFError:
            what, text = ENDED, "its process was killed"
        if what == WARNING:
            log.warning(text)
            return False
        if text is not None:
            raise ProcessEnded(text)
        return True


class _MessageHandler(logging.Handler):
    """Sends warnings to the training process, which logs them."""

    def __init__(self, send: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(self.format(record))


def work(requests: Connection, answers: Connection) -> None:
    """Serve requests until ``close`` or until the training process is gone; then send None or the error."""
    lock = threading.Lock()

    def send(what: str, text: str | None) -> None:
        with lock, suppress(BrokenPipeError):
            answers.send((what, text))

    error_text = None
    logging.getLogger("toolkit").addHandler(_MessageHandler(partial(send, WARNING)))
    try:
        make, arguments, name, seconds = requests.recv()
        sink = QueuedSink(
            partial(_open_sink, make, arguments),
            name,
            close_seconds=seconds,
            stop_close_seconds=min(seconds, STOP_CLOSE_SECONDS),
        )
        method = ""
        while method != "close":
            try:
                method, method_arguments = requests.recv()
            except EOFError:
                method, method_arguments = "close", (int(ExitCode.FAILURE),)
            getattr(sink, method)(*method_arguments)
    except BaseException as error:  # noqa: BLE001  the training process reports it
        error_text = f"{type(error).__name__}: {error}"
    send(ENDED, error_text)


def _open_sink(make: Callable[..., Sink], arguments: Mapping[str, Any]) -> Sink:
    """Create the sink, then lower the priority of its processes. Not before, because W&B gives up if its
    start takes long.
    """
    sink = make(**arguments)
    # each leads a process group that contains all its threads
    for group in (os.getpid(), *children(os.getpid())):
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, group, NICE)
    return sink


def kill_children(pid: int) -> None:
    """Kill the children of process ``pid``, such as W&B's service, which may be stopped or wait for a
    server.
    """
    for child in children(pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, file.read_text().split())
    return found


def _exit_after_parent(stdin: int, seconds: float, temporary: str) -> None:
    """Exit ``seconds`` after ``stdin`` reaches end of file, which happens when the training process ends."""
    os.read(stdin, 1)
    time.sleep(seconds)
    _exit_immediately(1, temporary)


def _exit_immediately(code: int, temporary: str) -> None:
    """Exit at once, without exit hooks that may block."""
    kill_children(os.getpid())
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(code)


def main(requests: str, answers: str, seconds: str, temporary: str) -> None:
    """Detach from the rank and serve the sink.

    The process must not be a descendant of the rank: DeepSpeed's launcher sends SIGTERM to all descendants on
    Ctrl-C, which would end W&B's service before the run has been saved.
    """
    if os.fork() > 0:
        os._exit(0)
    os.setsid()  # a session of its own, for its priority
    Connection(os.dup(int(answers)), readable=False).send((STARTED, os.getpid()))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_after_parent, args=(0, float(seconds), temporary), daemon=True).start()
    work(Connection(int(requests), writable=False), Connection(int(answers), readable=False))
    _exit_immediately(0, temporary)


if __name__ == "__main__":
    main(*sys.argv[1:])
