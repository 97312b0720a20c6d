"""A sink in a process of its own: what it computes, imports or waits for takes nothing from the process that trains.

A thread would not do where a sink is busy: Python runs one thread at a time, and each call into torch would wait, up to 5 ms, to get the
interpreter back.

The process ends with the one that it serves, however that one dies: what was handed over is still written, and the sink is closed as
after a failure, within ``close_seconds``. Signals are for the training; who ends that one, ends this one.
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
from toolkit.monitor.sink import Kind, NullSink, Row, Sink
from toolkit.monitor.sinks.queued import HURRY_SECONDS, QueuedSink

log = logging.getLogger(__name__)

CLOSE_SECONDS = 60.0
KILL_SECONDS = 10.0  # that the kernel takes at most to end a process
ANSWER_SECONDS = 1.0  # for its last words, when it has given up
NICE = 19  # of the sink once it is made: training comes first, also where it takes every core
ROOT = Path(toolkit.__file__).resolve().parents[1]  # where the package is found
STARTED, TOLD, ENDED = "started", "told", "ended"  # what the process says: with its number, or with words


class ProcessEnded(RuntimeError):
    """What the process said last."""


class _Detached:
    """A process that is no child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether it has, after at most ``seconds``."""
        return bool(select.select([self._descriptor], [], [], seconds)[0])

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """Wait for its end, which has been made sure of."""
        self.ended(KILL_SECONDS)
        os.close(self._descriptor)


class SubprocessSink(NullSink):
    """Each call returns when the process has the words: it reads at once, and has a queue of its own for a sink that is slow.

    Args:
        make: makes the sink, in its process; importable, as are ``arguments``.
        name: of the sink, for people.
        close_seconds: how long the process may take to finish; then it is killed.
        tell: for what the process tells.

    Raises:
        ProcessEnded: by any call, after the sink has raised.
    """

    def __init__(
        self,
        make: Callable[..., Sink],
        arguments: Mapping[str, Any],
        name: str,
        *,
        close_seconds: float = CLOSE_SECONDS,
        tell: Callable[[str], None] = log.warning,
    ) -> None:
        self._name, self._close_seconds, self._tell = name, close_seconds, tell
        theirs, ours = os.pipe()
        hears, answers = os.pipe()
        self._temporary = tempfile.mkdtemp(
            prefix="sink-"
        )  # its own: the process ends without the hooks that would tidy up
        command = [
            sys.executable,
            "-P",
            "-m",
            __name__,
            str(theirs),
            str(answers),
            str(close_seconds),
            self._temporary,
        ]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        starter = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs, answers),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": self._temporary},
            start_new_session=True,
        )
        os.close(theirs)
        os.close(answers)
        assert starter.stdin is not None
        self._life = starter.stdin  # never written to; it ends with this process
        self._requests, self._answers = Connection(ours, readable=False), Connection(hears, writable=False)
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
            if not self._process.ended():  # it has finished, or it will not
                end_children(self._process.pid)
                self._process.kill()
            self._process.close()
            shutil.rmtree(self._temporary, ignore_errors=True)  # it has, unless it was killed
            for pipe in (self._requests, self._answers, self._life):
                pipe.close()

    def _first_answer(self) -> int:
        """The number of the sink's process. Raises ProcessEnded if there is none."""
        try:
            what, pid = self._answers.recv()
        except EOFError:
            raise ProcessEnded("its process could not be started") from None
        assert what == STARTED, f"{what} before the process has said its number"
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
        """Whether the process has ended as it should, after the next thing that it says, for which this waits.

        Raises:
            ProcessEnded: it has ended otherwise.
        """
        if not self._answers.poll(seconds):
            return False
        try:
            what, words = self._answers.recv()
        except EOFError:
            what, words = ENDED, "its process was killed"
        if what == TOLD:
            self._tell(words)
            return False
        if words is not None:
            raise ProcessEnded(words)
        return True


def work(requests: Connection, answers: Connection) -> None:
    """Do what is asked until ``close``, or until nobody is left to ask; then say None, or what went wrong."""
    lock = threading.Lock()

    def say(what: str, words: str | None) -> None:
        with lock, suppress(BrokenPipeError):
            answers.send((what, words))

    said = None
    try:
        make, arguments, name, seconds = requests.recv()
        sink = QueuedSink(
            partial(_made, make, arguments),
            name,
            close_seconds=seconds,
            hurry_seconds=min(seconds, HURRY_SECONDS),
            tell=partial(say, TOLD),
        )
        asked = ""
        while asked != "close":
            try:
                asked, words = requests.recv()
            except EOFError:
                asked, words = "close", (int(ExitCode.FAILURE),)
            getattr(sink, asked)(*words)
    except BaseException as error:  # noqa: BLE001  the process that trains tells it
        said = f"{type(error).__name__}: {error}"
    say(ENDED, said)


def _made(make: Callable[..., Sink], arguments: Mapping[str, Any]) -> Sink:
    """The sink, which makes room for the training when it is there. Not before: W&B gives up where its start takes long."""
    sink = make(**arguments)
    for group in (
        os.getpid(),
        *children(os.getpid()),
    ):  # each leads a group of its own, which has all its threads
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, group, NICE)
    return sink


def end_children(pid: int) -> None:
    """Of process ``pid``: W&B's own, say, which may be stopped or wait for a server."""
    for child in children(pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, file.read_text().split())
    return found


def _end_with(stdin: int, seconds: float, temporary: str) -> None:
    """``stdin`` is never written to: it ends when the process that holds the other end does."""
    os.read(stdin, 1)
    time.sleep(seconds)
    _end(1, temporary)


def _end(code: int, temporary: str) -> None:
    """At once: hooks at the end of a process wait, and everything is said."""
    end_children(os.getpid())
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(code)


def main(requests: str, answers: str, seconds: str, temporary: str) -> None:
    """The sink is no descendant of the rank: DeepSpeed's launcher sends SIGTERM to all of those when it hears Ctrl-C, and W&B's own process
    ends of it before the run has been stopped and saved."""
    if os.fork() > 0:
        os._exit(0)
    os.setsid()  # a group of its own, for its priority
    Connection(os.dup(int(answers)), readable=False).send((STARTED, os.getpid()))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(0, float(seconds), temporary), daemon=True).start()
    work(Connection(int(requests), writable=False), Connection(int(answers), readable=False))
    _end(0, temporary)


if __name__ == "__main__":
    main(*sys.argv[1:])
