"""Run a call that may hang in a child process, which can be abandoned: an NFS server or GPU driver may block
forever.

A thread would not do, since a call that hangs in the kernel cannot be cancelled and would keep the process
alive. A forked child has everything imported, so a call costs milliseconds. It must not use torch, since
device state does not survive a fork.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True, slots=True)
class TimedResult:
    """Result of a call.

    Attributes:
        value: the return value; valid only if ``problem`` is None.
        problem: the exception, or how the process ended.
        timed_out: the call did not return in time.
    """

    value: Any = None
    problem: str | None = None
    timed_out: bool = False


class TimedCall:
    """A call in progress."""

    def __init__(self, function: Callable[[], Any], seconds: float) -> None:
        """Start the call.

        Args:
            function: the function to call; its return value is pickled.
            seconds: timeout from now, after which its process is killed.
        """
        self._deadline = time.monotonic() + seconds
        self._pipe, result = os.pipe()
        with warnings.catch_warnings():
            # Python warns that locks of other threads may deadlock the child; such a call times out and is
            # reported.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            os.close(self._pipe)
            _send_result(function, result)
        os.close(result)

    def result(self) -> TimedResult:
        """Wait for the result, until the timeout at the latest."""
        chunks: list[bytes] = []
        while select.select([self._pipe], [], [], max(0.0, self._deadline - time.monotonic()))[0]:
            chunk = os.read(self._pipe, 1 << 16)
            if not chunk:
                break
            chunks.append(chunk)
        else:
            self._end()
            return TimedResult(timed_out=True, problem="no result")
        _, status = os.waitpid(self._pid, 0)  # it has closed its end, so it is about to exit
        os.close(self._pipe)
        if not chunks:
            return TimedResult(problem=f"the child process ended with {os.waitstatus_to_exitcode(status)}")
        result = pickle.loads(b"".join(chunks))
        assert isinstance(result, TimedResult)
        return result

    def _end(self) -> None:
        os.close(self._pipe)
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            # do not wait: a process that hangs in the kernel dies only when the kernel call returns
            os.waitpid(self._pid, os.WNOHANG)


def call_with_timeout(function: Callable[[], Any], seconds: float) -> TimedResult:
    return TimedCall(function, seconds).result()


def _send_result(function: Callable[[], Any], pipe: int) -> NoReturn:
    try:
        devnull = os.open(os.devnull, os.O_RDWR)
        # an abandoned child must not keep the pipe of this command's output open
        for stream in (0, 1, 2):
            os.dup2(devnull, stream)
        try:
            content = pickle.dumps(TimedResult(function()))
        except Exception as error:  # noqa: BLE001  report a failed check and continue with the others
            content = pickle.dumps(TimedResult(problem=f"{type(error).__name__}: {error}"))
        while content:
            content = content[os.write(pipe, content) :]
    finally:
        os._exit(0)
