"""Run one case: start the command, inject the fault, repeat the command if it stopped, collect evidence."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from benchmarks.faults.cases import LAYOUTS, MEMORY_EVERY, MODEL, STEP_SECONDS, STEPS, Case, RunLayout
from benchmarks.faults.catalogue import FAULTS, Expected, FaultClass
from benchmarks.faults.invariants import End, Evidence, violations_of
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
from benchmarks.faults.recovery import read_rank_records, recovery_of
from toolkit import checkpoint_folder
from toolkit.cluster.attempt.rank_processes import find_free_port
from toolkit.errors import InputError
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

COMMAND_SECONDS = 400.0  # hard limit of one command
GONE_SECONDS = 90.0  # in which the ranks of a dead launcher save and end
MAX_STARTS = 3  # of one command in a case
SCRIPT = ROOT / "launch" / "train.py"


class CaseFailed(Exception):
    """The case cannot go on: the run did not reach the fault, or did not end in time."""


class LiveRun:
    """The run of one case, as faults see it.

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

    def __init__(self, case: Case, folder: Path, data: Path, resources: ExitStack) -> None:
        self.case, self.folder, self.resources = case, folder, resources
        self.fault: FaultClass | None = FAULTS.get(case.fault)
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
            if self.fault is not None and self.fault.disk_mib is not None:
                mount_disk(self.disk, self.fault.disk_mib)
                resources.callback(unmount_disk, self.disk)
        resources.callback(kill_all, self.mark)  # before the disk is unmounted
        self.rank_records = (self.nodes.shared if self.nodes is not None else folder) / "rank-records"
        self.rank_records.mkdir()
        self.directory = RunDirectory(self.disk / "run")
        self._hold = self.rank_records / "hold"
        self.environ = {"FAULT_RECORDS": str(self.rank_records), "FAULT_STEP_SECONDS": str(STEP_SECONDS)}
        if self.nodes is None:
            self.temporary = folder / "tmp"
            self.temporary.mkdir()
            self.environ["TMPDIR"] = str(self.temporary)

    def start(self, *extra: str) -> None:
        overrides = [
            *MODEL,
            *self.layout.overrides,
            *(self.fault.overrides if self.fault is not None else ()),
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
        self._hold.unlink()

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


def unbroken_losses(layout: RunLayout, folder: Path, data: Path) -> dict[int, float]:
    """Return the losses by step of a run of the layout without a fault; run it unless a result is stored.

    Raises:
        CaseFailed: the run did not end well.
    """
    stored = folder / "losses.json"
    if not stored.exists():
        release_folder(folder)
        folder.mkdir(parents=True)
        launcher = "torchrun" if layout.nodes > 1 else "python"
        case = Case(0, "none", layout.name, launcher, 0.0, 0)
        with ExitStack() as resources:
            run = LiveRun(case, folder, data, resources)
            run.environ["FAULT_STEP_SECONDS"] = "0"
            run.start()
            end = run.wait_for_end()
            if end.status is None or end.status.state is not RunState.DONE:
                raise CaseFailed(f"the unbroken run of {layout.name} failed: {end}\n{run.output_tail()}")
            losses = {row["step"]: row["loss"] for row in read_rows(run.directory.metrics_file)}
        stored.write_text(json.dumps(losses))
    return {int(step): loss for step, loss in json.loads(stored.read_text()).items()}


def run_case(case: Case, folder: Path, data: Path, reference: Mapping[int, float]) -> dict[str, Any]:
    """Run a case and return its row: what happened, which invariants it violates, and how long it took."""
    fault = FAULTS[case.fault]
    release_folder(folder)
    folder.mkdir(parents=True)
    began = time.time()
    ends: list[End] = []
    problem: str | None = None
    needs_repair = False
    with ExitStack() as resources:
        run = LiveRun(case, folder, data, resources)
        try:
            fault.prepare(run)
            if fault.at_start:
                needs_repair = True
                fault.inject(run)
            if case.warm:
                run.hold_after(1 + int(case.moment))
            run.start()
            if not fault.at_start:
                run.wait_for(lambda: run.step() >= 1)
                run.find_ranks()
                run.wait_for(lambda: run.step() >= 1 + int(case.moment))
                if case.warm:
                    run.wait_for(run.has_standbys)
                    run.release()
                time.sleep(STEP_SECONDS * (case.moment % 1))
                run.moment, needs_repair = time.time(), True
                fault.inject(run)
        except CaseFailed as error:
            problem = str(error)
        ends.append(run.wait_for_end())
        while not is_done(ends[-1]) and len(ends) < MAX_STARTS:
            if needs_repair:
                fault.repair(run)
                needs_repair = False
            run.start(*fault.remedy_overrides(run))
            ends.append(run.wait_for_end())
        if needs_repair:
            fault.repair(run)
        evidence = Evidence(
            run=run.directory.path,
            rank_records=run.rank_records,
            reference=reference,
            ends=tuple(ends),
            damaged_step=run.damaged_step,
            temporary=None if run.nodes is not None else run.temporary,
            memory=tuple(run.memory_folders()),
            status_writable=fault.name not in ("disk-full", "disk-read-only"),
        )
        violations = violations_of(evidence)
        missed = not fault.at_start and was_too_late(run)
        unexpected = problem or differs_from_expected(fault.expected, case.launcher, ends)
        if unexpected and not missed:
            violations["expected end"] = [unexpected]
        measured = run.moment > 0 and not missed
        recovery = recovery_of(evidence.run, run.rank_records, run.moment) if measured else None
        return {
            **case.to_json(),
            "expected": str(fault.expected),
            "ends": [end.to_json() for end in ends],
            "attempts": len(run.directory.attempts()),
            "missed": missed,
            "violations": violations,
            "recovery": recovery,
            "seconds": time.time() - began,
            "load": os.getloadavg()[0],
            "output": run.output_tail() if violations else "",
        }


def was_too_late(run: LiveRun) -> bool:
    """Return whether the run had completed its last step before the fault."""
    rows = list(read_rank_records(run.rank_records))
    last = [row["time"] for row in rows if row.get("ended") == STEPS]
    if run.ordered:
        return bool(last) and not any("obeyed" in row for row in rows)
    return bool(last) and (run.moment == 0 or min(last) <= run.moment)


def is_done(end: End) -> bool:
    return end.status is not None and end.status.state is RunState.DONE


def differs_from_expected(expected: Expected, launcher: str, ends: Sequence[End]) -> str | None:
    """Return how the commands ended otherwise than expected; None: as expected."""
    if launcher == "deepspeed" and expected is Expected.RESTARTED:
        expected = Expected.STOPPED
    if not is_done(ends[-1]):
        return f"the run was not finished by {len(ends)} commands: {ends[-1]}"
    attempt = ends[-1].status.attempt if ends[-1].status is not None else 0
    if expected is Expected.STOPPED:
        return None if len(ends) == 2 else f"{len(ends)} commands instead of 2"
    if len(ends) > 1:
        return f"the first command ended without finishing the run: {ends[0]}"
    if expected is Expected.UNAFFECTED and attempt > 1:
        return f"{attempt} attempts instead of 1"
    if expected is Expected.RESTARTED and attempt < 2:
        return "the ranks were not restarted"
    return None
