"""Start the command of a case, find all its processes by a mark in their environment, and end them.

A process inherits the mark from its parent, so an orphan is found as well, also in another session, namespace
or working directory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from benchmarks.faults.lossy_link import LossyLink, replace_with_lossy_link, why_no_lossy_link
from toolkit.cluster.standbys.standby_pool import is_standby as is_standby_command
from toolkit.plan.devices import HIDE_GPUS
from toolkit.testing.dist import find_free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MARK = "FAULT_CASE"
POLL_SECONDS = 0.02
ENVIRON = {
    **HIDE_GPUS,
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(ROOT),
}
FROM_OTHER_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return all live processes with ``mark`` in their environment, except zombies."""
    entry, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                process = psutil.Process(int(folder.name))
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    found.append(process)
        except (OSError, psutil.Error):
            continue  # it has ended
    return found


def is_standby(process: psutil.Process, *, ready: bool = False) -> bool:
    """Return whether a process waits to become a rank; ``ready``: and has done its imports.

    It keeps its command line as a rank, and has no name of its own when it starts.
    """
    try:
        if ready:
            return process.name().startswith("standby-")
        return is_standby_command(process.cmdline()) and not process.name().startswith("rank-")
    except psutil.Error:
        return False


def ranks_of(processes: Sequence[psutil.Process]) -> dict[int, psutil.Process]:
    """Return the processes of ranks, without standbys and the children that inherit a rank's environment."""
    ranks: dict[int, int] = {}
    by_pid = {process.pid: process for process in processes}
    for process in processes:
        try:
            rank = process.environ().get("RANK")
        except psutil.Error:
            continue
        if rank is not None and not is_standby(process):
            ranks[process.pid] = int(rank)
    found = {}
    for pid, rank in ranks.items():
        try:
            if ranks.get(by_pid[pid].ppid()) != rank:
                found[rank] = by_pid[pid]
        except psutil.Error:
            continue
    return found


def kill_all(mark: str) -> None:
    """Kill every process with the mark, until none is left."""
    deadline = time.monotonic() + 20
    while (found := marked_processes(mark)) and time.monotonic() < deadline:
        for process in found:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        time.sleep(POLL_SECONDS)


class Started:
    """A started command: one process for each node.

    Attributes:
        launchers: what the user started, one per node.
        mark: in the environment of every process of the case.
    """

    def __init__(self, launchers: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
        self.launchers, self.mark = launchers, mark

    def code(self) -> int | None:
        """Return the exit code, the first that is not 0 on several nodes; None while one runs."""
        codes = [launcher.poll() for launcher in self.launchers]
        if None in codes:
            return None
        return next((code for code in codes if code), 0)

    def processes(self) -> list[psutil.Process]:
        return marked_processes(self.mark)

    def ranks(self) -> dict[int, psutil.Process]:
        return ranks_of(self.processes())

    def standbys(self) -> list[psutil.Process]:
        """Return the standbys that have done their imports."""
        return [process for process in self.processes() if is_standby(process, ready=True)]


def launch_command(launcher: str, script: Path, overrides: Sequence[str], ranks: int, port: int) -> list[str]:
    """Return the command line on one machine.

    Args:
        port: of the rendezvous; plain Python chooses its own.
    """
    match launcher:
        case "python":
            return [sys.executable, str(script), *overrides, f"cluster.cpu_ranks={ranks}"]
        case "torchrun":
            options = (f"--nproc_per_node={ranks}", f"--master_port={port}", "--max-restarts=3")
            return [str(BIN / "torchrun"), *options, str(script), *overrides]
        case "deepspeed":
            return [
                str(BIN / "deepspeed"),
                f"--master_port={port}",
                f"--num_gpus={ranks}",
                str(script),
                *overrides,
            ]
    raise ValueError(f"unknown launcher {launcher}")


def start(argv: Sequence[str], output: Path, mark: str, environ: Mapping[str, str]) -> Started:
    """Start a command on this machine in a new session, with its output appended to a file."""
    inherited = {name: value for name, value in os.environ.items() if name not in FROM_OTHER_LAUNCHERS}
    with output.open("ab") as file:
        process = subprocess.Popen(
            argv,
            cwd=output.parent,
            env={**inherited, **ENVIRON, **environ, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started([process], mark)


class Nodes:
    """Two simulated machines with one shared folder, joined by a cable.

    Attributes:
        shared: the folder that both see.
        lossy_link: see :meth:`use_lossy_link`.
    """

    def __init__(self, folder: Path, mark: str, stack: ExitStack) -> None:
        from tests.cluster.simulated_nodes import two_nodes

        self._nodes = stack.enter_context(two_nodes(folder))
        self.shared, self._mark, self._stack = self._nodes.shared, mark, stack
        self.lossy_link: LossyLink | None = None
        self._port = find_free_port()

    def use_lossy_link(self, seed: int) -> None:
        """Replace the cable by ``self.lossy_link``, which can delay and lose frames."""
        self.lossy_link = self._stack.enter_context(replace_with_lossy_link(self._nodes, seed))

    def cable(self, *, up: bool) -> None:
        """Connect or disconnect the machines; packets are lost silently."""
        self._nodes.cable(up=up)

    def start(
        self, script: Path, overrides: Sequence[str], ranks: int, environ: Mapping[str, str]
    ) -> Started:
        from tests.cluster.simulated_nodes import torchrun

        launchers = []
        for node in self._nodes:
            argv = torchrun(
                self._nodes, node.number, self._port, str(script), *overrides, restarts=3, ranks=ranks // 2
            )
            output = self.shared / f"output-{node.number}.txt"
            given = {**ENVIRON, **environ, MARK: self._mark}
            launchers.append(self._stack.enter_context(node.start(argv, output, given)).process)
        return Started(launchers, self._mark)


@contextmanager
def simulated_nodes(folder: Path, mark: str) -> Iterator[Nodes]:
    """Create two machines below ``folder``, which are removed with all their processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        yield Nodes(folder, mark, stack)


def why_no_nodes() -> str | None:
    """Return why two machines cannot be simulated here; None: they can."""
    from tests.cluster.simulated_nodes import missing

    return missing()


def why_no_lossy_link_between_nodes() -> str | None:
    """Return why two machines cannot be joined by a :class:`LossyLink` here; None: they can."""
    return why_no_nodes() or why_no_lossy_link()
