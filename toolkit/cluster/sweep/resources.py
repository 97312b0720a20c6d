"""GPUs and cores of this machine, shared by the points that run here: of this sweep, and of every other sweep of this user.

A GPU or a core is a file whose lock its point holds. The point's own process inherits the lock: what an orphan uses stays taken.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.machine_info import MachineInfo
from toolkit.cluster.sweep.points import planned_host_bytes
from toolkit.errors import InputError, Problem
from toolkit.plan.types import Device, RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResources:
    gpus: int  # 0: on the CPU
    cores: int  # of a point on the CPU, for itself; 0: no matter which
    threads: int  # of each rank, for tensor arithmetic on the CPU
    planned_host_bytes: int  # 0: unknown


def compute_resources(plan: RunPlan, machine: MachineInfo, points: int) -> PointResources:
    """What a point takes of ``machine``.

    On the CPU a rank has at least one core; where there are more cores than points at a time, a point has its part of them.

    Args:
        points: that shall run at a time, if there is room.
    """
    ranks, written = plan.world.ranks_per_node, plan.config.debug.threads
    if plan.world.device is Device.CUDA:
        part = machine.cores * ranks // max(1, len(machine.gpus))
        return PointResources(
            gpus=ranks, cores=0, threads=written or max(1, part // ranks), host_bytes=planned_host_bytes(plan)
        )
    cores = ranks * written if written else max(ranks, machine.cores // max(1, points))
    cores = min(cores, machine.cores)
    return PointResources(gpus=0, cores=cores, threads=written or max(1, cores // ranks), host_bytes=planned_host_bytes(plan))


@dataclass(slots=True)
class Reservation:
    """Taken for one point."""

    gpus: tuple[str, ...]  # as CUDA_VISIBLE_DEVICES takes them
    cores: tuple[int, ...]  # empty: any
    planned_host_bytes: int
    locks: tuple[int, ...]  # open files

    def build_environ(self, need: PointResources, above: Mapping[str, str]) -> dict[str, str]:
        """``above`` with what is the point's own; threads that the user has set stay."""
        own = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        return {"OMP_NUM_THREADS": str(need.threads), **above, **own}


class ResourcePool:
    """
    Args:
        folder: of the lock files; None: one for this user and machine.

    Raises:
        InputError: the folder is another user's.
    """

    def __init__(self, machine: MachineInfo, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"toolkit-slots-{os.getuid()}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (owner := self._folder.stat().st_uid) != os.getuid():
            raise InputError(
                Problem(
                    "TMPDIR",
                    f"{self._folder}, which belongs to user {owner}",
                    "locks of GPUs and cores are files of the user whose points take them",
                    "have it removed, or set TMPDIR to a folder of your own on this machine",
                )
            )
        self._gpus = _gpu_names(machine, os.build_environ.get("CUDA_VISIBLE_DEVICES"))
        self._cores = sorted(os.sched_getaffinity(0))[: machine.cores]
        self._host_bytes = machine.host_memory_bytes
        self._host_used = 0

    def acquire(self, need: PointResources) -> Reservation | None:
        """None: there is no room now. Of host memory only this process' own points are counted."""
        if (
            self._host_bytes is not None
            and self._host_used
            and self._host_used + need.host_bytes > self._host_bytes
        ):
            return None
        guard = os.open(self._folder / "guard", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(
                guard, fcntl.LOCK_EX
            )  # held for the microseconds of this look: two sweeps do not take halves of what both need
            gpus = self._free([f"gpu-{name}" for name in self._gpus], need.gpus)
            if gpus is None:
                return None
            cores = self._free([f"core-{core}" for core in self._cores], need.cores)
            if cores is None:
                _close_files(gpus.values())
                return None
        finally:
            os.close(guard)
        self._host_used += need.host_bytes
        return Reservation(
            tuple(name.removeprefix("gpu-") for name in gpus),
            tuple(int(name.removeprefix("core-")) for name in cores),
            need.host_bytes,
            (*gpus.values(), *cores.values()),
        )

    def release(self, place: Reservation) -> None:
        """Of this process; a point that still runs keeps its part."""
        self._host_used -= place.host_bytes
        _close_files(place.locks)

    def _free(self, names: Sequence[str], count: int) -> dict[str, int] | None:
        """``count`` of the files, locked, or None of them."""
        taken: dict[str, int] = {}
        for name in names:
            if len(taken) == count:
                break
            file = os.open(self._folder / name.replace("/", "-"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
            else:
                taken[name] = file
        if len(taken) == count:
            return taken
        _close_files(taken.values())
        return None


def _gpu_names(machine: MachineInfo, selection: str | None) -> list[str]:
    """Of the GPUs that are visible, what selects each of them: its UUID, so that every sweep means the same one by it; else what
    was selected by."""
    entries = (
        [entry.strip() for entry in selection.split(",")]
        if selection
        else [str(index) for index in range(len(machine.gpus))]
    )
    return [gpu.uuid or entry for gpu, entry in zip(machine.gpus, entries, strict=False)]


def _close_files(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)
