"""The parent's side of the tokenizer processes."""

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
Texts = tuple[
    bytes | memoryview, Ints
]  # UTF-8 of all documents, one after another, and where each ends [documents]
Encoded = list[npt.NDArray[Any]]  # each document's tokens, uint16 or uint32
Fetch = Callable[[], Texts]

MODULE = "toolkit.data.dataset.worker"


class WorkerDied(RuntimeError):
    """No mistake of the user's: the same start may well succeed."""


class Encoders:
    """``count`` processes that tokenise. A thread each serves one of them, a request at a time: read, send, receive.

    So a process waits while its thread reads the next texts, which takes a hundredth of the time that tokenising them does.
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
        """The tokens of the texts that ``fetch`` gives; it is called by another thread.

        The future raises what ``fetch`` raises, InputError for a text that ``special_tokens`` refuses, WorkerDied, or
        CancelledError after ``close``.
        """
        future: Future[Encoded] = Future()
        if self._closed:
            future.set_exception(CancelledError())
        else:
            self._tasks.put((fetch, future))
        return future

    def check(self) -> None:
        """Raises WorkerDied where a process has ended, though nothing may be asked of it for a while."""
        for worker in self._workers:
            if worker.process.poll() is not None and not self._closed:
                raise WorkerDied(worker.how_it_ended())

    def close(self) -> None:
        """End the processes. Who waits for a future gets CancelledError."""
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
        """Until ``close``; a worker that died refuses every further request."""
        while (task := self._tasks.get()) is not None:
            fetch, future = task
            try:
                if self._closed:
                    raise CancelledError
                future.set_result(worker.encode(*fetch()))
            except BaseException as error:  # noqa: BLE001  it is raised where the tokens are used
                future.set_exception(CancelledError() if self._closed else error)


class _Worker:
    """One process, and the socket to it."""

    def __init__(self, arguments: list[str]) -> None:
        ours, theirs = socket.socketpair()
        # One core each: `data.dataset.workers` says how many. Nothing of the parent's own threads is inherited by a new program.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", MODULE, str(theirs.fileno()), *arguments]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._pipe = Connection(ours.detach())

    def encode(self, text: bytes | memoryview, ends: Ints) -> Encoded:
        try:
            self._pipe.send((bytes(text), ends))
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerDied(self.how_it_ended()) from error
        if isinstance(answer, InputError):
            raise answer
        if isinstance(answer, str):
            raise RuntimeError(f"a tokenizer process failed:\n{answer}")
        tokens, lengths = answer
        return np.split(tokens, np.cumsum(lengths)[:-1])

    def end(self) -> None:
        """The thread that waits for its answer finds the connection closed."""
        self.process.kill()
        self.process.wait()

    def how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return f"tokenizer process {self.process.pid} closed its connection"
        how = (
            f"signal {-code}; without memory the kernel ends processes by signal 9"
            if code < 0
            else f"exit code {code}"
        )
        return f"tokenizer process {self.process.pid} ended ({how}). Start again to continue; data.dataset.workers says how many there are"
