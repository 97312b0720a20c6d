"""The unix socket between the standby server of a node and the ranks of torchrun's agent there.

Its name is abstract (unix(7)), so no file is left if the server is killed. It contains the agent's PID and
start time: a new worker of the agent can find it before it has read any configuration. Any process may take
or try such a name, so both ends check who the other is.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass

from toolkit.cluster.stop.stop_request import ProcessHandle

CREDENTIALS = struct.Struct("3i")  # PID, user and group: struct ucred of unix(7)
MAX_WAITING = 1024  # connections, more than one node has ranks


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a connection.

    Attributes:
        pid: 0 if it is in another PID namespace.
    """

    pid: int
    user: int

    @property
    def is_same_user(self) -> bool:
        return self.user == os.geteuid()


def find_peer(connection: socket.socket) -> Peer:
    pid, user, _ = CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    )
    return Peer(pid, user)


def listen(agent: int) -> socket.socket | None:
    """Serve the ranks of an agent; None if another process does, or if the agent has ended."""
    name = _name(agent)
    if name is None:
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(name)
        listener.listen(MAX_WAITING)
    except OSError:
        listener.close()
        return None
    return listener


def connect(agent: int, seconds: float) -> socket.socket | None:
    """Connect to the standby server of an agent, which then has ``seconds`` for each answer; None if there
    is none.
    """
    name = _name(agent)
    if name is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(seconds)
    with suppress(OSError):
        connection.connect(name)
        if find_peer(connection).is_same_user:
            return connection
    connection.close()
    return None


def _name(agent: int) -> str | None:
    process = ProcessHandle.read(agent) if sys.platform == "linux" else None
    return None if process is None else f"\0dmt-standbys-{process.pid}-{process.started}"
