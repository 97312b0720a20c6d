"""A pool of tokenizer processes (tokenizer_worker.py), seen from the training process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.config.special_tokens import SpecialTokens
from toolkit.errors import InputError

Ints = npt.NDArray[np.int64]
# UTF-8 of all documents, concatenated, and the end of each [documents].
Texts = tuple[bytes | memoryview, Ints]
Encoded = list[npt.NDArray[Any]]  # tokens of each document, uint16 or uint32
Fetch = Callable[[], Texts]

MODULE = "toolkit.data.dataset.tokenizer_worker"


class WorkerDied(RuntimeError):
    """A tokenizer process ended unexpectedly. Not a user error: the same start may succeed."""


class TokenizerPool:
    """``count`` tokenizer processes, each served by a thread: read texts, send, receive tokens.

    A process is idle while its thread reads the next texts, which takes a hundredth of the tokenising time.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        *,
        end_of_text: int,
        dtype: np.dtype[Any],
        held_out: float,
        special_tokens: SpecialTokens,
        count: int,
    ) -> None:
        self._tasks: SimpleQueue[tuple[Fetch, Future[Encoded]] | None] = SimpleQueue()
        self._closed = False
        arguments = [str(tokenizer_file), str(end_of_text), dtype.name, str(held_out), special_tokens.name]
        self._workers = [_Worker(arguments) for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._serve, args=(worker,), name="tokenizer", daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def submit(self, fetch: Fetch) -> Future[Encoded]:
        """Tokenise the texts that ``fetch`` returns; another thread calls it.

        The future raises what ``fetch`` raises, InputError for a text that ``special_tokens`` refuses,
        WorkerDied, or CancelledError after ``close``.
        """
        future: Future[Encoded] = Future()
        if self._closed:
            future.set_exception(CancelledError())
        else:
            self._tasks.put((fetch, future))
        return future

    def check(self) -> None:
        """Raise WorkerDied if a process has ended, even if no request is pending."""
        for worker in self._workers:
            if worker.process.poll() is not None and not self._closed:
                raise WorkerDied(worker.describe_exit())

    def close(self) -> None:
        """End the processes. Pending futures raise CancelledError."""
        if self._closed:
            return
        self._closed = True
        for _ in self._workers:
            self._tasks.put(None)
        for worker in self._workers:
            worker.end()
        for thread in self._threads:
            thread.join(timeout=10)

    def _serve(self, worker: _Worker) -> None:
        """Handle requests until ``close``. If the worker died, every further request fails."""
        while (task := self._tasks.get()) is not None:
            fetch, future = task
            try:
                if self._closed:
                    raise CancelledError
                future.set_result(worker.encode(*fetch()))
            except BaseException as error:  # noqa: BLE001  it is raised by future.result()
                future.set_exception(CancelledError() if self._closed else error)


class _Worker:
    """One process and its socket."""

    def __init__(self, arguments: list[str]) -> None:
        parent_socket, worker_socket = socket.socketpair()
        # One core each: `data.dataset.workers` is their number. A new program inherits none of the parent's
        # threads.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", MODULE, str(worker_socket.fileno()), *arguments]
        self.process = subprocess.Popen(
            command, pass_fds=[worker_socket.fileno()], env=environment, stdin=subprocess.DEVNULL
        )
        worker_socket.close()
        self._pipe = Connection(parent_socket.detach())

    def encode(self, text: bytes | memoryview, ends: Ints) -> Encoded:
        try:
            self._pipe.send((bytes(text), ends))
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerDied(self.describe_exit()) from error
        if isinstance(answer, InputError):
            raise answer
        if isinstance(answer, str):
            raise RuntimeError(f"a tokenizer process failed:\n{answer}")
        tokens, lengths = answer
        return np.split(tokens, np.cumsum(lengths)[:-1])

    def end(self) -> None:
        """Kill the process. The thread that waits for its answer finds the connection closed."""
        self.process.kill()
        self.process.wait()

    def describe_exit(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return f"tokenizer process {self.process.pid} closed its connection"
        reason = (
            f"signal {-code}; if memory runs out, the kernel ends processes with signal 9"
            if code < 0
            else f"exit code {code}"
        )
        return (
            f"tokenizer process {self.process.pid} ended ({reason}). Start again to continue; "
            "data.dataset.workers sets their number"
        )
