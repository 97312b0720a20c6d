"""Ranks that live as long as the tests: importing torch, transformers and DeepSpeed once costs more than most cells.

``pool.run(n, function, *arguments)`` calls ``function(rank, n, *arguments)`` on ``n`` of them, in a process group of their own,
and returns what each returned. A rank that fails takes the others of its group down, and the pool starts them anew.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "deepspeed", "transformers", "tests.engine.cases", "toolkit.engine.deepspeed"]


class RankFailed(AssertionError):
    """What a rank raised, or that it did not answer in time."""


class Pool:
    def __init__(self, size: int) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when the fork server imports DeepSpeed
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._members: list[tuple[Any, Connection]] = []
        self._size = size

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 120) -> list[Any]:
        assert ranks <= self._size
        while len(self._members) < ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        members = self._members[:ranks]
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(members):
                pipe.send((rank, ranks, str(Path(folder) / "store"), function, arguments))
            return self._collect([pipe for _, pipe in members], time.monotonic() + timeout_seconds)

    def close(self) -> None:
        for process, pipe in self._members:
            pipe.close()
            process.kill()
            process.join()
        self._members = []

    def _collect(self, pipes: list[Connection], deadline: float) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(pipes):
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RankFailed(f"ranks {[rank for rank in range(len(pipes)) if rank not in answers]} did not answer in time")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.index(pipe)
                try:
                    failed, answers[rank] = pipe.recv()
                except EOFError:
                    failed, answers[rank] = True, "the process died"
                if failed:
                    self.close()
                    raise RankFailed(f"rank {rank}:\n{answers[rank]}")
        return [answers[rank] for rank in range(len(pipes))]


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # torch renames its collectives; DeepSpeed calls them by the old names, a warning a call.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*deprecated")
    while True:
        try:
            rank, ranks, store, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
            answer = function(rank, ranks, *arguments)
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 - told to the test, which then ends this process
            pipe.send((True, traceback.format_exc()))
            return
        pipe.send((False, answer))
