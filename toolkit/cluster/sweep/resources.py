"""Share the GPUs and cores of this machine among the points of all sweeps of this user.

Each GPU and core is a lock file. A point's process inherits the locks, so the resources of an orphan stay
reserved.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.sweep.points import planned_host_bytes
from toolkit.cluster.world.machine_info import MachineInfo
from toolkit.errors import InputError, Problem
from toolkit.plan.types import Device, RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResources:
    gpus: int  # 0: the point runs on the CPU
    cores: int  # cores of a CPU point; 0: any
    threads: int  # intra-op threads per rank
    host_bytes: int  # 0: unknown


def compute_resources(plan: RunPlan, machine: MachineInfo, points: int) -> PointResources:
    """Compute what a point needs of ``machine``.

    A CPU point has at least one core per rank, or an equal share of the cores if there are more cores than
    points.

    Args:
        points: number of points to run at a time, resources permitting.
    """
    ranks, written = plan.world.ranks_per_node, plan.config.debug.threads
    if plan.world.device is Device.CUDA:
        part = machine.cores * ranks // max(1, len(machine.gpus))
        return PointResources(
            gpus=ranks, cores=0, threads=written or max(1, part // ranks), host_bytes=planned_host_bytes(plan)
        )
    cores = ranks * written if written else max(ranks, machine.cores // max(1, points))
    cores = min(cores, machine.cores)
    return PointResources(
        gpus=0, cores=cores, threads=written or max(1, cores // ranks), host_bytes=planned_host_bytes(plan)
    )


@dataclass(slots=True)
class Reservation:
    """The resources reserved for one point."""

    gpus: tuple[str, ...]  # entries of CUDA_VISIBLE_DEVICES
    cores: tuple[int, ...]  # empty: any
    host_bytes: int
    locks: tuple[int, ...]  # file descriptors

    def build_environ(self, needed: PointResources, base: Mapping[str, str]) -> dict[str, str]:
        """Return ``base`` with the point's own variables; an OMP_NUM_THREADS in ``base`` stays."""
        own = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        return {"OMP_NUM_THREADS": str(needed.threads), **base, **own}


class ResourcePool:
    """The lockable resources of this machine.

    Args:
        folder: of the lock files; None: the default folder of this user and machine.

    Raises:
        InputError: the folder belongs to another user.
    """

    def __init__(self, machine: MachineInfo, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"toolkit-slots-{os.getuid()}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (owner := self._folder.stat().st_uid) != os.getuid():
            raise InputError(
                Problem(
                    "TMPDIR",
                    f"{self._folder}, which belongs to user {owner}",
                    "the lock files must belong to the user who runs the points",
                    "remove it, or set TMPDIR to your own folder on this machine",
                )
            )
        self._gpus = _gpu_names(machine, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._cores = sorted(os.sched_getaffinity(0))[: machine.cores]
        self._host_bytes = machine.host_memory_bytes
        self._host_used = 0

    def acquire(self, needed: PointResources) -> Reservation | None:
        """Reserve resources; None if they are not free now. Host memory counts only this process's points."""
        if (
            self._host_bytes is not None
            and self._host_used
            and self._host_used + needed.host_bytes > self._host_bytes
        ):
            return None
        guard = os.open(self._folder / "guard", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # held only during this call, so that two sweeps cannot each take half of what both need
            fcntl.flock(guard, fcntl.LOCK_EX)
            gpus = self._free([f"gpu-{name}" for name in self._gpus], needed.gpus)
            if gpus is None:
                return None
            cores = self._free([f"core-{core}" for core in self._cores], needed.cores)
            if cores is None:
                _close_files(gpus.values())
                return None
        finally:
            os.close(guard)
        self._host_used += needed.host_bytes
        return Reservation(
            tuple(name.removeprefix("gpu-") for name in gpus),
            tuple(int(name.removeprefix("core-")) for name in cores),
            needed.host_bytes,
            (*gpus.values(), *cores.values()),
        )

    def release(self, reservation: Reservation) -> None:
        """Release this process's locks; a point that still runs keeps its own."""
        self._host_used -= reservation.host_bytes
        _close_files(reservation.locks)

    def _free(self, names: Sequence[str], count: int) -> dict[str, int] | None:
        """Lock ``count`` of the files, or none and return None."""
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
    """Return a name for each visible GPU: its UUID, which is the same in every sweep, else its entry in
    ``selection``.
    """
    entries = (
        [entry.strip() for entry in selection.split(",")]
        if selection
        else [str(index) for index in range(len(machine.gpus))]
    )
    return [gpu.uuid or entry for gpu, entry in zip(machine.gpus, entries, strict=False)]


def _close_files(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)
