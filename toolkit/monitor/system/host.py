"""Metrics of a node's host: processors, memory, the disk of the run's directory, network, and the ranks'
processes.

Linux's own files provide what psutil does not. Metrics that the machine lacks (no block device under the
run's directory, no memory limit) are omitted.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from toolkit.monitor.system.metrics import CounterRates, SystemMetrics

SECTOR = 512  # bytes, in /sys/block, independent of the device: Documentation/block/stat.rst of Linux
WORD = 4  # bytes: InfiniBand's data counters count words
TREE_SECONDS = 60.0  # between two searches for child processes, which read every process of the machine


class HostMetrics:
    """Reads the metrics of this host. Use it from one thread, because a hanging file system blocks it.

    Args:
        run_dir: the directory whose disk is measured.
        ranks: process id of each rank of this node, by rank.
        root: the root of the file system; tests use a fake one.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: Mapping[int, int],
        *,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir, self._ranks, self._root, self._clock = run_dir, dict(ranks), root, clock
        self._rates = CounterRates()
        self._trees: dict[int, list[psutil.Process]] = {}
        self._trees_at: float | None = None

    def read(self) -> SystemMetrics:
        """Return ``host/`` (the machine), ``disk/`` (of the run's directory), ``network/`` (all interfaces
        except the loopback), ``process/`` (the ranks and their children) and ``rank/3/private_bytes`` (one
        rank).
        """
        return {**self._host(), **self._disk(), **self._network(), **self._processes()}

    def _host(self) -> SystemMetrics:
        busy = psutil.cpu_percent()  # since this thread's last call; the first value is meaningless
        memory = psutil.virtual_memory()
        limit = read_cgroup_memory(self._root)
        available = memory.available if limit is None else min(memory.available, limit[0] - limit[1])
        return {
            **({"host/cpu_percent": busy} if self._trees_at is not None else {}),
            "host/load_1m": round(os.getloadavg()[0], 2),
            "host/memory_total_bytes": memory.total,
            "host/memory_used_bytes": memory.total - memory.available,
            "host/memory_available_bytes": max(0, available),
            "host/swap_used_bytes": psutil.swap_memory().used,
            **(
                {}
                if limit is None
                else {"host/memory_limit_bytes": limit[0], "host/memory_limited_used_bytes": limit[1]}
            ),
        }

    def _disk(self) -> SystemMetrics:
        # On a node with a local disk the directory may not exist yet.
        folder = next(one for one in (self._run_dir, *self._run_dir.parents) if one.exists())
        usage = psutil.disk_usage(str(folder))
        metrics: SystemMetrics = {"disk/total_bytes": usage.total, "disk/free_bytes": usage.free}
        device = folder.stat().st_dev
        counters = self._root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}/stat"
        if counters.exists():  # absent for network file systems and overlays
            fields = counters.read_text(encoding="ascii").split()
            metrics |= self._per_second(
                {"disk/read": int(fields[2]) * SECTOR, "disk/write": int(fields[6]) * SECTOR}
            )
        return metrics

    def _network(self) -> SystemMetrics:
        interfaces = [counts for name, counts in psutil.net_io_counters(pernic=True).items() if name != "lo"]
        counts = {
            "network/receive": sum(interface.bytes_recv for interface in interfaces),
            "network/send": sum(interface.bytes_sent for interface in interfaces),
        }
        # RDMA bypasses the kernel and is counted only by the InfiniBand or RoCE port.
        for name, file in (
            ("network/rdma_receive", "port_rcv_data"),
            ("network/rdma_send", "port_xmit_data"),
        ):
            ports = list(self._root.glob(f"sys/class/infiniband/*/ports/*/counters/{file}"))
            if ports:
                counts[name] = WORD * sum(int(port.read_text(encoding="ascii")) for port in ports)
        return self._per_second(counts)

    def _per_second(self, counts: Mapping[str, int]) -> SystemMetrics:
        now = self._clock()
        rates = {name: self._rates.per_second(name, count, now) for name, count in counts.items()}
        return {f"{name}_bytes_per_second": round(rate) for name, rate in rates.items() if rate is not None}

    def _processes(self) -> SystemMetrics:
        now = self._clock()
        if self._trees_at is None or now - self._trees_at >= TREE_SECONDS:
            self._trees, self._trees_at = process_trees(self._ranks), now
        metrics: SystemMetrics = {}
        resident = private = files = 0
        for rank, tree in self._trees.items():
            own = 0
            for process in tree:
                try:
                    memory, descriptors = process.memory_info(), process.num_fds()
                except psutil.Error:  # it has ended, or belongs to another user
                    continue
                # Pages of files and shared memory belong to several processes, and the page cache can be
                # reclaimed, so they are no leak.
                resident, own, files = (
                    resident + memory.rss,
                    own + memory.rss - memory.shared,
                    files + descriptors,
                )
            metrics[f"rank/{rank}/private_bytes"] = own
            private += own
        return {
            "process/resident_bytes": resident,
            "process/private_bytes": private,
            "process/open_files": files,
            **metrics,
        }


def process_trees(roots: Mapping[int, int]) -> dict[int, list[psutil.Process]]:
    """Return each process of ``roots`` with all its descendants, by the keys of ``roots``. Ended roots are
    omitted.
    """
    children: defaultdict[int, list[psutil.Process]] = defaultdict(list)
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["ppid"]):
        processes[process.pid] = process
        children[process.info["ppid"]].append(process)
    processes_by_rank: dict[int, list[psutil.Process]] = {}
    for key, pid in roots.items():
        if pid not in processes:
            continue
        tree = [processes[pid]]
        for process in tree:  # the list grows while iterating
            tree += [child for child in children[process.pid] if child.pid not in roots.values()]
        processes_by_rank[key] = tree
    return processes_by_rank


def read_cgroup_memory(root: Path) -> tuple[int, int] | None:
    """Return the tightest memory limit of this process and its usage without page cache, in bytes; None
    without a limit.

    Supports both versions of Linux's control groups: Documentation/admin-guide/cgroup-v2.rst and
    cgroup-v1/memory.rst. Every group from the process' own up to the root may have a limit; in a container
    the visible root is its own group.
    """
    own = root / "proc/self/cgroup"
    limits: list[tuple[int, int]] = []
    for line in own.read_text(encoding="utf-8").splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, limit, used, prefix = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_",
            )
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            most = _number(folder / limit)
            now = _number(folder / used)
            # version 1 writes "no limit" as a huge number
            if most is not None and now is not None and most < 1 << 60:
                statistics = dict(
                    pair.split() for pair in (folder / "memory.stat").read_text(encoding="ascii").splitlines()
                )
                cache = sum(
                    int(statistics.get(f"{prefix}{kind}", 0)) for kind in ("active_file", "inactive_file")
                )
                limits.append((most, max(0, now - cache)))
    return min(limits, key=lambda pair: pair[0] - pair[1], default=None)


def _number(file: Path) -> int | None:
    """Return the number in a file; None if it does not exist or contains ``max``."""
    text = file.read_text(encoding="ascii").strip() if file.exists() else ""
    return int(text) if text.isdigit() else None
