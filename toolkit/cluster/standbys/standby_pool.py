"""Warm standby processes, which take the places of the ranks at a restart.

A restart replaces all ranks: the process groups of torch, and the global state of DeepSpeed and
Megatron-core, cannot be rebuilt reliably within a process. Most of a new rank's start are imports, so the
owner of a pool, the supervisor or torchrun's standby server, keeps standbys that have done them:

    owner                                       standby
    starts it after the first step       ->     imports, in a thread at low priority
                                         <-     ``ready``
    restart: assignment, descriptors     ->
                                         <-     ``taken``, and runs the path of every rank from its beginning

This module contains both sides. A standby has no CUDA context and no process group. It ends when the
owner does, because their socket closes. A standby that died, is stopped or is not ready is replaced by a
process that starts cold.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from toolkit.cluster.attempt.attempt_spec import AttemptSpec
from toolkit.cluster.attempt.rank_processes import REAP_SECONDS, kill_and_reap, start_process
from toolkit.cluster.standbys.rank_assignment import (
    ASSIGN,
    READY,
    TAKEN,
    RankAssignment,
    receive_message,
    send_message,
)
from toolkit.cluster.world.environment import HANDOVER, Launch
from toolkit.cluster.world.machine_info import detect_machine
from toolkit.cluster.world.process_environment import set_cuda_defaults, set_run_defaults
from toolkit.commands import inherited_form
from toolkit.config.cluster import ClusterConfig
from toolkit.plan.types import Device, RunPlan, World

log = logging.getLogger(__name__)

STANDBY = "--standby="  # option with the descriptor of a standby's socket
TAKEN_SECONDS = 2.0  # a standby that does not answer within this time is stopped or starved
LOW_PRIORITY = 19
# The kernel kills standbys first if memory runs out. A process may take back what it added itself.
OOM_SCORE, OOM_FIRST, OOM_USUAL = Path("/proc/self/oom_score_adj"), "1000", "0"
PROCESS_NAME = Path("/proc/self/comm")  # as ps shows it


# ---- in the owner


def count_standbys(cluster: ClusterConfig, world: World, *, restarts: int) -> int:
    """Return how many standbys to keep for the ranks of one machine.

    Args:
        restarts: how often failed ranks may be restarted; there are no standbys if they are not.
    """
    if not restarts:
        return 0
    if cluster.standbys is None:
        return world.ranks_per_node if world.device is Device.CUDA else 0
    return min(world.ranks_per_node, cluster.standbys)


class StandbyPool:
    """The standbys of one machine, at most one for each of its ranks, which are numbered from 0.

    Args:
        command: the script or module that every rank runs.
        count: number of standbys; lower ranks get them first.
    """

    def __init__(self, command: Sequence[str], count: int, environ: Mapping[str, str] = os.environ) -> None:
        self._command, self._count, self._environ = command, count, environ
        self._standbys: dict[int, _Standby] = {}

    def start(self, handover: Path) -> None:
        """Start the standbys that are missing.

        Args:
            handover: the attempt spec of the current attempt, from which they learn what to import.
        """
        for rank in range(self._count):
            if rank not in self._standbys:
                try:
                    self._standbys[rank] = _Standby(self._command, handover, rank, self._environ)
                except OSError as error:  # no memory, or too many processes
                    log.warning("no standby of rank %d, so a restart takes longer: %s", rank, error)
                    return

    def discard_unready(self) -> int:
        """End the standbys that could not take a rank's place now; return the number of the others."""
        unready = [rank for rank, standby in list(self._standbys.items()) if not standby.is_ready()]
        _kill([self._standbys.pop(rank) for rank in unready])
        return len(self._standbys)

    def take(
        self, rank: int, assignment: RankAssignment, descriptors: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        """Turn the standby of ``rank`` into that rank; None if there is none that can.

        Args:
            descriptors: of files of which the rank gets copies: its standard streams, if it takes the place
                of a relay, and otherwise any that it keeps open.
        """
        standby = self._standbys.pop(rank, None)
        if standby is None:
            return None
        if standby.is_ready() and standby.hand_over(assignment, descriptors):
            return standby.process
        _kill([standby])
        return None

    def kill(self) -> None:
        """End all standbys. Two threads may call it: one of them aborts this process."""
        standbys = []
        while self._standbys:
            with suppress(KeyError):  # the other thread took the last one
                standbys.append(self._standbys.popitem()[1])
        _kill(standbys)


class _Standby:
    def __init__(self, command: Sequence[str], handover: Path, rank: int, environ: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready = False
        with theirs:
            # RANK as well, since a script of the user may read it before it calls the command
            self.process = start_process(
                [*command, f"{HANDOVER}{handover}", f"{STANDBY}{theirs.fileno()}"],
                {**environ, **inherited_form(), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                keep=[theirs.fileno()],
            )

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            return False
        with suppress(BlockingIOError, ConnectionError):
            self._ready = self._ready or self._socket.recv(len(READY), socket.MSG_DONTWAIT) == READY
        return self._ready

    def hand_over(self, assignment: RankAssignment, descriptors: Sequence[int]) -> bool:
        """Send what makes the standby a rank; return whether it answers."""
        self._socket.settimeout(TAKEN_SECONDS)
        try:
            send_message(self._socket, ASSIGN, assignment.to_json(), descriptors)
            taken = self._socket.recv(len(TAKEN)) == TAKEN
        except OSError:  # it died, or does not answer in time
            return False
        self._socket.close()
        return taken

    def close(self) -> None:
        self._socket.close()


def _kill(standbys: Sequence[_Standby]) -> None:
    """Kill standbys and reap them. One whose file system does not respond is left behind."""
    for process in kill_and_reap([standby.process for standby in standbys], REAP_SECONDS):
        log.warning("the standby with PID %d does not end after SIGKILL", process.pid)
    for standby in standbys:
        standby.close()


# ---- in the standby


def is_standby(arguments: Sequence[str]) -> bool:
    return any(word.startswith(STANDBY) for word in arguments)


def wait_for_rank(arguments: Sequence[str], warm_up: Callable[[RunPlan], None]) -> RankAssignment:
    """Prepare this process to be a rank, wait until it is needed, and return its assignment.

    The assignment's environment, arguments, streams, folder and cores have then been applied to this process.

    The process ends here if the owner of the pool does, or if ``warm_up`` fails: a rank that starts cold
    would fail in the same way and report it.

    Args:
        warm_up: imports what the ranks of a plan need.
    """
    options = {word.partition("=")[0] + "=": word.partition("=")[2] for word in arguments}
    connection = socket.socket(fileno=int(options[STANDBY]))
    connection.set_inheritable(False)
    assignments: queue.SimpleQueue[tuple[RankAssignment, list[int]]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, assignments), name="standby", daemon=True).start()
    rank = os.environ["RANK"]
    with suppress(OSError):  # a container may mount /proc read-only
        PROCESS_NAME.write_text(f"warm-up-{rank}")
        OOM_SCORE.write_text(OOM_FIRST)
    # The first call writes a file and removes it. At low priority this takes long enough for a kill to come
    # in between.
    tempfile.gettempdir()
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    with _silent_output():
        imported, error = _call_at_low_priority(lambda: _warm_up(Path(options[HANDOVER]), warm_up))
    if imported is None:
        print(f"the standby of rank {rank} could not start: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    with suppress(OSError):
        PROCESS_NAME.write_text(f"standby-{rank}")
    with suppress(ConnectionError):  # the owner has ended, and the receiving thread ends this process
        connection.send(READY)
    assignment, descriptors = assignments.get()
    os.environ.clear()
    os.environ.update({**assignment.environ, **imported})
    sys.argv[1:] = assignment.arguments
    if assignment.relay is not None:
        _take_streams(descriptors)
    if assignment.folder is not None:
        os.chdir(assignment.folder)
    with suppress(OSError):
        PROCESS_NAME.write_text(f"rank-{os.environ['RANK']}")
        OOM_SCORE.write_text(OOM_USUAL)
    _restore_scheduling(priority, assignment.cores)
    return assignment


def _receive(
    connection: socket.socket, assignments: queue.SimpleQueue[tuple[RankAssignment, list[int]]]
) -> None:
    """Wait for the assignment to become a rank, also during the imports."""
    word = b""  # as at the end of the connection
    with suppress(ConnectionError):  # the owner was killed and has not read READY
        word, content, descriptors = receive_message(connection)
    if not word:
        os._exit(0)
    assignments.put((RankAssignment.from_json(content), descriptors))
    with suppress(OSError):  # the owner has ended: the rank notices
        connection.send(TAKEN)


def _warm_up(handover: Path, warm_up: Callable[[RunPlan], None]) -> dict[str, str]:
    """Do what a rank does until it connects to the others, except that ``warm_up`` imports everything.

    Returns:
        The environment variables that the imported libraries have set for themselves.
    """
    plan = AttemptSpec.read(handover).plan()
    set_cuda_defaults(os.environ, plan)
    set_run_defaults(os.environ, Launch(), plan, detect_machine())
    before = dict(os.environ)
    warm_up(plan)
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def _take_streams(descriptors: Sequence[int]) -> None:
    """Replace the standard streams by those of the relay."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _call_at_low_priority(work: Callable[[], dict[str, str]]) -> tuple[dict[str, str] | None, str]:
    """Call ``work`` in a thread at low priority. Return its result, or None and the traceback of its error.

    Linux has a priority for each thread. The main thread keeps the usual one, because only a privileged
    process may raise a priority again.
    """
    results: list[dict[str, str]] = []
    errors: list[str] = []

    def call() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        try:
            results.append(work())
        except BaseException:  # noqa: BLE001  the caller reports it
            errors.append(traceback.format_exc())

    thread = threading.Thread(target=call, name="warm-up")
    thread.start()
    thread.join()
    return (None, errors[0]) if errors else (results[0], "")


def _restore_scheduling(priority: int, cores: Sequence[int] | None) -> None:
    """Restore the priority of threads that libraries started during the imports, as far as it is allowed, and
    bind all threads to ``cores``.
    """
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(task.name), priority)
        if cores is not None:
            with suppress(OSError):  # the thread has ended
                os.sched_setaffinity(int(task.name), cores)


@contextmanager
def _silent_output() -> Iterator[None]:
    """Discard what libraries print while they are imported: the ranks have printed it."""
    saved = [os.dup(number) for number in (1, 2)]
    with Path(os.devnull).open("wb") as nothing:
        for number in (1, 2):
            os.dup2(nothing.fileno(), number)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)
