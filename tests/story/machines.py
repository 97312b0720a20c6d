"""Two machines for one job: network namespaces with separate mounts if possible, else two launchers on
loopback.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import psutil

from tests.cluster.simulated_nodes import BIN, OnNode, TwoNodes, missing, two_nodes, wait_for
from tests.data.local_stores import Store, environment
from tests.launch.processes import RunningCommand
from tests.story.steps import Story
from toolkit.testing.dist import find_free_port

PORT, STORE_PORT = 29500, 9000  # used only inside the namespaces
ENDED_SECONDS = 60.0  # time in which both commands end after a rank was killed


class Command(Protocol):
    """A running launcher."""

    @property
    def output(self) -> str: ...
    def code(self) -> int | None: ...


class OnLoopback(RunningCommand):
    def code(self) -> int | None:
        return self.process.poll()


class Machines:
    """Where the nodes of the job run.

    Attributes:
        what: description for users.
        shared: the folder that both nodes write to.
    """

    def __init__(self, story: Story, store: Store, stack: ExitStack) -> None:
        self._story, self._stack = story, stack
        self._nodes: TwoNodes | None = None
        folder = story.folder / "machines"
        folder.mkdir()
        if (why := missing()) is None:
            self._nodes = nodes = stack.enter_context(two_nodes(folder))
            self.shared, self.address, self._port = nodes.shared, nodes[0].address, PORT
            self.what = "two network namespaces, each with its own disk"
            served = environment(Store(store.root, address=self.address, port=STORE_PORT))
            self._environ = story.environ | served | {"XDG_CACHE_HOME": str(nodes.here / "cache")}
            serving = nodes[0].start(
                [
                    sys.executable,
                    "-m",
                    "tests.data.local_stores",
                    str(store.root),
                    f"--address={self.address}",
                    f"--port={STORE_PORT}",
                ],
                folder / "store.txt",
            )
            stack.enter_context(serving)
            wait_for(lambda: store.s3 in serving.output, 20, "serving", serving)
        else:
            self.shared, self.address, self._port = folder, "127.0.0.1", find_free_port()
            self.what = f"two launchers on loopback ({why})"
            self._environ = story.environ

    def start(self, number: int, script: Path, *words: str) -> Command:
        """Return the command for that machine."""
        hosts = self.shared / "hostfile"
        hosts.write_text("node0 slots=1\nnode1 slots=1\n")
        argv = [
            str(BIN / "deepspeed"),
            "--no_ssh",
            f"--node_rank={number}",
            f"--master_addr={self.address}",
            f"--master_port={self._port}",
            f"--hostfile={hosts}",
            str(script),
            *words,
        ]
        self._story.typed(argv, f"node{number}")
        log = self._story.folder / "log" / f"node{number}"
        log.mkdir(parents=True)
        if self._nodes is not None:
            found: OnNode | OnLoopback = self._nodes[number].start(argv, log / "output.txt", self._environ)
        else:
            found = OnLoopback(argv, self.shared, cwd=log, environ=self._environ)
        return self._stack.enter_context(found)

    def rank(self, commands: list[Command], number: int) -> psutil.Process | None:
        """Return a rank's process; None: not there yet."""
        if self._nodes is not None:
            return self._nodes[number].ranks().get(number)
        first = commands[0]
        assert isinstance(first, OnLoopback)
        return first.ranks().get(number)


@contextmanager
def two_machines(story: Story, store: Store) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(story, store, stack)
