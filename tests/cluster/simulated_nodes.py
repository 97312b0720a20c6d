"""Simulate two machines with namespaces for network, mounts, processes and host names, joined by a virtual
cable.

    with two_nodes(tmp_path) as nodes: with nodes[0].start(argv) as first, nodes[1].start(argv) as second: ...
    nodes.cable(up=False)

Each node has its own addresses, host name, PIDs, ``/dev/shm`` and disk (``nodes.here``, which is a different
folder on each node and the working directory of its processes). Everything else is read-only, except for the
shared folder ``nodes.shared``. Names do not resolve, so nodes are addressed by IP. The kernel removes a node
with its first process, which dies with the tests. Needs Linux, root, iproute2 and util-linux (``ip``,
``unshare``, ``nsenter``, ``setpriv``).
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until

PORT = 29400  # interfaces of namespaces only
ENVIRON = {"TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cpu"}

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ADDRESSES = ("10.213.0.1", "10.213.0.2")  # used only inside the namespaces
READY = "ready"
SET_UP_SECONDS = 20.0
NAMESPACES = "--net --mount --uts --ipc --pid"
FIRST_PROCESS = (
    f"setpriv --pdeathsig=KILL unshare {NAMESPACES} --fork --kill-child --mount-proc sh -c".split()
)

# The first process of a node. Mounts in its namespace are not visible outside.
_FIRST = """
set -e
hostname "$1"
mount -t tmpfs tmpfs "$2"
mount --bind "$3" "$3"
mount -t tmpfs tmpfs /dev/shm
for place in / /tmp /var/tmp /home /root; do
  if mountpoint -q "$place"; then mount -o remount,bind,ro "$place"; fi
done
ip link set lo up
echo ready
exec sleep infinity
"""


class Node:
    """One simulated machine."""

    def __init__(self, number: int, here: Path, shared: Path) -> None:
        self.number, self.here, self.address = number, here, ADDRESSES[number]
        self._first = subprocess.Popen(
            [*FIRST_PROCESS, _FIRST, "sh", f"node{number}", str(here), str(shared)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._first.stdout is not None
        assert self._first.stderr is not None
        if self._first.stdout.readline().strip() != READY:
            self._first.kill()
            raise OSError(self._first.stderr.read().strip() or "a node did not start")
        self.pid = psutil.Process(self._first.pid).children()[0].pid  # PID outside the namespace

    def argv(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
        """Return a command line that runs ``command`` in this node, in its own folder."""
        given = {
            "HOME": str(self.here),
            "TMPDIR": str(self.here),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
        }
        return [
            *f"nsenter --target={self.pid} {NAMESPACES} -- env -C".split(),
            str(self.here),
            *(f"{name}={value}" for name, value in given.items()),
            *command,
        ]

    def run(self, *command: str, seconds: float = SET_UP_SECONDS) -> str:
        done = subprocess.run(
            self.argv(command), capture_output=True, text=True, timeout=seconds, check=False, env=_bare()
        )
        if done.returncode:
            raise OSError(
                f"{' '.join(command)} on node {self.number}: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done.stdout

    def start(self, command: Sequence[str], output: Path, environ: Mapping[str, str] | None = None) -> OnNode:
        return OnNode(self, command, output, environ)

    def processes(self) -> list[psutil.Process]:
        """Return all live processes except the node's first."""
        own = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = []
        for process in psutil.process_iter():
            try:
                same = Path(f"/proc/{process.pid}/ns/pid").readlink() == own
                if same and process.pid != self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def names(self) -> list[str]:
        """Return the names of the node's live processes."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):  # it has ended
                found.append(process.name())
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        found = {}
        for process in self.processes():
            try:
                environ = process.environ()
            except psutil.Error:
                continue
            if "RANK" in environ:
                found.setdefault(int(environ["RANK"]), process)
        return found

    def end(self) -> None:
        """End the node; the kernel also ends its other processes and removes its side of the cable."""
        self._first.kill()
        self._first.wait(timeout=10)
        for pipe in (self._first.stdout, self._first.stderr):
            if pipe is not None:
                pipe.close()


class OnNode:
    """A running command on a node; at the end of the ``with`` block it and its children are killed."""

    def __init__(
        self, node: Node, command: Sequence[str], output: Path, environ: Mapping[str, str] | None
    ) -> None:
        self.node, self._output = node, output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                node.argv(command, environ),
                env=_bare(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> OnNode:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.node.processes():
            process.kill()
        self.process.kill()
        self.process.wait(timeout=10)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def code(self) -> int | None:
        return self.process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command itself."""
        for child in psutil.Process(self.process.pid).children():
            child.send_signal(number)


class TwoNodes(tuple[Node, Node]):
    here: Path
    shared: Path

    def cable(self, *, up: bool) -> None:
        """Connect or disconnect the nodes. When disconnected, packets are lost silently."""
        self[0].run("ip", "link", "set", "wire", "up" if up else "down")


def wait_for(holds: Callable[[], bool], seconds: float, what: str, *commands: OnNode) -> float:
    """Wait until ``holds()`` and return the seconds; fail with the output of ``commands``.

    It also fails as soon as all commands have ended without it.
    """
    return wait_until(
        holds,
        seconds,
        what,
        ended=lambda: bool(commands) and all(command.code() is not None for command in commands),
        output=lambda: "\n".join(
            f"---- node {command.node.number}, code {command.code()}\n{command.output}"
            for command in commands
        ),
    )


@functools.cache
def missing() -> str | None:
    """Return why nodes cannot be simulated here; None: they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces need Linux and root"
    absent = [
        name for name in ("ip", "setpriv", "unshare", "nsenter", "mountpoint") if shutil.which(name) is None
    ]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install iproute2 util-linux)"
    done = subprocess.run(
        f"unshare {NAMESPACES} --fork --mount-proc ip link add one type veth peer name other".split(),
        capture_output=True,
        text=True,
        timeout=SET_UP_SECONDS,
        check=False,
    )
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else None


@contextmanager
def two_nodes(folder: Path) -> Iterator[TwoNodes]:
    """Create two joined nodes; skip the test if that is not possible here."""
    if (why := missing()) is not None:
        pytest.skip(f"two simulated nodes are not possible here: {why}")
    here, shared = folder / "here", folder / "shared"
    here.mkdir()
    shared.mkdir()
    made: list[Node] = []
    try:
        for number in range(2):
            made.append(Node(number, here, shared))
        subprocess.run(
            f"ip link add wire netns {made[0].pid} type veth peer name wire netns {made[1].pid}".split(),
            check=True,
            timeout=SET_UP_SECONDS,
            capture_output=True,
        )
        for node in made:
            node.run("ip", "address", "add", f"{node.address}/24", "dev", "wire")
            node.run("ip", "link", "set", "wire", "up")
        nodes = TwoNodes((made[0], made[1]))
        nodes.here, nodes.shared = here, shared
        wait_for(
            lambda: all("state UP" in node.run("ip", "link", "show", "wire") for node in nodes),
            SET_UP_SECONDS,
            "joined",
        )
        yield nodes
    finally:
        for node in made:
            node.end()


def torchrun(
    nodes: TwoNodes, number: int, port: int, *words: str, restarts: int = 0, ranks: int = 1
) -> list[str]:
    """Return the torchrun command of docs/clusters.md: the first node serves, and each passes its own
    address.
    """
    conf = f"is_host={int(number == 0)},join_timeout=120"
    return [
        str(BIN / "torchrun"),
        "--nnodes=2",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-id=one",
        f"--rdzv-endpoint={nodes[0].address}:{port}",
        f"--rdzv-conf={conf}",
        f"--local-addr={nodes[number].address}",
        f"--max-restarts={restarts}",
        *words,
    ]


def deepspeed(nodes: TwoNodes, number: int, port: int, *words: str, ranks: int = 1) -> list[str]:
    hosts = nodes.shared / "hostfile"
    hosts.write_text("".join(f"node{node.number} slots={ranks}\n" for node in nodes))
    return [
        str(BIN / "deepspeed"),
        "--no_ssh",
        f"--node_rank={number}",
        f"--master_addr={nodes[0].address}",
        f"--master_port={port}",
        f"--hostfile={hosts}",
        *words,
    ]


def _bare() -> dict[str, str]:
    """Return the environment without variables of a surrounding launcher."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    return {name: value for name, value in os.environ.items() if name not in ours}


def wait_for_exit_codes(commands: Sequence[OnNode], seconds: float) -> list[int | None]:
    """Wait until the commands have ended and return their exit codes."""
    wait_for(lambda: all(item.code() is not None for item in commands), seconds, "ended", *commands)
    return [item.code() for item in commands]
