"""The ranks of one machine: begun, told, seen to their end, and what their exit codes say together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from toolkit.cluster.oom_kills import count_oom_kills, describe_oom_kills
from toolkit.cluster.stop_request import SIGNALS, StopRequest
from toolkit.errors import ExitCode
from toolkit.plan.types import World

POLL_SECONDS = 0.1
PEER_SECONDS = 5.0  # after one rank failed: the others find it out by themselves, or are told to stop
KILL_SECONDS = 10.0  # after that: they are killed
COLLECTIVE_ENDS = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.DIVERGED)  # all ranks end so, each in its own time
CLEAN_ENDS = (*COLLECTIVE_ENDS, ExitCode.USER)  # everything else is a failure


class RankProcesses:
    """The ranks of one machine.

    Args:
        command: the script and the handed-over start; every rank runs it with the same interpreter.
        keep: file descriptors that the ranks inherit.
    """

    def __init__(
        self,
        command: Sequence[str],
        world: World,
        environ: Mapping[str, str] = os.environ,
        keep: Sequence[int] = (),
    ) -> None:
        port = str(find_free_port())
        self._processes: list[subprocess.Popen[bytes]] = []
        self._first: tuple[int, int] | None = None  # rank and code of the first failure
        self._killed_first: bool | None = None  # whether a signal's work was among the first failures
        self._oom_kills, self._out_of_memory = count_oom_kills(), ""
        # Until a rank listens (StopRequest.install), what is sent to it waits: it would die of it, with a traceback of its imports.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            for rank in range(world.ranks):
                self._processes.append(_start_rank(command, rank, world, port, environ, keep))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    def send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """At once, and collected."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()

    def _codes(self) -> list[int]:
        """Exit codes of the ranks that have ended; the first failure among them is kept."""
        ended = [
            (rank, process.returncode)
            for rank, process in enumerate(self._processes)
            if process.poll() is not None
        ]
        bad = [code for _, code in ended if code not in COLLECTIVE_ENDS]
        if self._killed_first is None and bad:
            # A lost connection may abort a rank in C++: that is no more of a cause than the error that others make of it.
            self._killed_first = any(code < 0 and code != -signal.SIGABRT for code in bad)
        if self._first is None:  # of several in one look, a signal (negative) is the likelier cause
            self._first = min(
                (end for end in ended if end[1] not in CLEAN_ENDS), key=lambda end: end[1], default=None
            )
            if self._first is not None and self._first[1] == -signal.SIGKILL:
                self._out_of_memory = describe_oom_kills(self._oom_kills, count_oom_kills())
        return [code for _, code in ended]

    def wait(
        self, stop: StopRequest, grace_seconds: float, begun: Callable[[], bool] = lambda: True
    ) -> ExitCode:
        """Until every rank has ended; no rank outlives the others by more than the grace of a stop, or seconds after a failure.

        Args:
            begun: whether training has: else there is nothing to save, and who is left waits for a rank that has stopped.
        """
        forwarded = False
        stopping_since: float | None = None
        failed_since: float | None = None
        told = False
        while len(codes := self._codes()) < len(self._processes):
            now = time.monotonic()
            if forwarded and ExitCode.STOPPED in codes and not begun():
                self.kill()
                break
            if stop() is not None and not forwarded:
                forwarded = True
                self.send(stop.signal or signal.SIGTERM)
            if stopping_since is None and (
                forwarded or ExitCode.STOPPED in codes or ExitCode.DIVERGED in codes
            ):
                stopping_since = now
            if failed_since is None and any(code not in COLLECTIVE_ENDS for code in codes):
                failed_since = now
            if failed_since is not None and now - failed_since > PEER_SECONDS and not told:
                told = True
                self.send(signal.SIGTERM)
            out_of_grace = stopping_since is not None and now - stopping_since > grace_seconds + KILL_SECONDS
            if out_of_grace or (
                failed_since is not None and now - failed_since > PEER_SECONDS + KILL_SECONDS
            ):
                self.kill()
            time.sleep(POLL_SECONDS)
        if forwarded and ExitCode.STOPPED in codes and not begun():
            self._first = None
            return ExitCode.STOPPED
        # Whom a mistake leaves alone in a collective fails too, and may be seen to end first.
        return ExitCode.USER if ExitCode.USER in codes and not self._killed_first else combine_exit_codes(codes)

    @property
    def killed(self) -> bool:
        """Whether the first failure was a signal's work."""
        return self._first is not None and self._first[1] < 0

    def first_failure(self) -> str | None:
        """Which rank was ended by a signal, or by a failure without a word; None if rank 0 can say more itself."""
        if self._first is None:
            return None
        rank, code = self._first
        if code < 0:
            why = f": {self._out_of_memory}" if self._out_of_memory else ""
            return f"rank {rank} was ended by signal {-code} ({signal.Signals(-code).name}){why}"
        return None if rank == 0 else f"rank {rank} failed first (code {code}): see the attempt's log"


def _start_rank(
    command: Sequence[str],
    rank: int,
    world: World,
    port: str,
    environ: Mapping[str, str],
    keep: Sequence[int],
) -> subprocess.Popen[bytes]:
    own = {
        **environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world.ranks),
        "LOCAL_WORLD_SIZE": str(world.ranks_per_node),
        "LOCAL_SIZE": str(world.ranks_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    # A session of their own: Ctrl-C reaches this process alone, which passes it on once.
    return subprocess.Popen(
        [sys.executable, "-u", *command], env=own, start_new_session=True, pass_fds=tuple(keep)
    )


def combine_exit_codes(codes: Sequence[int]) -> ExitCode:
    """One exit code for all ranks: a failure, else a mistake, else a divergence, else a stop, else done."""
    if any(code not in CLEAN_ENDS for code in codes):
        return ExitCode.FAILURE
    order = (ExitCode.USER, ExitCode.DIVERGED, ExitCode.STOPPED)
    return next((code for code in order if code in codes), ExitCode.DONE)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
