"""The run of one case: its commands, processes, folder and orders, as faults see them."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from benchmarks.faults.cases import LAYOUTS, MEMORY_EVERY, MODEL, STEP_SECONDS, Case, RunLayout
from benchmarks.faults.invariants import End
from benchmarks.faults.processes import (
    POLL_SECONDS,
    ROOT,
    Nodes,
    Started,
    kill_all,
    launch_command,
    marked_processes,
    simulated_nodes,
    start,
)
from benchmarks.faults.recovery import read_rank_records
from toolkit import checkpoint_folder
from toolkit.errors import InputError
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import Status
from toolkit.testing.dist import find_free_port

COMMAND_SECONDS = 400.0  # hard limit of one command
GONE_SECONDS = 90.0  # in which the ranks of a dead launcher save and end
SCRIPT = ROOT / "launch" / "train.py"


class CaseFailed(Exception):
    """The case cannot continue: the run did not reach the fault, or did not end in time."""


class LiveRun:
    """The run of one case, as faults see it.

    Args:
        overrides: of every command.
        disk_mib: size of a small disk for the run's folder; None: the campaign's own disk.

    Attributes:
        random: seeded by the case.
        disk: the folder that contains the run's; a small disk of its own if the fault needs one.
        data: ``data.path``.
        port: of the launcher's rendezvous, the same in every command of the case.
        environ: of the commands.
        resources: closed at the end of the case.
        moment: of the fault, in seconds since 1970.
        ordered: a rank carries the fault out itself (``instrumentation.py``); the order may be too late.
        ranks: the processes found last, by rank.
        damaged_step: step of the checkpoint that the fault damaged.
        damaged_byte: file and place of a byte that the fault inverted.
    """

    def __init__(
        self,
        case: Case,
        folder: Path,
        data: Path,
        resources: ExitStack,
        overrides: Sequence[str] = (),
        disk_mib: int | None = None,
    ) -> None:
        self.case, self.folder, self.resources = case, folder, resources
        self.overrides = overrides
        self.layout: RunLayout = LAYOUTS[case.layout]
        self.random, self.mark = random.Random(case.seed), uuid4().hex
        self.data, self.port = str(data), find_free_port()
        self.nodes: Nodes | None = None
        self.started: Started
        self.moment = 0.0
        self.ordered = False
        self.ranks: dict[int, psutil.Process] = {}
        self.damaged_step: int | None = None
        self.damaged_byte: tuple[Path, int] | None = None
        self.listener: Any = None
        if self.layout.nodes > 1:
            self.nodes = resources.enter_context(simulated_nodes(folder / "nodes", self.mark))
            self.disk = self.nodes.shared
            self.data = str(shutil.copytree(data, self.nodes.shared / "data"))  # the rest is read-only
        else:
            self.disk = folder / "disk"
            self.disk.mkdir()
            if disk_mib is not None:
                mount_disk(self.disk, disk_mib)
                resources.callback(unmount_disk, self.disk)
        resources.callback(kill_all, self.mark)  # before the disk is unmounted
        self.rank_records = (self.nodes.shared if self.nodes is not None else folder) / "rank-records"
        self.rank_records.mkdir()
        self.directory = RunDirectory(self.disk / "run")
        self._hold = self.rank_records / "hold"
        self.environ = {
            "FAULT_RECORDS": str(self.rank_records),
            "FAULT_STEP_SECONDS": str(STEP_SECONDS),
            "FAULT_FIRST_PAUSE": str(case.step),
        }
        if self.nodes is None:
            self.temporary = folder / "tmp"
            self.temporary.mkdir()
            self.environ["TMPDIR"] = str(self.temporary)

    def start(self, *extra: str) -> None:
        overrides = [
            *MODEL,
            *self.layout.overrides,
            *self.overrides,
            *warm_overrides(self.case),
            f"data.path={self.data}",
            f"run.dir={self.directory.path}",
            *extra,
        ]
        if self.nodes is not None:
            self.started = self.nodes.start(SCRIPT, overrides, self.layout.ranks, self.environ)
            return
        argv = launch_command(self.case.launcher, SCRIPT, overrides, self.layout.ranks, self.port)
        self.started = start(argv, self.folder / "output.txt", self.mark, self.environ)

    def find_ranks(self) -> dict[int, psutil.Process]:
        """Find the processes of the ranks that live now."""
        self.ranks = self.started.ranks()
        return self.ranks

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a rank, unless it has ended."""
        with suppress(psutil.NoSuchProcess):
            self.ranks[rank].send_signal(number)

    def hold_after(self, step: int) -> None:
        """Let rank 0 wait after ``step`` until :meth:`release`."""
        self._hold.write_text(str(step))

    def release(self) -> None:
        self._hold.unlink(missing_ok=True)

    def has_standbys(self) -> bool:
        return len(self.started.standbys()) == self.layout.ranks

    def order(self, kind: str, ranks: Sequence[int], step: int) -> None:
        """Let ``ranks`` carry out a fault at ``step``, or after their current step."""
        temporary = self.rank_records / "order.writing"
        temporary.write_text(json.dumps({"kind": kind, "ranks": list(ranks), "step": step}))
        temporary.rename(self.rank_records / "order.json")

    def step(self) -> int:
        """Return the newest step that rank 0 has ever completed."""
        return max(
            (row["ended"] for row in read_rank_records(self.rank_records, 0) if "ended" in row), default=0
        )

    def newest_checkpoint(self) -> Path | None:
        return self.directory.newest_checkpoint()

    def memory_folders(self) -> list[Path]:
        """Return the folders of snapshots in memory of all attempts, in order; of warm cases."""
        if not self.case.warm:
            return []
        files = [
            self.directory.attempt_folder(number) / "handover.json" for number in self.directory.attempts()
        ]
        found = [json.loads(file.read_text())["memory"] for file in files if file.exists()]
        return [Path(folder) for folder in dict.fromkeys(found) if folder is not None]

    def newest_snapshot(self) -> Path | None:
        snapshots = checkpoint_folder.committed_checkpoints(self.memory_folders()[-1])
        return next(reversed(snapshots.values()), None)

    def wait_for(self, holds: Callable[[], bool], seconds: float = COMMAND_SECONDS) -> None:
        """Wait for a condition. Raises CaseFailed if the command ends first, or does not reach it in time."""
        deadline = time.monotonic() + seconds
        while not holds():
            if self.started.code() is not None and not holds():
                raise CaseFailed("the command ended before the fault")
            if time.monotonic() > deadline:
                raise CaseFailed(f"not reached within {seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def wait_for_end(self) -> End:
        """Wait until the command and all its processes have ended."""
        deadline, late = time.monotonic() + COMMAND_SECONDS, False
        while self.started.code() is None and not late:
            time.sleep(POLL_SECONDS)
            late = time.monotonic() > deadline
        deadline = time.monotonic() + (0 if late else GONE_SECONDS)
        while (left := marked_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        orphans = tuple(describe(process) for process in left)
        code = self.started.code()
        kill_all(self.mark)
        for launcher in self.started.launchers:
            launcher.wait(timeout=20)
        return End(code=code, status=self.status(), orphans=orphans, late=late)

    def status(self) -> Status | None:
        try:
            return self.directory.status()
        except InputError:
            return None

    def output_tail(self, characters: int = 3000) -> str:
        files = sorted((self.nodes.shared if self.nodes is not None else self.folder).glob("output*.txt"))
        return "\n".join(file.read_text(errors="replace")[-characters:] for file in files)


def warm_overrides(case: Case) -> tuple[str, ...]:
    if not case.warm:
        return ()
    return (f"cluster.standbys={LAYOUTS[case.layout].ranks}", f"checkpoint.memory_every={MEMORY_EVERY}")


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)


def mount_disk(folder: Path, mib: int) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "fault-campaign", str(folder)], check=True, timeout=20
    )


def unmount_disk(folder: Path) -> None:
    """Copy what the small disk holds to the campaign's disk, and unmount it."""
    kept = folder.with_name("disk-copy")
    shutil.copytree(folder, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("ballast"))
    subprocess.run(["umount", str(folder)], check=True, timeout=20)


def release_folder(folder: Path) -> None:
    """Undo what a killed campaign left in the folder of a case: mounts and immutable folders; remove it."""
    if not folder.exists():
        return
    disk = folder / "disk"
    if disk.is_mount():
        subprocess.run(["umount", str(disk)], check=True, timeout=20)
    if shutil.which("chattr") is not None:
        subprocess.run(["chattr", "-R", "-i", str(folder)], check=False, capture_output=True, timeout=20)
    shutil.rmtree(folder)
