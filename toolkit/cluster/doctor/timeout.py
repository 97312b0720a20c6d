"""A question that may hang, asked by a process of its own: a dead NFS server or GPU driver holds that one, which is left behind.

A thread would not do: a call that hangs in the kernel cannot be ended, and would keep the whole process from ending. A forked child
has everything imported already, so a question costs milliseconds. It must not use torch: a device's state does not survive a fork.
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
    """
    Attributes:
        value: what the question gave; only where ``problem`` is None.
        problem: it raised, or its process was ended.
        hangs: it did not answer in time.
    """

    value: Any = None
    problem: str | None = None
    hangs: bool = False


class TimedCall:
    """A question under way."""

    def __init__(self, question: Callable[[], Any], seconds: float) -> None:
        """
        Args:
            question: its value is pickled.
            seconds: from now on, after which its process is killed.
        """
        self._deadline = time.monotonic() + seconds
        self._pipe, answer = os.pipe()
        with warnings.catch_warnings():
            # Python warns of threads whose locks the child would wait for for ever: that is a question that does not answer, and told.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            os.close(self._pipe)
            _send_result(question, answer)
        os.close(answer)

    def answer(self) -> TimedResult:
        """Waits until the deadline at the latest."""
        parts: list[bytes] = []
        while select.select([self._pipe], [], [], max(0.0, self._deadline - time.monotonic()))[0]:
            part = os.read(self._pipe, 1 << 16)
            if not part:
                break
            parts.append(part)
        else:
            self._end()
            return TimedResult(hangs=True, problem="no answer")
        _, status = os.waitpid(self._pid, 0)  # it has closed its end, so it is about to be gone
        os.close(self._pipe)
        if not parts:
            return TimedResult(
                problem=f"the process that asked ended with {os.waitstatus_to_exitcode(status)}"
            )
        answer = pickle.loads(b"".join(parts))
        assert isinstance(answer, TimedResult)
        return answer

    def _end(self) -> None:
        os.close(self._pipe)
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(
                self._pid, os.WNOHANG
            )  # not waited for: one that hangs in the kernel is killed when the kernel lets go of it


def call_with_timeout(question: Callable[[], Any], seconds: float) -> TimedResult:
    return TimedCall(question, seconds).answer()


def _send_result(question: Callable[[], Any], pipe: int) -> NoReturn:
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (
            0,
            1,
            2,
        ):  # one that is left behind must not keep open what reads this command's output
            os.dup2(nowhere, stream)
        try:
            content = pickle.dumps(TimedResult(question()))
        except Exception as error:  # noqa: BLE001  a check that fails to look says so, and the others go on
            content = pickle.dumps(TimedResult(problem=f"{type(error).__name__}: {error}"))
        while content:
            content = content[os.write(pipe, content) :]
    finally:
        os._exit(0)
