"""The message that turns a standby into a rank, and how messages are sent over a unix socket.

A message is one packet: a word, and descriptors of which the first is a file in memory with JSON. The size of
an environment is therefore not limited by that of a packet.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.cluster.world.environment import Relay
from toolkit.restart_phases import RestartPhases

# between a standby and the owner of its pool
READY, ASSIGN, TAKEN = b"ready", b"assign", b"taken"
# also between the standby server and the processes of an agent: standby_server.py
REFUSED, ENDED, REFILL = b"refused", b"ended", b"refill"
WORD_BYTES = 16
MAX_DESCRIPTORS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """What a standby needs to become a rank.

    Attributes:
        environ: the environment with which the rank would have started as a new process.
        arguments: the arguments of the command.
        relay: the process whose place the standby takes; its standard streams are sent with it. None: the
            standby is itself the process that the supervisor waits for.
        folder: the working directory; None: that of the standby.
        cores: the CPU cores that the rank may use; None: those of the standby.
        restart: the phases of the restart so far, if the sender knows them.
    """

    environ: Mapping[str, str]
    arguments: Sequence[str]
    relay: Relay | None = None
    folder: str | None = None
    cores: Sequence[int] | None = None
    restart: RestartPhases | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> RankAssignment:
        relay, restart = found["relay"], found["restart"]
        return RankAssignment(
            environ=found["environ"],
            arguments=found["arguments"],
            relay=None if relay is None else Relay(**relay),
            folder=found["folder"],
            cores=found["cores"],
            restart=None if restart is None else RestartPhases.from_json(restart),
        )


def send_message(
    connection: socket.socket, word: bytes, content: Mapping[str, Any], descriptors: Sequence[int] = ()
) -> None:
    """Send ``content`` and copies of ``descriptors``. Raises OSError if the other end has gone."""
    file = os.memfd_create("message")
    try:
        with os.fdopen(os.dup(file), "w", encoding="utf-8") as text:
            json.dump(content, text)
        socket.send_fds(connection, [word], [file, *descriptors])
    finally:
        os.close(file)


def receive_message(connection: socket.socket) -> tuple[bytes, Any, list[int]]:
    """Return the word, the content and the descriptors of a message; the word is empty at the end of the
    connection, and the content is then None.

    Raises:
        OSError: the connection is broken, or nothing came within its timeout.
        ValueError: the content is not JSON.
    """
    word, received, _, _ = socket.recv_fds(connection, WORD_BYTES, MAX_DESCRIPTORS)
    if not received:
        return word, None, []
    file, *descriptors = received
    for descriptor in received:
        os.set_inheritable(descriptor, False)
    with os.fdopen(file, encoding="utf-8") as text:
        text.seek(0)  # both ends have the same position
        return word, json.load(text), descriptors
