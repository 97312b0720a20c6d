"""The classes of faults: how each is injected, and how the run must end.

To add a class, append a ``FaultClass`` to ``FAULTS``. Its functions receive the live run (``live_run.py``):
processes, folder, checkpoints, and orders for the ranks (``instrumentation.py``). ``LEFT_OUT`` lists the
faults that this campaign does not have, with the reason.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from benchmarks.faults.cases import LAUNCHERS, PARENT, STEPS, Choice
from benchmarks.faults.damage import (
    copy_data,
    damage_checkpoint,
    damage_data,
    damage_snapshot,
    older_checkpoint,
    restore_byte,
    restore_sole_checkpoint,
)
from benchmarks.faults.live_run import LiveRun
from benchmarks.faults.processes import why_no_lossy_link_between_nodes, why_no_nodes

HANG_SECONDS = 6  # of classes that wait for the watchdog
SHORT_SECONDS = 1.5  # a pause that no timeout notices
LINK_SHORT_SECONDS = 3.0
LINK_LONG_SECONDS = 15.0  # longer than the watchdog and its report need
LINK_BAD_SECONDS = 5.0  # of a link that is slow or lossy
LINK_DELAY_SECONDS, LINK_LOST = 0.05, 0.2
RECOVERY_SECONDS = 120.0  # within which the ranks of the next attempt start
SECOND_KILL_SECONDS, WARM_SECOND_KILL_SECONDS = 10.0, 3.0  # about the time of a recovery
DISK_MIB = 24
SMALL_WRITE = 1 << 12


class Expected(StrEnum):
    """The required end of a run after the fault."""

    UNAFFECTED = "unaffected"  # the same attempt trains to the end
    RESTARTED = "restarted"  # the launcher restarts the ranks; deepspeed does not, so the command is repeated
    STOPPED = "stopped"  # the command ends with a reason, and the same command finishes the run later


Action = Callable[[LiveRun], None]


def nothing(run: LiveRun) -> None:
    pass


@dataclass(frozen=True)
class FaultClass:
    """One class of faults.

    Attributes:
        inject: causes the fault in a training run, or before the command starts if ``at_start``.
        noticed_late: the ranks train on until they notice the fault; so a run may complete its last steps.
        prepare: runs before the first command.
        repair: runs between the end of the first command and the second one.
        overrides: of all runs of this class.
        disk_mib: size of a small disk for the run's folder; None: the campaign's own disk.
        remedy_overrides: those that the error of the first command asks for.
        missing: returns why the class cannot be injected on this machine; None: it can.
        warm: values of ``Case.warm``: whether runs have standbys and snapshots in memory.
    """

    name: str
    expected: Expected
    inject: Action
    launchers: tuple[str, ...] = LAUNCHERS
    nodes: int = 1
    at_start: bool = False
    noticed_late: bool = False
    prepare: Action = nothing
    repair: Action = nothing
    overrides: tuple[str, ...] = ()
    disk_mib: int | None = None
    remedy_overrides: Callable[[LiveRun], tuple[str, ...]] = lambda run: ()
    missing: Callable[[], str | None] = lambda: None
    warm: tuple[bool, ...] = (False,)

    @property
    def choice(self) -> Choice:
        return Choice(self.launchers, self.nodes, self.warm)


# ---- signals


def kill_rank(run: LiveRun) -> None:
    run.kill(run.random.choice(sorted(run.ranks)))


def kill_two_ranks(run: LiveRun) -> None:
    for rank in run.random.sample(sorted(run.ranks), 2):
        run.kill(rank)


def crash_rank(run: LiveRun) -> None:
    run.kill(run.random.choice(sorted(run.ranks)), signal.SIGSEGV)


def kill_launcher(run: LiveRun) -> None:
    run.started.launchers[0].send_signal(signal.SIGKILL)


def kill_standby(run: LiveRun) -> None:
    run.random.choice(run.started.standbys()).send_signal(signal.SIGKILL)


def request_stop(run: LiveRun) -> None:
    """Send SIGTERM as a scheduler does. deepspeed does not forward it, so a rank receives it."""
    if run.case.launcher == "deepspeed":
        run.kill(run.random.choice(sorted(run.ranks)), signal.SIGTERM)
    else:
        run.started.launchers[0].send_signal(signal.SIGTERM)


def pause_rank(run: LiveRun) -> None:
    rank = run.random.choice(sorted(run.ranks))
    run.kill(rank, signal.SIGSTOP)
    time.sleep(SHORT_SECONDS)
    run.kill(rank, signal.SIGCONT)


def freeze_rank(run: LiveRun) -> None:
    run.kill(run.random.choice(sorted(run.ranks)), signal.SIGSTOP)


def kill_twice(run: LiveRun) -> None:
    """Kill a rank, and one of its successors while they start, load or repeat steps."""
    first = {process.pid for process in run.ranks.values()}
    kill_rank(run)
    deadline = time.monotonic() + RECOVERY_SECONDS
    while time.monotonic() < deadline and run.started.code() is None:
        fresh = {process.pid for process in run.find_ranks().values()} - first
        if fresh:
            seconds = WARM_SECOND_KILL_SECONDS if run.case.warm else SECOND_KILL_SECONDS
            time.sleep(run.random.uniform(0, seconds))
            if run.find_ranks():
                kill_rank(run)
            return
        time.sleep(0.05)


# ---- errors in a rank


def order(kind: str, *, all_ranks: bool = False, ahead: int = 0) -> Action:
    """Return an action that lets a rank (or all) carry out an order of ``instrumentation.py``."""

    def give(run: LiveRun) -> None:
        ranks = sorted(run.ranks)
        run.ordered = True
        chosen = ranks if all_ranks else [run.random.choice(ranks)]
        run.order(kind, chosen, min(run.step() + ahead, STEPS) if ahead else 0)

    return give


# ---- disks


def fill_disk(run: LiveRun) -> None:
    """Fill the run's disk to the last byte, however small the pieces."""
    with (run.disk / "ballast").open("ab", buffering=0) as file:
        for size in (1 << 20, SMALL_WRITE, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def free_disk(run: LiveRun) -> None:
    (run.disk / "ballast").unlink()


def _set_immutable(run: LiveRun, sign: str) -> None:
    folders = [run.directory.path, run.directory.checkpoints]
    subprocess.run(
        ["chattr", f"{sign}i", *(str(path) for path in folders if path.is_dir())],
        check=True,
        capture_output=True,
    )


def make_read_only(run: LiveRun) -> None:
    _set_immutable(run, "+")


def make_writable(run: LiveRun) -> None:
    _set_immutable(run, "-")


def why_not_immutable() -> str | None:
    if os.geteuid() != 0 or shutil.which("chattr") is None:
        return "needs root and chattr"
    return None


def why_no_mounts() -> str | None:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return "needs root and mount"
    return None


# ---- networks and stores


def take_port(run: LiveRun) -> None:
    """Let another process listen on the port of the rendezvous."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("0.0.0.0", run.port))
    listener.listen()
    run.resources.callback(listener.close)
    run.listener = listener


def free_port(run: LiveRun) -> None:
    assert run.listener is not None
    run.listener.close()


def read_from_store(run: LiveRun) -> None:
    """Read the data from an S3 store in which requests fail, stall or break off from the beginning."""
    from tests.data.local_stores import environment, served

    bucket = run.folder / "bucket"
    shutil.copytree(run.data, bucket / "data")
    store = run.resources.enter_context(
        served(bucket, failing=0.15, stalled=0.05, silence_seconds=2.0, seed=run.case.seed)
    )
    run.environ |= {**environment(store), "XDG_CACHE_HOME": str(run.folder / "cache")}
    run.data = f"{store.s3}/data"


def cut_link(seconds: float) -> Action:
    def cut(run: LiveRun) -> None:
        assert run.nodes is not None
        run.nodes.cable(up=False)
        try:
            time.sleep(seconds)
        finally:
            run.nodes.cable(up=True)

    return cut


def use_lossy_link(run: LiveRun) -> None:
    assert run.nodes is not None
    run.nodes.use_lossy_link(run.case.seed)


def spoil_link(
    seconds: float, *, delay_seconds: float = 0.0, lost: float = 0.0, half_open: bool = False
) -> Action:
    """Return an action that makes the link between the machines bad, and then good again."""

    def spoil(run: LiveRun) -> None:
        assert run.nodes is not None
        link = run.nodes.lossy_link
        assert link is not None
        link.delay_seconds, link.lost = delay_seconds, lost
        link.blocked = frozenset({run.random.randrange(2)} if half_open else ())
        try:
            time.sleep(seconds)
        finally:
            link.delay_seconds, link.lost, link.blocked = 0.0, 0.0, frozenset()

    return spoil


WATCHED = (f"monitor.hang_seconds={HANG_SECONDS}", "cluster.grace_seconds=5")
RESTARTING = ("python", "torchrun")
EITHER = (False, True)

on_two_nodes = partial(FaultClass, launchers=("torchrun",), nodes=2, missing=why_no_nodes)
on_lossy_link = partial(on_two_nodes, prepare=use_lossy_link, missing=why_no_lossy_link_between_nodes)

FAULTS: Mapping[str, FaultClass] = {
    fault.name: fault
    for fault in (
        FaultClass("rank-killed", Expected.RESTARTED, kill_rank, warm=EITHER),
        FaultClass("two-ranks-killed", Expected.RESTARTED, kill_two_ranks, warm=EITHER),
        FaultClass("rank-segfault", Expected.RESTARTED, crash_rank, warm=EITHER),
        FaultClass(
            "supervisor-killed", Expected.STOPPED, kill_launcher, (PARENT,), noticed_late=True, warm=EITHER
        ),
        FaultClass(
            "launcher-killed", Expected.STOPPED, kill_launcher, ("torchrun", "deepspeed"), noticed_late=True
        ),
        FaultClass("preempted", Expected.STOPPED, request_stop, noticed_late=True),
        FaultClass("rank-paused", Expected.UNAFFECTED, pause_rank),
        FaultClass("rank-frozen", Expected.RESTARTED, freeze_rank, overrides=WATCHED),
        FaultClass("standby-killed", Expected.UNAFFECTED, kill_standby, (PARENT,), warm=(True,)),
        FaultClass("killed-in-recovery", Expected.RESTARTED, kill_twice, RESTARTING, warm=EITHER),
        FaultClass("exception", Expected.RESTARTED, order("exception"), warm=EITHER),
        FaultClass("out-of-memory", Expected.RESTARTED, order("memory"), warm=EITHER),
        FaultClass("nan", Expected.STOPPED, order("nan", all_ranks=True, ahead=3)),
        FaultClass("clock-jump", Expected.UNAFFECTED, order("clock", all_ranks=True)),
        FaultClass("disk-slow", Expected.UNAFFECTED, order("sync", all_ranks=True)),
        FaultClass(
            "disk-full",
            Expected.STOPPED,
            fill_disk,
            repair=free_disk,
            disk_mib=DISK_MIB,
            missing=why_no_mounts,
        ),
        FaultClass(
            "disk-read-only",
            Expected.STOPPED,
            make_read_only,
            repair=make_writable,
            missing=why_not_immutable,
        ),
        FaultClass(
            "checkpoint-damaged",
            Expected.STOPPED,
            damage_checkpoint,
            RESTARTING,
            repair=restore_sole_checkpoint,
            remedy_overrides=older_checkpoint,
        ),
        FaultClass("snapshot-damaged", Expected.RESTARTED, damage_snapshot, (PARENT,), warm=(True,)),
        FaultClass(
            "data-damaged", Expected.STOPPED, damage_data, RESTARTING, prepare=copy_data, repair=restore_byte
        ),
        FaultClass(
            "port-taken",
            Expected.STOPPED,
            take_port,
            ("torchrun", "deepspeed"),
            at_start=True,
            repair=free_port,
        ),
        FaultClass("store-failing", Expected.UNAFFECTED, nothing, at_start=True, prepare=read_from_store),
        on_two_nodes("link-cut-short", Expected.UNAFFECTED, cut_link(LINK_SHORT_SECONDS)),
        on_two_nodes("link-cut-long", Expected.RESTARTED, cut_link(LINK_LONG_SECONDS), overrides=WATCHED),
        on_lossy_link(
            "link-slow", Expected.UNAFFECTED, spoil_link(LINK_BAD_SECONDS, delay_seconds=LINK_DELAY_SECONDS)
        ),
        on_lossy_link("link-lossy", Expected.UNAFFECTED, spoil_link(LINK_BAD_SECONDS, lost=LINK_LOST)),
        on_lossy_link(
            "link-half-open",
            Expected.RESTARTED,
            spoil_link(LINK_LONG_SECONDS, half_open=True),
            overrides=WATCHED,
        ),
        on_two_nodes("node-rank-killed", Expected.RESTARTED, kill_rank),
    )
}

LEFT_OUT: Mapping[str, str] = {
    "vanishing disk": "the run's own record vanishes with it",
    "jump of the kernel's clock": "would change the whole machine's; clock-jump changes that of the ranks",
    "spike and rollback": "a spike needs more steps before it; tests/train/test_rollback.py has both",
    "uploads": "tests/launch/test_killed_during_upload.py and tests/checkpoint/test_uploads.py have them",
}


def possible_faults(names: list[str] | None = None) -> tuple[dict[str, FaultClass], dict[str, str]]:
    """Return the classes that can be injected here, and the others with the reason.

    Raises:
        ValueError: a name is unknown.
    """
    unknown = sorted(set(names or ()) - FAULTS.keys())
    if unknown:
        raise ValueError(f"no such class: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    chosen = {name: FAULTS[name] for name in names or FAULTS}
    missing = {name: why for name, fault in chosen.items() if (why := fault.missing()) is not None}
    return {name: fault for name, fault in chosen.items() if name not in missing}, missing
