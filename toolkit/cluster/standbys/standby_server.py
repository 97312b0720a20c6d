"""Standbys under torchrun: one server per node, which survives the ranks.

    torchrun's agent            standby server                 standby
      starts workers
      worker 0: first step  ->  starts standbys            ->  imports
      a worker fails, and the agent ends the others and starts new ones
      worker: assignment    ->  passes it on               ->  becomes the rank
      worker stays as relay <-  exit code                  <-  ends

The first rank of a node starts the server after its first step. The server owns a :class:`StandbyPool`, as
the supervisor of plain python does, and is the parent of the ranks that were standbys. When the agent ends,
the server ends the standbys at once; it waits for the ranks, which also notice the end of the agent, save and
stop. If a worker that became a relay dies, the server kills its rank. If the server dies, the relays kill
their ranks, and the agent restarts them without standbys.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.cluster.attempt.attempt_spec import AttemptSpec
from toolkit.cluster.attempt.rank_processes import start_process
from toolkit.cluster.standbys.rank_assignment import (
    ASSIGN,
    ENDED,
    REFILL,
    REFUSED,
    TAKEN,
    RankAssignment,
    receive_message,
    send_message,
)
from toolkit.cluster.standbys.standby_pool import PROCESS_NAME, StandbyPool, count_standbys
from toolkit.cluster.standbys.standby_socket import connect, find_peer, listen
from toolkit.cluster.stop.stop_request import parent_pid
from toolkit.cluster.world.environment import Launch, Launcher
from toolkit.config.cluster import ClusterConfig
from toolkit.plan.types import World
from toolkit.restart_phases import RestartPhase, RestartPhases
from toolkit.rundir.directory import RunDirectory

log = logging.getLogger(__name__)

MODULE = "toolkit.cluster.standbys.standby_server"
FIRST_STEP_POLL_SECONDS = 0.5
MESSAGE_SECONDS = 2.0  # for a message of a process that has connected


# ---- in the ranks


def count_standbys_of_launch(cluster: ClusterConfig, world: World, launch: Launch) -> int:
    """Return how many standbys this rank has to start: the first rank of a node starts them for all."""
    if launch.launcher is not Launcher.TORCHELASTIC or launch.local_rank != 0:
        return 0
    # The ranks of an elastic run are also restarted when a node joins or leaves, which is not counted.
    restarts = launch.restarts_left if launch.node_range is None else 1
    return count_standbys(cluster, world, restarts=restarts)


def start_standbys_after_first_step(
    command: Sequence[str],
    count: int,
    launch: Launch,
    spec: AttemptSpec,
    directory: RunDirectory,
    environ: Mapping[str, str],
) -> None:
    """Start the standbys of this node, or those that are missing, once this attempt has done a step.

    Args:
        command: the script or module that every rank runs.
        environ: the environment with which this rank was started.
    """

    def start() -> None:
        while not directory.has_stepped(spec.attempt):
            time.sleep(FIRST_STEP_POLL_SECONDS)
        handover = directory.attempt_folder(spec.attempt).absolute() / f"standbys-{launch.node}.json"
        try:
            spec.write(handover)
            server = _refill_or_start(command, count, launch.launcher_pid, handover, environ)
        except OSError as error:  # a full disk, no memory, or too many processes
            log.warning("no standbys on node %d, so a restart takes longer: %s", launch.node, error)
            return
        if server is not None:
            server.wait()

    threading.Thread(target=start, name="standbys", daemon=True).start()


def _refill_or_start(
    command: Sequence[str], count: int, agent: int, handover: Path, environ: Mapping[str, str]
) -> subprocess.Popen[bytes] | None:
    """Let the server of this node start the standbys that are missing, or return a new server."""
    connection = connect(agent, MESSAGE_SECONDS)
    if connection is not None:
        with connection:
            send_message(connection, REFILL, {"handover": str(handover)})
        return None
    options = [f"--agent={agent}", f"--count={count}", f"--handover={handover}"]
    own = {name: value for name, value in environ.items() if name not in ("RANK", "LOCAL_RANK")}
    return start_process(["-m", MODULE, *options, "--", *command], own)


# ---- the server


def phases_before_start(
    ends: Sequence[float], began: float, *, ranks: int, standbys: int
) -> RestartPhases | None:
    """Return the phases of a restart by torchrun before its first worker ``began``; None if it is no restart.

    The agent does not publish when it notices a failure, so :attr:`RestartPhase.STOP` contains it.

    Args:
        ends: when the workers of the earlier attempt ended, in seconds since 1970.
        ranks, standbys: of the new attempt on this node.
    """
    if not ends:
        return None
    phases = RestartPhases(min(ends), ranks=ranks, standbys=standbys)
    return phases.ended(RestartPhase.STOP, max(ends)).ended(RestartPhase.PREPARE, began)


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank that was a standby, and the connection to its relay."""

    process: subprocess.Popen[bytes]
    pidfd: int
    connection: socket.socket


class StandbyServer:
    """Keeps the standbys of one node, and hands them to the workers of an agent.

    Args:
        agent: PID of torchrun's agent.
    """

    def __init__(self, agent: int, pool: StandbyPool, listener: socket.socket) -> None:
        self._agent, self._pool, self._listener = agent, pool, listener
        self._ranks: dict[int, _Rank] = {}  # by PID
        self._workers: list[int] = []  # pidfds of the agent's workers that have not ended
        self._worker_ends: list[float] = []  # times at which its other workers ended
        self._restart: RestartPhases | None = None
        self._serving = True
        self._events = selectors.DefaultSelector()
        self._agent_pidfd = os.pidfd_open(agent)
        self._watch(self._agent_pidfd, self._agent_ended)
        self._watch(listener, self._accept)

    def run(self, handover: Path) -> None:
        """Start the standbys, and serve until the agent and all ranks have ended."""
        self._refill(handover)
        while self._serving or self._ranks:
            events = self._events.select()
            self._note_ended_workers()  # before their successors, which may have connected in the meantime
            for key, _ in events:
                if self._events.get_map().get(key.fd) is key:  # no earlier event has ended it
                    key.data()

    def _watch(self, file: int | socket.socket, react: Callable[[], None]) -> None:
        self._events.register(file, selectors.EVENT_READ, react)

    def _agent_ended(self) -> None:
        """End the standbys. The ranks notice as well that the agent has ended, save and stop."""
        self._serving = False
        self._forget_workers()
        self._events.unregister(self._agent_pidfd)
        self._events.unregister(self._listener)
        self._listener.close()
        self._pool.kill()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(MESSAGE_SECONDS)
        peer = find_peer(connection)
        is_ours = parent_pid(peer.pid) == self._agent or peer.pid in self._ranks
        taken = False
        with suppress(OSError):  # the other end has gone, or does not answer
            if peer.is_same_user and is_ours:
                word, content, descriptors = receive_message(connection)
                if word == REFILL:
                    self._refill(Path(content["handover"]))
                elif word == ASSIGN:
                    try:
                        taken = self._take(connection, RankAssignment.from_json(content), descriptors)
                    finally:
                        for descriptor in descriptors:
                            os.close(descriptor)
        if not taken:
            connection.close()

    def _refill(self, handover: Path) -> None:
        """Start the standbys that are missing, and note which workers belong to the attempt."""
        import psutil

        self._forget_workers()
        self._worker_ends, self._restart = [], None
        with suppress(psutil.NoSuchProcess):  # the agent ends
            for worker in psutil.Process(self._agent).children():
                with suppress(psutil.Error, ProcessLookupError):
                    if "LOCAL_RANK" in worker.environ():
                        pidfd = os.pidfd_open(worker.pid)
                        self._workers.append(pidfd)
                        self._watch(pidfd, lambda: None)  # _note_ended_workers has done it
        self._pool.start(handover)

    def _note_ended_workers(self) -> None:
        ended = select.poll()
        for worker in self._workers:
            ended.register(worker, select.POLLIN)
        for worker, _ in ended.poll(0):
            self._worker_ends.append(time.time())
            self._workers.remove(worker)
            self._events.unregister(worker)
            os.close(worker)

    def _forget_workers(self) -> None:
        while self._workers:
            worker = self._workers.pop()
            self._events.unregister(worker)
            os.close(worker)

    def _take(
        self, connection: socket.socket, assignment: RankAssignment, descriptors: Sequence[int]
    ) -> bool:
        """Let a standby take the place of a worker; return whether one does."""
        assert assignment.relay is not None
        if self._restart is None:
            self._restart = phases_before_start(
                self._worker_ends,
                assignment.relay.began,
                ranks=int(assignment.environ["LOCAL_WORLD_SIZE"]),
                standbys=self._pool.discard_unready(),
            )
        if _has_hung_up(connection):  # it has waited for too long, and started without a standby
            return False
        assignment = replace(assignment, restart=self._restart)
        process = self._pool.take(int(assignment.environ["LOCAL_RANK"]), assignment, descriptors)
        if process is None:
            send_message(connection, REFUSED, {"restart": assignment.to_json()["restart"]})
            return False
        rank = _Rank(process, os.pidfd_open(process.pid), connection)
        self._ranks[process.pid] = rank
        self._watch(rank.pidfd, lambda: self._rank_ended(rank))
        self._watch(connection, lambda: self._relay_ended(rank))
        with suppress(OSError):  # the relay has ended, which is the next event
            send_message(connection, TAKEN, {"pid": process.pid})
        return True

    def _rank_ended(self, rank: _Rank) -> None:
        code = rank.process.wait()
        del self._ranks[rank.process.pid]
        self._events.unregister(rank.pidfd)
        os.close(rank.pidfd)
        with suppress(KeyError):  # the relay ended first
            self._events.unregister(rank.connection)
        with suppress(OSError):
            send_message(rank.connection, ENDED, {"code": code})
        rank.connection.close()

    def _relay_ended(self, rank: _Rank) -> None:
        """Kill a rank for which no process answers to the agent any more. A relay sends no second message."""
        self._events.unregister(rank.connection)
        rank.process.kill()


def _has_hung_up(connection: socket.socket) -> bool:
    state = select.poll()
    state.register(connection, 0)
    return bool(state.poll(0))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--agent", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--handover", type=Path, required=True)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    with suppress(OSError):  # a container may mount /proc read-only
        PROCESS_NAME.write_text("standby_server")
    listener = listen(given.agent)
    if listener is None:  # the agent has ended, or its node has a server
        return 0
    with suppress(ProcessLookupError):  # the agent has ended just now
        StandbyServer(given.agent, StandbyPool(given.command, given.count), listener).run(given.handover)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
