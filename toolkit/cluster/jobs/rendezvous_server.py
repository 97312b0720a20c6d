"""Serve the rendezvous of an elastic job in a process of its own.

    python -m toolkit.cluster.jobs.rendezvous_server PORT --id=ID

torchrun's backend c10d keeps its state in a TCPStore. Usually one of the agents serves that store, and the
run ends with that agent's node. Here all agents are clients (``is_host=0``), so each of them may be lost. The
process ends with its parent process. After a SIGTERM it waits until the agents have closed the rendezvous,
because they need it to agree whether the run continues, and then ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 1.0
QUERY_SECONDS = 10  # how long a client waits for the server


def connect(endpoint: str, id: str) -> RendezvousHandler:
    """Connect to a rendezvous without joining it. Raises RendezvousError if it does not answer.

    Args:
        endpoint: HOST:PORT of the server.
        id: ``--rdzv-id`` of the agents.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    return get_rendezvous_handler(
        RendezvousParameters("c10d", endpoint, id, 1, 1, is_host="0", read_timeout=str(QUERY_SECONDS))
    )


def is_open(endpoint: str, id: str) -> bool | None:
    """Return whether agents may still start ranks; False once the run has ended; None if the rendezvous does
    not answer.
    """
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        return not connect(endpoint, id).is_closed()
    except (RendezvousError, RuntimeError):
        return None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m toolkit.cluster.jobs.rendezvous_server")
    parser.add_argument("port", type=int)
    parser.add_argument("--id", required=True)
    given = parser.parse_args(arguments)
    parent = os.getppid()
    requested = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: requested.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group

    from torch.distributed import TCPStore

    store = TCPStore(
        LOOPBACK, given.port, None, True, timedelta(seconds=QUERY_SECONDS), wait_for_workers=False
    )
    print(f"the rendezvous {given.id} is served at port {store.port}", flush=True)
    while not requested.wait(POLL_SECONDS):
        if os.getppid() != parent:
            return 0
    rendezvous = connect(f"{LOOPBACK}:{store.port}", given.id)
    while os.getppid() == parent and not rendezvous.is_closed():
        time.sleep(POLL_SECONDS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
