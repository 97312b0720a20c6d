"""Start the ranks of one machine as processes, signal them, wait for them and combine their exit codes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.stop.stop_request import SIGNALS, StopRequest
from toolkit.cluster.world.rendezvous import bind_loopback
from toolkit.commands import inherited_form
from toolkit.errors import ExitCode
from toolkit.plan.types import World

POLL_SECONDS = 0.1
# After an error of one rank the others may notice it themselves, and the rank with the actual cause may still
# write its report (observe/hang_reporter.py: at most 8 s); then they are asked to stop, then killed. After a
# death by a signal they are killed at once: they can add nothing, and a checkpoint that they are writing is
# complete or absent (checkpoint/online/commit.py).
PEER_SECONDS = 2.0
PEER_KILL_SECONDS = 8.0  # after PEER_SECONDS
KILL_SECONDS = 10.0  # after the grace period of a stop
COLLECTIVE_ENDS = (
    ExitCode.DONE,
    ExitCode.STOPPED,
    ExitCode.DIVERGED,
)  # all ranks end with one of these, each in its own time
CLEAN_ENDS = (*COLLECTIVE_ENDS, ExitCode.USER)  # every other code is a failure
# Some virtual machines announce AMX, but its instructions raise SIGILL. This variable limits the instructions
# of oneDNN, with which torch multiplies bf16 matrices on CPUs.
ONEDNN_ISA, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class FailureTimes:
    """When the first failure of a rank was noticed, in seconds since 1970.

    Attributes:
        alive: when all ranks were last seen alive.
        noticed: when the first failure was seen, at most ``POLL_SECONDS`` later unless this process was not
            running.
    """

    alive: float
    noticed: float


class RankProcesses:
    """The rank processes of one machine.

    Args:
        command: the script or module and its handover option; every rank runs it with this interpreter.
        keep: file descriptors that the ranks inherit.
        take_standby: returns a warm process that becomes the rank with this environment, or None to start a
            new process (``cluster/standbys``).
    """

    def __init__(
        self,
        command: Sequence[str],
        world: World,
        environ: Mapping[str, str] = os.environ,
        keep: Sequence[int] = (),
        take_standby: Callable[[int, Mapping[str, str]], subprocess.Popen[bytes] | None] = (
            lambda rank, environ: None
        ),
    ) -> None:
        self._reserved_port = bind_loopback()  # until rank 0, which first imports torch, listens there
        port = str(self._reserved_port.getsockname()[1])
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pidfds: dict[int, int] = {}  # of the ranks that have not ended
        self.failure_times: FailureTimes | None = None
        self.stop_overdue = False  # ranks that should stop were killed, because they did not end in time
        self._alive_at = time.time()
        self._first: tuple[int, int] | None = None  # rank and code of the first failure
        # whether a signal is among the first failures
        self._killed_first: bool | None = None
        self._oom_kills, self._out_of_memory = count_oom_kills(), ""
        try:
            for rank in range(world.ranks):
                own = {**environ, **inherited_form(), **rank_variables(rank, world, port)}
                process = take_standby(rank, own)
                if process is None:
                    process = start_process(command, own, keep)
                self._processes.append(process)
                with suppress(AttributeError, OSError):  # before Linux 5.3 the ends are polled
                    self._pidfds[rank] = os.pidfd_open(process.pid)
        except BaseException:  # no memory, or too many processes: the others would wait for this rank
            self.kill()
            raise

    def send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """Kill all ranks and reap them. Two threads may call it: one of them aborts this process."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        self._reserved_port.close()
        while self._pidfds:
            with suppress(KeyError):  # the other thread took the last one
                os.close(self._pidfds.popitem()[1])

    def _sleep(self) -> None:
        """Sleep until a rank ends, at most ``POLL_SECONDS``."""
        ends = select.poll()
        for rank, descriptor in list(self._pidfds.items()):
            if self._processes[rank].returncode is None:
                ends.register(descriptor, select.POLLIN)
        ends.poll(POLL_SECONDS * 1000)

    def _codes(self) -> list[int]:
        """Return the exit codes of the ranks that have ended, and remember the first failure."""
        ended = [
            (rank, process.returncode)
            for rank, process in enumerate(self._processes)
            if process.poll() is not None
        ]
        now, alive = time.time(), self._alive_at
        self._alive_at = now
        failures = [code for _, code in ended if code not in COLLECTIVE_ENDS]
        if self._killed_first is None and failures:
            self.failure_times = FailureTimes(alive, now)
            # A lost connection may abort a rank in C++ code, which is a consequence like other ranks' errors.
            self._killed_first = any(code < 0 and code != -signal.SIGABRT for code in failures)
        if self._first is None:  # of several at once, a signal (negative code) is the likelier cause
            self._first = min(
                (end for end in ended if end[1] not in CLEAN_ENDS), key=lambda end: end[1], default=None
            )
            if self._first is not None and self._first[1] == -signal.SIGKILL:
                self._out_of_memory = describe_oom_kills(self._oom_kills, count_oom_kills())
        return [code for _, code in ended]

    def wait(
        self,
        stop: StopRequest,
        grace_seconds: float,
        has_started: Callable[[], bool] = lambda: True,
        on_poll: Callable[[], None] = lambda: None,
    ) -> ExitCode:
        """Wait until every rank has ended.

        After a stop request or an error the remaining ranks are stopped, and killed when the grace period is
        over. After a death by a signal they are killed at once.

        Args:
            has_started: whether training has started; if not, there is nothing to save.
            on_poll: called every ``POLL_SECONDS``.
        """
        forwarded = False
        stopping_since: float | None = None
        failed_since: float | None = None
        asked_to_stop = False
        while len(codes := self._codes()) < len(self._processes):
            now = time.monotonic()
            if forwarded and ExitCode.STOPPED in codes and not has_started():
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
            if failed_since is not None and now - failed_since > PEER_SECONDS and not asked_to_stop:
                asked_to_stop = True
                self.send(signal.SIGTERM)
            out_of_grace = stopping_since is not None and now - stopping_since > grace_seconds + KILL_SECONDS
            failed_long_ago = (
                failed_since is not None and now - failed_since > PEER_SECONDS + PEER_KILL_SECONDS
            )
            if self._killed_first or out_of_grace or failed_long_ago:
                self.stop_overdue = failed_since is None
                self.kill()
                continue
            on_poll()
            self._sleep()
        stop.wait_if_ending()  # ``abort`` has killed the ranks
        if forwarded and ExitCode.STOPPED in codes and not has_started():
            self._first = None
            return ExitCode.STOPPED
        # A rank left alone in a collective by another rank's mistake fails too, and may end first.
        return (
            ExitCode.USER if ExitCode.USER in codes and not self._killed_first else combine_exit_codes(codes)
        )

    @property
    def killed(self) -> bool:
        """Whether a signal caused the first failure."""
        return self._first is not None and self._first[1] < 0

    def first_failure(self) -> str | None:
        """Describe which rank failed first; None if rank 0 itself can report more."""
        if self._first is None:
            return None
        rank, code = self._first
        if self.stop_overdue:
            return f"rank {rank} did not end in time after the stop and was killed (cluster.grace_seconds)"
        if code < 0:
            why = f": {self._out_of_memory}" if self._out_of_memory else ""
            if code == -signal.SIGILL:
                why = (
                    ": the CPU does not execute an instruction that it announces; if it is one of AMX, "
                    f"{ONEDNN_ISA}={WITHOUT_AMX} avoids it"
                )
            return f"rank {rank} was killed by signal {-code} ({signal.Signals(-code).name}){why}"
        return None if rank == 0 else f"rank {rank} failed first (code {code}): see the attempt's log"


def rank_variables(rank: int, world: World, port: str) -> dict[str, str]:
    """Return the environment variables that make a process a rank of this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world.ranks),
        "LOCAL_WORLD_SIZE": str(world.ranks_per_node),
        "LOCAL_SIZE": str(world.ranks_per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def start_process(
    command: Sequence[str], environ: Mapping[str, str], keep: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start this interpreter with ``command`` in a session of its own, and with signals blocked.

    Ctrl-C reaches only this process, which forwards it once. Signals are blocked until the rank handles them
    (``StopRequest.install``); otherwise one would kill it during its imports.
    """
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-u", *command], env=environ, start_new_session=True, pass_fds=tuple(keep)
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def combine_exit_codes(codes: Sequence[int]) -> ExitCode:
    """Combine the exit codes of all ranks: failure, else mistake, else divergence, else stop, else done."""
    if any(code not in CLEAN_ENDS for code in codes):
        return ExitCode.FAILURE
    order = (ExitCode.USER, ExitCode.DIVERGED, ExitCode.STOPPED)
    return next((code for code in order if code in codes), ExitCode.DONE)


def count_oom_kills(root: Path = Path("/")) -> dict[str, int]:
    """Return the number of OOM kills so far by counting file. Missing and unreadable files are skipped."""
    kills = {}
    for path in _oom_counter_files(root):
        try:
            lines = path.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        counts = [
            fields[1]
            for fields in map(str.split, lines)
            if len(fields) == 2 and fields[0] == "oom_kill" and fields[1].isdigit()
        ]
        if counts:
            kills[str(path)] = int(counts[0])
    return kills


def describe_oom_kills(before: dict[str, int], now: dict[str, int]) -> str:
    """Describe the kills between two counts; empty if there were none."""
    for path, count in now.items():
        killed = count - before.get(path, count)
        if killed > 0:
            where = "on this machine" if path.endswith("vmstat") else "in its container or job"
            return (
                f"out of host memory: the kernel killed {killed} process{'es' * (killed > 1)} {where} "
                f"(oom_kill of {path})"
            )
    return ""


def _oom_counter_files(root: Path) -> Iterator[Path]:
    """Yield the files that count OOM kills since the system or cgroup started, nearest to this process first.

    They are memory.events of cgroup v2 (Documentation/admin-guide/cgroup-v2.rst), memory.oom_control of v1,
    and /proc/vmstat for the whole machine.
    """
    groups = root / CGROUPS.relative_to("/")
    own = root / "proc/self/cgroup"
    for line in own.read_text(encoding="utf-8", errors="replace").splitlines() if own.exists() else []:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield groups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / "memory" / path.lstrip("/") / "memory.oom_control"
    yield groups / "memory.events"
    yield groups / "memory/memory.oom_control"
    yield root / "proc/vmstat"
