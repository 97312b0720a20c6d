"""Host metrics: limits of both cgroup versions, this machine, and processes with their children.

pytest tests/monitor/test_host.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.train.fakes import FakeClock
from toolkit.monitor.system.host import TREE_SECONDS, HostMetrics, process_trees, read_cgroup_memory
from toolkit.monitor.system.metrics import (
    COLLECTED_BY_WANDB,
    CounterRates,
    SteadyMetricFilter,
    without_wandb_metrics,
)

MIB = 2**20
ALWAYS = {
    "host/cpu_percent",
    "host/load_1m",
    "host/memory_total_bytes",
    "host/memory_used_bytes",
    "host/memory_available_bytes",
    "host/swap_used_bytes",
    "disk/total_bytes",
    "disk/free_bytes",
    "network/receive_bytes_per_second",
    "network/send_bytes_per_second",
    "process/resident_bytes",
    "process/private_bytes",
    "process/open_files",
    "rank/5/private_bytes",
}
# Allocates memory and starts a child that does the same.
HOLD = """
import subprocess, sys
size, more = int(sys.argv[1]), sys.argv[2:]
memory = bytearray(b"x" * (size << 20))
command = [sys.executable, "-c", sys.argv[0], *more]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) if more else None
if child:
    child.stdout.readline()
print("ready", flush=True)
sys.stdin.readline()
if child:
    child.communicate(b"end")
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.fixture
def two_processes() -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.argv[0] = {HOLD!r}; exec(sys.argv[0])", "40", "60"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process.pid
    process.communicate(b"end", timeout=30)


def test_cgroup_v2_limit_excludes_page_cache(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kubepods/pod"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod/run\n",
            f"{group}/run/memory.max": "max\n",
            f"{group}/run/memory.current": "10\n",
            f"{group}/memory.max": "1000\n",
            f"{group}/memory.current": "900\n",
            f"{group}/memory.stat": "anon 300\nactive_file 200\ninactive_file 350\nshmem 50\n",
        },
    )
    assert read_cgroup_memory(root) == (1000, 350)


def test_tightest_cgroup_limit_is_used(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/a"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{base}/memory.max": "1000\n",
            f"{base}/memory.current": "950\n",
            f"{base}/memory.stat": "anon 950\n",
            f"{base}/b/memory.max": "500\n",
            f"{base}/b/memory.current": "100\n",
            f"{base}/b/memory.stat": "anon 100\n",
        },
    )
    assert read_cgroup_memory(root) == (1000, 950)


def test_cgroup_v1_limit(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/x\n0::/\n",
            f"{base}/memory.limit_in_bytes": "9223372036854771712\n",
            f"{base}/memory.usage_in_bytes": "5\n",
            f"{base}/docker/x/memory.limit_in_bytes": "2000\n",
            f"{base}/docker/x/memory.usage_in_bytes": "1500\n",
            f"{base}/docker/x/memory.stat": "total_active_file 300\ntotal_inactive_file 200\nactive_file 1\n",
        },
    )
    assert read_cgroup_memory(root) == (2000, 1000)


def test_cgroup_root_of_a_container_is_used(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/x\n",
            f"{base}/memory.limit_in_bytes": "2000\n",
            f"{base}/memory.usage_in_bytes": "1500\n",
            f"{base}/memory.stat": "total_inactive_file 500\n",
        },
    )
    assert read_cgroup_memory(root) == (2000, 1000)
    assert read_cgroup_memory(write(tmp_path / "none", {"proc/self/cgroup": "0::/\n"})) is None
    assert read_cgroup_memory(tmp_path / "no-proc") is None


def test_metrics_of_this_machine_are_consistent(tmp_path: Path) -> None:
    clock = FakeClock()
    host = HostMetrics(tmp_path / "not" / "yet", {5: os.getpid()}, clock=clock)
    first = host.read()
    clock.now += 10
    row = host.read()
    assert row.keys() >= ALWAYS
    assert not any("per_second" in name for name in first)
    assert all(isinstance(value, int | float) and value >= 0 for value in row.values()), row
    memory = psutil.virtual_memory()
    assert row["host/memory_total_bytes"] == memory.total
    assert float(row["host/memory_available_bytes"]) <= memory.total
    assert abs(float(row["disk/free_bytes"]) - psutil.disk_usage(str(tmp_path)).free) < 1e9
    # Including children that other tests in this process may have left.
    expected = sum(
        memory.rss - memory.shared
        for memory in (process.memory_info() for process in process_trees({5: os.getpid()})[5])
    )
    assert abs(float(row["rank/5/private_bytes"]) - expected) < 100 * MIB


def test_disk_and_rdma_rates_come_from_kernel_counters(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    disk, port = (
        f"sys/dev/block/{os.major(device)}:{os.minor(device)}/stat",
        "sys/class/infiniband/mlx5_0/ports/1/counters",
    )
    root = write(
        tmp_path / "root",
        {
            disk: "1 0 100 7 2 0 400 9 0 3 4\n",
            f"{port}/port_rcv_data": "1000\n",
            f"{port}/port_xmit_data": "0\n",
        },
    )
    clock = FakeClock()
    host = HostMetrics(tmp_path, {}, root=root, clock=clock)
    host.read()
    write(root, {disk: "1 0 300 7 2 0 1400 9 0 3 4\n", f"{port}/port_rcv_data": "51000\n"})
    clock.now += 10
    row = host.read()
    assert row["disk/read_bytes_per_second"] == 200 * 512 / 10
    assert row["disk/write_bytes_per_second"] == 1000 * 512 / 10
    assert row["network/rdma_receive_bytes_per_second"] == 50_000 * 4 / 10
    assert row["network/rdma_send_bytes_per_second"] == 0


def test_child_processes_count_for_their_rank(two_processes: int, tmp_path: Path) -> None:
    clock = FakeClock()
    host = HostMetrics(tmp_path, {0: os.getpid(), 1: two_processes, 2: 2**22 + 1}, clock=clock)
    row = host.read()
    assert 100 * MIB < float(row["rank/1/private_bytes"]) < 160 * MIB
    assert "rank/2/private_bytes" not in row
    found = process_trees({0: os.getpid(), 1: two_processes})
    assert len(found[1]) == 2
    assert two_processes not in {process.pid for process in found[0]}
    # Ended processes are omitted; new ones are found a minute later.
    found[1][1].kill()
    while found[1][1].status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    less = host.read()
    assert float(less["rank/1/private_bytes"]) < float(row["rank/1/private_bytes"]) - 50 * MIB
    clock.now += TREE_SECONDS
    assert float(host.read()["rank/1/private_bytes"]) > 30 * MIB


# ---- rates, and what is written


def test_rate_is_the_increase_per_second() -> None:
    rates = CounterRates()
    assert rates.per_second("a", 100, 1.0) is None
    assert rates.per_second("a", 160, 4.0) == 20
    assert rates.per_second("b", 5, 4.0) is None
    assert rates.per_second("a", 10, 5.0) is None  # the counter was reset
    assert rates.per_second("a", 12, 5.0) is None  # no time has passed
    assert rates.per_second("a", 16, 6.0) == 4


def test_steady_metrics_are_written_when_they_change() -> None:
    thrifty = SteadyMetricFilter()
    row = {"step": 1, "gpu/0/name": "H100", "gpu/0/ecc_corrected_errors": 0, "gpu/0/utilization_percent": 97}
    assert thrifty(dict(row)) == row
    assert thrifty({**row, "step": 2}) == {"step": 2, "gpu/0/utilization_percent": 97}
    changed = {**row, "step": 3, "gpu/0/ecc_corrected_errors": 1}
    assert thrifty(changed) == {"step": 3, "gpu/0/ecc_corrected_errors": 1, "gpu/0/utilization_percent": 97}


def test_metrics_collected_by_wandb_are_dropped() -> None:
    row = {
        "step": 4,
        "node": 1,
        "time": 1.78e9,
        "gpu/3/power_watts": 612.0,
        "gpu/3/throttled": 1,
        "gpu/power_watts_sum": 5000.0,
        "disk/free_bytes": 5,
        "host/load_1m": 2.0,
        "rank/1/private_bytes": 7,
    }
    assert without_wandb_metrics(row) == {
        "step": 4,
        "gpu/3/throttled": 1,
        "gpu/power_watts_sum": 5000.0,
        "host/load_1m": 2.0,
        "rank/1/private_bytes": 7,
    }
    assert all(name.count("/") == 1 for name in COLLECTED_BY_WANDB)
