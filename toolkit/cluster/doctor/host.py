"""Check memory, shared memory, CPU cores and limits of a machine."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from toolkit.cluster.doctor.types import (
    CheckFinding,
    DoctorCheck,
    RunRequirements,
    fail,
    format_size,
    ok,
    unknown,
    warn,
)
from toolkit.plan.types import Device

# ---- shared memory

SHARED = Path("/dev/shm")
# NCCL user guide, Troubleshooting, "Shared memory": containers get 64 MB, which is too little; 1 GB is
# recommended.
RECOMMENDED_SHARED_BYTES = 1 << 30
DOCKER_SHARED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SharedMemory:
    total_bytes: int
    free_bytes: int


def measure_shared(requirements: RunRequirements) -> SharedMemory:
    statistics = os.statvfs(SHARED)
    return SharedMemory(statistics.f_blocks * statistics.f_frsize, statistics.f_bavail * statistics.f_frsize)


def assess_shared(shared: SharedMemory, requirements: RunRequirements) -> Iterator[CheckFinding]:
    seen = f"{format_size(shared.free_bytes)} free of {format_size(shared.total_bytes)}"
    remedy = (
        "docker run --shm-size=16g, cluster.kubernetes.shared_memory_gib=16, or: mount -o "
        "remount,size=16G /dev/shm; or delete files that ended runs left there"
    )
    if requirements.device is Device.CPU or requirements.ranks_per_node == 1:
        yield ok(f"{seen}; not used by this run")
    elif shared.free_bytes <= DOCKER_SHARED_BYTES:
        yield fail(f"{seen}: NCCL connects the ranks of a machine through it, and needs about 1 GiB", remedy)
    elif shared.free_bytes < RECOMMENDED_SHARED_BYTES:
        yield warn(f"{seen}: NCCL's guide recommends 1 GiB", remedy)
    else:
        yield ok(seen)


# ---- memory


@dataclass(frozen=True, slots=True)
class HostMemory:
    total_bytes: int
    available_bytes: int


def measure_memory(requirements: RunRequirements) -> HostMemory:
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    total, available = (
        int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024  # type: ignore[index]
        for name in ("MemTotal", "MemAvailable")
    )
    limit, used = (_number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None:  # memory limit of the container
        total, available = min(total, limit), min(available, limit - (used or 0))
    return HostMemory(total, available)


def assess_memory(memory: HostMemory, requirements: RunRequirements) -> Iterator[CheckFinding]:
    seen = f"{format_size(memory.available_bytes)} available of {format_size(memory.total_bytes)}"
    if requirements.host_bytes is None:
        yield unknown(f"{seen}; memory use of the run unknown")
    elif requirements.host_bytes > memory.available_bytes:
        yield fail(
            f"{seen}; the run's {requirements.ranks_per_node} ranks here need "
            f"{format_size(requirements.host_bytes)}",
            "end other processes, use more machines or a smaller model, or offload less to host memory",
        )
    else:
        yield ok(f"{seen}; the run needs {format_size(requirements.host_bytes)} for states and activations")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


# ---- cores


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuCores:
    """The CPU cores of a machine.

    Attributes:
        usable: cores that this process may use.
        numa: cores of each NUMA node.
        balancing: the kernel migrates pages between NUMA nodes.
    """

    usable: frozenset[int]
    numa: tuple[frozenset[int], ...]
    balancing: bool = False


def measure_cores(requirements: RunRequirements) -> CpuCores:
    folders = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    numa = (parse_cpu_list((folder / "cpulist").read_text(encoding="utf-8")) for folder in folders)
    return CpuCores(
        usable=frozenset(os.sched_getaffinity(0)),
        numa=tuple(cores for cores in numa if cores),
        balancing=_number(Path("/proc/sys/kernel/numa_balancing")) == 1,
    )


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a CPU list of the kernel: ``0-3,8``."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(core for first, _, last in spans for core in range(int(first), int(last or first) + 1))


def assess_cores(cores: CpuCores, requirements: RunRequirements) -> Iterator[CheckFinding]:
    seen = f"{len(cores.usable)} cores on {len(cores.numa) or 1} NUMA node{'s' * (len(cores.numa) > 1)}"
    if len(cores.usable) < requirements.ranks_per_node:
        yield warn(
            f"{seen} for {requirements.ranks_per_node} ranks, which will wait for each other",
            "request more cores (cluster.slurm.cpus_per_task, cluster.kubernetes.cpus), or start fewer ranks",
        )
        return
    left_out = [number for number, own in enumerate(cores.numa) if not own & cores.usable]
    if requirements.device is Device.CUDA and left_out and requirements.ranks_per_node > 1:
        yield warn(
            f"{seen}; none on NUMA node {', '.join(map(str, left_out))}: its GPUs are fed from a remote node",
            "request the cores of the whole machine (srun --cpu-bind=none, cluster.slurm.cpus_per_task)",
        )
    elif requirements.device is Device.CUDA and cores.balancing and len(cores.numa) > 1:
        yield warn(
            f"{seen}; the kernel migrates pages between them while ranks use them",
            "sysctl kernel.numa_balancing=0",
        )
    else:
        yield ok(seen)


# ---- limits

MIN_FILES, RECOMMENDED_FILES = 256, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Soft and hard limits of this process; None: unlimited. ``rdma``: there are RDMA devices, which need
    locked memory.
    """

    files: int | None
    files_hard: int | None
    locked_bytes: int | None
    rdma: bool


def measure_limits(requirements: RunRequirements) -> ProcessLimits:
    files, files_hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    locked = _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    devices = Path("/sys/class/infiniband")
    return ProcessLimits(
        files=files,
        files_hard=files_hard,
        locked_bytes=locked,
        rdma=devices.is_dir() and any(devices.iterdir()),
    )


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def assess_limits(limits: ProcessLimits, requirements: RunRequirements) -> Iterator[CheckFinding]:
    files = "unlimited" if limits.files is None else f"{limits.files:,}"
    if limits.files is not None and limits.files < RECOMMENDED_FILES:
        higher = limits.files_hard is None or limits.files_hard >= RECOMMENDED_FILES
        by_root = (
            "(only root can raise the hard limit: /etc/security/limits.conf, docker run --ulimit nofile)"
        )
        files_to_ask = 65536
        if higher and limits.files_hard is not None:
            files_to_ask = min(files_to_ask, limits.files_hard)
        remedy = f"ulimit -n {files_to_ask}{'' if higher else by_root}"
        # Needed for sockets between all ranks, data shards and libraries; importing the engines alone takes
        # about a hundred.
        make = fail if limits.files < MIN_FILES or limits.files < 4 * requirements.ranks else warn
        yield make(f"{files} open files per process (ulimit -n)", remedy)
    else:
        yield ok(f"{files} open files per process")
    if not limits.rdma:
        yield ok("locked memory: not needed without RDMA devices")
    elif limits.locked_bytes is not None:
        # NCCL's and libfabric's guides: RDMA buffers are locked memory, and ibv_reg_mr fails at the limit.
        yield fail(
            f"{format_size(limits.locked_bytes)} of locked memory (ulimit -l), but RDMA buffers must be "
            "locked",
            "ulimit -l unlimited (docker run --ulimit memlock=-1; "
            "under Slurm PropagateResourceLimitsExcept=MEMLOCK)",
        )
    else:
        yield ok("locked memory: unlimited")


CHECKS = (
    DoctorCheck(
        name="shared memory",
        how="size and free space of /dev/shm",
        measure=measure_shared,
        assess=assess_shared,
    ),
    DoctorCheck(
        name="host memory",
        how="MemAvailable and the container's limit, compared with the plan",
        measure=measure_memory,
        assess=assess_memory,
    ),
    DoctorCheck(
        name="cores",
        how="CPU affinity of the process and /sys/devices/system/node",
        measure=measure_cores,
        assess=assess_cores,
    ),
    DoctorCheck(
        name="limits",
        how="limits of this process, which its ranks inherit",
        measure=measure_limits,
        assess=assess_limits,
    ),
)
