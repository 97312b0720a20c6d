"""A worker of torchrun's agent that hands its place to a standby.

The agent can only wait for processes that it started itself. So the worker stays as a relay: the standby gets
its environment, arguments, folder and standard streams, and the relay passes signals on and ends as the
standby does. If there is no standby, the worker becomes the rank itself.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from toolkit.cluster.standbys.rank_assignment import (
    ASSIGN,
    ENDED,
    TAKEN,
    RankAssignment,
    receive_message,
    send_message,
)
from toolkit.cluster.standbys.standby_pool import PROCESS_NAME
from toolkit.cluster.standbys.standby_socket import connect
from toolkit.cluster.stop.stop_request import SIGNALS, process_start_time
from toolkit.cluster.world.environment import Relay
from toolkit.commands import inherited_form
from toolkit.restart_phases import RestartPhases

# The server asks the standbys one after the other, and gives each of them TAKEN_SECONDS.
ANSWER_SECONDS = 10.0
EXIT_CODE_SECONDS = 2.0  # how long the server may take to report the end of a rank


def hand_over_to_standby(arguments: Sequence[str], environ: Mapping[str, str]) -> RestartPhases | None:
    """Hand the place of this worker to a standby of torchrun's agent, if one can take it.

    This process then ends here, as the standby does.

    Returns:
        The phases of the restart so far; None if no standby server has seen one.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    agent = os.getppid()
    connection = connect(agent, ANSWER_SECONDS)
    if connection is None:
        return None
    assignment = RankAssignment(
        environ={**environ, **inherited_form()},
        arguments=arguments,
        relay=Relay(pid=os.getpid(), agent=agent, began=process_start_time()),
        folder=str(Path.cwd()),
        cores=sorted(os.sched_getaffinity(0)),
    )
    # A signal waits until there is a rank to which it can be passed on.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    phases = None
    with connection:
        try:
            send_message(connection, ASSIGN, assignment.to_json(), [0, 1, 2])
            word, content, _ = receive_message(connection)
        except OSError:  # the server died, or does not answer: a standby that it starts later is killed
            word, content = b"", None
        if word == TAKEN:
            relay(connection, content["pid"], name=environ["RANK"])
        if word and content["restart"] is not None:
            phases = RestartPhases.from_json(content["restart"])
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    return phases


def relay(connection: socket.socket, pid: int, *, name: str) -> NoReturn:
    """Pass the signals of this process on to the rank ``pid`` until it ends, and end in the same way.

    If the standby server dies, the rank is killed: its exit code would be lost.
    """
    with suppress(OSError):  # a container may mount /proc read-only
        PROCESS_NAME.write_text(f"relay-{name}")
    rank = None
    with suppress(ProcessLookupError):  # it has ended, and the server reports it
        rank = os.pidfd_open(pid)
    signals = _receive_signals()
    events = select.poll()
    for descriptor in (signals, connection.fileno(), *([] if rank is None else [rank])):
        events.register(descriptor, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in events.poll()}
        if signals in ready:
            for number in os.read(signals, 64):
                if rank is not None:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(rank, number)
        if connection.fileno() in ready or rank in ready:
            code = _receive_exit_code(connection)
            if rank is not None:
                with suppress(ProcessLookupError):  # usually: it has ended
                    signal.pidfd_send_signal(rank, signal.SIGKILL)
            _end(code)


def _receive_signals() -> int:
    """Return the descriptor from which the numbers of received signals can be read from now on."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return read


def _receive_exit_code(connection: socket.socket) -> int:
    """Return the exit code of the rank, as :class:`subprocess.Popen` has it."""
    connection.settimeout(EXIT_CODE_SECONDS)
    try:
        word, content, _ = receive_message(connection)
    except OSError:  # the server died, or is stopped
        word = b""
    return int(content["code"]) if word == ENDED else -signal.SIGKILL


def _end(code: int) -> NoReturn:
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the memory of interest is that of the rank
    with suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)
