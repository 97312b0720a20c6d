"""Worker processes for tests on this machine.

On CPU ranks communicate over gloo and are forked from a server that has imported the heavy packages once. On
GPUs they use NCCL, with one new process per GPU, because CUDA state does not survive a fork.

    with rank_pool(4) as pool:
        losses = pool.run(train_a_little, plan)                # on four ranks
        losses = pool.run(train_a_little, plan, ranks=2)       # on two of them, in their own process group
    answers = run_ranks(check_something, 2, argument)          # one call, one pool

A function is called as ``function(rank, ranks, *arguments)`` on every rank. It must be importable (not a
lambda), and its arguments and results are pickled. The server lives as long as this process, so a pool costs
milliseconds.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from toolkit.families import FAMILIES
from toolkit.plan.devices import HIDE_GPUS
from toolkit.plan.types import Device

PRELOAD = (
    "deepspeed",
    "toolkit.engine.deepspeed.engine",
    *(
        ["toolkit.engine.megatron.build"] if find_spec("megatron") else []
    ),  # an extra: DeepSpeed's cells run without it
    "toolkit.testing.parity",
    *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES),
)
# One thread per rank, because tests run more ranks than there are cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
# Without dynamo DeepSpeed starts ten times faster. GPU ranks keep it, as runs do.
ON_CPU = {**HIDE_GPUS, "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
# Transformer Engine enables TF32 in cuBLAS, which is less precise than fp32.
ON_GPU = {"NVIDIA_TF32_OVERRIDE": "0"}
GRACE_SECONDS = 1.0  # how long to wait for the other ranks' tracebacks after one failed


class RanksFailed(AssertionError):
    """The tracebacks of the ranks that raised, and the numbers of those that died or timed out."""


class RankPool:
    """``size`` ranks that wait for calls. After a failure they are killed; the next call starts others."""

    def __init__(self, size: int, device: Device = Device.CPU) -> None:
        self._size, self._device = size, device
        self._source: _RankSource = _fork_server() if device is Device.CPU else _SpawnedRanks()
        self._members: list[tuple[int, Connection]] = []

    def run(
        self, function: Callable[..., Any], *arguments: Any, ranks: int | None = None, timeout: float = 120.0
    ) -> list[Any]:
        """Call the function on the first ``ranks`` ranks (None: all), and return their results by rank.

        Raises:
            RanksFailed: a rank raised, died, or did not return within ``timeout`` seconds.
        """
        ranks = self._size if ranks is None else ranks
        assert 1 <= ranks <= self._size, f"{ranks} ranks of a pool of {self._size}"
        while len(self._members) < ranks:
            self._members.append(self._source.start())
        pipes = [pipe for _, pipe in self._members[:ranks]]
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            for rank, pipe in enumerate(pipes):
                # Pickled separately, because it can be unpickled only after sys.path is set.
                call = pickle.dumps((function, arguments))
                task = (sys.path, rank, ranks, str(Path(folder) / "store"), timeout, self._device, call)
                pipe.send_bytes(pickle.dumps(task))
            return self._collect(pipes, timeout)

    def close(self) -> None:
        for pid, pipe in self._members:
            pipe.close()
            self._source.kill(pid)
        self._members = []

    def _collect(self, pipes: list[Connection], timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(answers) + len(failures) < len(pipes):
            open_pipes = [
                pipe for rank, pipe in enumerate(pipes) if rank not in answers and rank not in failures
            ]
            ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.index(pipe)
                try:
                    raised, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    raised, answer = True, "the process died"
                (failures if raised else answers)[rank] = answer
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if len(answers) == len(pipes):
            return [answers[rank] for rank in range(len(pipes))]
        silent = [rank for rank in range(len(pipes)) if rank not in answers and rank not in failures]
        self.close()
        lines = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
        why = "were killed after that" if failures else f"did not return within {timeout:g} s"
        raise RanksFailed("\n".join(lines + ([f"ranks {silent} {why}"] if silent else [])))


@contextmanager
def rank_pool(size: int, device: Device = Device.CPU) -> Iterator[RankPool]:
    pool = RankPool(size, device)
    try:
        yield pool
    finally:
        pool.close()


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``function(rank, ranks, *arguments)`` once, on new ranks. See :meth:`RankPool.run`."""
    with rank_pool(ranks) as pool:
        return pool.run(function, *arguments, timeout=timeout)


class _RankSource(Protocol):
    """Starts ranks."""

    def start(self) -> tuple[int, Connection]:
        """Start a rank; return its process id and the pipe to it."""

    def kill(self, pid: int) -> None:
        """Kill a rank that this source started."""


class _SpawnedRanks:
    """Starts a new interpreter for each rank."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> tuple[int, Connection]:
        ours, theirs = socket.socketpair()
        process = _python(
            f"from toolkit.testing.dist import Connection, _work; _work(Connection({theirs.fileno()}))",
            theirs,
            **ON_GPU,
        )
        self._processes[process.pid] = process
        return process.pid, Connection(ours.detach())

    def kill(self, pid: int) -> None:
        process = self._processes.pop(pid)
        process.kill()
        process.wait()


class _ForkServer:
    """The client of the fork server.

    multiprocessing's forkserver exists once per process, with the packages that its first user preloaded.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = _python(
            f"from toolkit.testing.dist import _serve; _serve({theirs.fileno()})", theirs, **ON_CPU
        )
        self._socket = ours

    def start(self) -> tuple[int, Connection]:
        ours, theirs = socket.socketpair()
        socket.send_fds(self._socket, [b"start   "], [theirs.fileno()])
        theirs.close()
        answer = self._socket.recv(8, socket.MSG_WAITALL)
        assert len(answer) == 8, "the fork server died; see its output"
        return int.from_bytes(answer, "big"), Connection(ours.detach())

    def kill(self, pid: int) -> None:
        """Kill a rank through the server, which knows whether it is still its child."""
        self._socket.sendall(b"kill" + pid.to_bytes(4, "big"))


@cache
def _fork_server() -> _ForkServer:
    return _ForkServer()


def _python(code: str, keep: socket.socket, **environment: str) -> subprocess.Popen[bytes]:
    """Start an interpreter that runs ``code`` and inherits ``keep``, which this process closes."""
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(
        command,
        pass_fds=[keep.fileno()],
        env=os.environ | ENVIRONMENT | environment,
        stdin=subprocess.DEVNULL,
    )
    keep.close()
    return process


def _serve(number: int) -> None:
    """The server's loop. When the other end of the socket closes, the server kills its ranks and ends."""
    import importlib

    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()  # imported objects are never garbage, so collections in ranks skip them
    requests = socket.socket(fileno=number)
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 8, 1)
        while children:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if not ended:
                break
            children.discard(ended)
        if not message:
            break
        if message.startswith(b"kill"):
            pid = int.from_bytes(message[4:], "big")
            if pid in children:
                os.kill(pid, signal.SIGKILL)
            continue
        pid = os.fork()
        if pid == 0:
            requests.close()
            _work(Connection(descriptors[0]))
        os.close(descriptors[0])
        children.add(pid)
        requests.sendall(pid.to_bytes(8, "big"))
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _work(pipe: Connection) -> None:
    """A rank: execute calls until the other end of the pipe closes."""
    import torch

    torch.set_num_threads(1)
    # DeepSpeed calls collectives by names that torch renamed, with a warning per call.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*deprecated")
    while True:
        try:
            task = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        try:
            answer = pickle.dumps((False, _execute(task)))
        except BaseException:  # noqa: BLE001 - reported to the test, which then kills this process
            answer = pickle.dumps((True, traceback.format_exc()))
        with suppress(BrokenPipeError):  # the test timed out
            pipe.send_bytes(answer)


def _execute(task: bytes) -> Any:
    import torch
    import torch.distributed as dist

    path, rank, ranks, store, timeout, device, call = pickle.loads(task)
    sys.path[:] = path
    function, arguments = pickle.loads(call)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    backend = "gloo"
    if device is Device.CUDA:
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
    try:
        answer = function(rank, ranks, *arguments)
        dist.barrier(device_ids=[rank] if device is Device.CUDA else None)
        return answer
    finally:
        dist.destroy_process_group()
        gc.collect()  # engines are cycles that reference gloo groups, whose threads would keep running


def find_free_port() -> int:
    """Return a port of the loopback interface that no process uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
