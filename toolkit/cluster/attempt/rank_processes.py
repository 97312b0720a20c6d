"""Start the ranks of one machine as processes, signal them, wait for them and combine their exit codes."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from toolkit.cluster.attempt.oom_kills import count_oom_kills, describe_oom_kills
from toolkit.cluster.stop.stop_request import SIGNALS, StopRequest
from toolkit.cluster.world.rendezvous import bind_loopback
from toolkit.commands import inherited_form
from toolkit.errors import ExitCode
from toolkit.plan.types import World

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
# After an error of one rank the others may notice it themselves, and the rank with the actual cause may still
# write its report (observe/hang_reporter.py: at most 8 s); then they are asked to stop, then killed. After a
# death by a signal they are killed at once: they can add nothing, and a checkpoint that they are writing is
# complete or absent (checkpoint/online/commit.py).
PEER_SECONDS = 2.0
PEER_KILL_SECONDS = 8.0  # after PEER_SECONDS
KILL_SECONDS = 10.0  # after the grace period of a stop
END_SECONDS = 600.0  # after the first rank is done; rank 0 may still upload to W&B, a minute for each sink
ABORT_REAP_SECONDS = 2.0  # before the end of an aborted run is recorded
REAP_SECONDS = 30.0  # after SIGKILL; a process that then still exists waits for a device or file system
OOM_COUNT_SECONDS = 60.0  # between two counts of the OOM kills so far
COLLECTIVE_ENDS = (
    ExitCode.DONE,
    ExitCode.STOPPED,
    ExitCode.DIVERGED,
)  # all ranks end with one of these, each in its own time
CLEAN_ENDS = (*COLLECTIVE_ENDS, ExitCode.USER)  # every other code is a failure
# Some virtual machines announce AMX, but its instructions raise SIGILL. This variable limits the instructions
# of oneDNN, with which torch multiplies bf16 matrices on CPUs.
ONEDNN_ISA, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"


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

    Attributes:
        failure_times: of the first failure of a rank; None: there was none.
        stop_overdue: ranks that should stop were killed, because they did not end in time.
        end_overdue: ranks were killed, because they did not end in time after another rank ended DONE.
        stuck: describes the ranks that do not end after SIGKILL; None: there are none.
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
        self.stop_overdue = self.end_overdue = False
        self.stuck: str | None = None
        self._alive_at = time.time()
        self._first: tuple[int, int] | None = None  # rank and code of the first failure
        # whether a signal is among the first failures
        self._killed_first: bool | None = None
        # A death is compared with a count that is at least a minute old: the kernel counts a kill seconds
        # before a large process has ended.
        self._oom_counts, self._out_of_memory = deque([count_oom_kills()], maxlen=2), ""
        self._oom_counted_at = time.monotonic()
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

    def kill(self, seconds: float = REAP_SECONDS) -> None:
        """Kill all ranks and reap those that end within ``seconds``; :attr:`stuck` describes the others.

        Two threads may call it: one of them aborts this process.
        """
        left = kill_and_reap(self._processes, seconds if self.stuck is None else 0)
        self.stuck = describe_stuck(
            {rank: process.pid for rank, process in enumerate(self._processes) if process in left}
        )
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
                self._out_of_memory = describe_oom_kills(self._oom_counts[0], count_oom_kills())
        return [code for _, code in ended]

    def _count_oom_kills(self) -> None:
        """Count the OOM kills so far about once a minute, so that a death is not attributed to an old one."""
        if time.monotonic() - self._oom_counted_at > OOM_COUNT_SECONDS:
            self._oom_counts.append(count_oom_kills())
            self._oom_counted_at = time.monotonic()

    def _kill_late(self) -> None:
        """Kill the ranks that have not ended ``END_SECONDS`` after another rank ended DONE."""
        late = [str(rank) for rank, process in enumerate(self._processes) if process.poll() is None]
        self.end_overdue = True
        self.kill()
        log.warning(
            "rank %s did not end within %g s of another rank, whose work was done, and was killed",
            " and ".join(late),
            END_SECONDS,
        )

    def wait(
        self,
        stop: StopRequest,
        grace_seconds: float,
        has_started: Callable[[], bool] = lambda: True,
        on_poll: Callable[[], None] = lambda: None,
    ) -> ExitCode:
        """Wait until every rank has ended.

        After a stop request or an error the remaining ranks are stopped, and killed when the grace period is
        over. After a death by a signal they are killed at once. When one rank ends DONE, so do the others
        soon, since a run ends with a barrier; one that then hangs is killed too, and the answer is DONE. It
        is FAILURE if a killed rank does not end.

        Args:
            has_started: whether training has started; if not, there is nothing to save.
            on_poll: called every ``POLL_SECONDS``.
        """
        forwarded = False
        stopping_since: float | None = None
        failed_since: float | None = None
        done_since: float | None = None
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
            if done_since is None and ExitCode.DONE in codes:
                done_since = now
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
                if self.stuck is not None:
                    break
                continue
            done_long_ago = done_since is not None and now - done_since > END_SECONDS
            if done_long_ago and stopping_since is None and failed_since is None:
                self._kill_late()
                break
            self._count_oom_kills()
            on_poll()
            self._sleep()
        stop.wait_if_ending()  # ``abort`` has killed the ranks
        if self.stuck is not None:
            return ExitCode.FAILURE
        if self.end_overdue:
            return ExitCode.DONE
        if forwarded and ExitCode.STOPPED in codes and not has_started():
            self._first = None
            return ExitCode.STOPPED
        # A rank left alone in a collective by another rank's mistake fails too, and may end first.
        return (
            ExitCode.USER if ExitCode.USER in codes and not self._killed_first else combine_exit_codes(codes)
        )

    @property
    def rank_0_code(self) -> int | None:
        """The exit code of rank 0; None while it runs."""
        return self._processes[0].returncode

    @property
    def killed(self) -> bool:
        """Whether a signal caused the first failure."""
        return self._first is not None and self._first[1] < 0

    def first_failure(self) -> str | None:
        """Describe which rank failed first, or does not end; None if rank 0 itself can report more."""
        if self.stuck is not None:
            return self.stuck
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
            return f"rank {rank} was killed by signal {-code} ({_signal_name(-code)}){why}"
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


def kill_and_reap(
    processes: Sequence[subprocess.Popen[bytes]], seconds: float
) -> list[subprocess.Popen[bytes]]:
    """Kill processes and reap them. Return those that do not end within ``seconds`` in all.

    The kernel does not end a process that waits for a GPU which fell off the bus or for a dead file server.
    """
    for process in processes:
        if process.poll() is None:
            process.kill()
    deadline = time.monotonic() + seconds
    left = []
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            left.append(process)
    return left


def describe_stuck(pids: Mapping[int, int]) -> str | None:
    """Describe ranks that do not end, given their PIDs; None if there are none."""
    if not pids:
        return None
    ranks = " and ".join(f"rank {rank} (PID {pid})" for rank, pid in pids.items())
    does, its = ("does", "its") if len(pids) == 1 else ("do", "their")
    return (
        f"{ranks} {does} not end after SIGKILL: {its} device or file system does not respond; "
        "restart the machine"
    )


def _signal_name(number: int) -> str:
    """Return the name of a signal; Python has none for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return signal.strsignal(number) or "unknown"


def combine_exit_codes(codes: Sequence[int]) -> ExitCode:
    """Combine the exit codes of all ranks: failure, else mistake, else divergence, else stop, else done."""
    if any(code not in CLEAN_ENDS for code in codes):
        return ExitCode.FAILURE
    order = (ExitCode.USER, ExitCode.DIVERGED, ExitCode.STOPPED)
    return next((code for code in order if code in codes), ExitCode.DONE)
