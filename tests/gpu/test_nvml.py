"""NVML's figures compared with nvidia-smi's, on a busy GPU."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.monitor.system import gpu as nvml_gpus
from toolkit.monitor.system.gpu import Gpus, XidEvents
from toolkit.monitor.system.sampler import GpuSource, Sampler, Source

pytestmark = pytest.mark.gpu

# Names of nvidia-smi (nvidia-smi --help-query-gpu): our name, unit conversion, tolerance (a busy GPU
# changes).
STEADY = {
    "uuid": ("uuid", str),
    "name": ("name", str),
    "memory.total": ("memory_total_bytes", lambda text: int(text) * 2**20),
    "power.limit": ("power_limit_watts", float),
    "clocks.max.sm": ("sm_clock_max_mhz", int),
    "clocks.max.memory": ("memory_clock_max_mhz", int),
    "ecc.errors.corrected.volatile.total": ("ecc_corrected_errors", int),
    "ecc.errors.uncorrected.volatile.total": ("ecc_uncorrected_errors", int),
}
MOVING = {
    "utilization.gpu": ("utilization_percent", 1, 5),
    "memory.used": ("memory_used_bytes", 2**20, 64 * 2**20),
    "power.draw": ("power_watts", 1, 60),
    "temperature.gpu": ("temperature_celsius", 1, 4),
    "clocks.sm": ("sm_clock_mhz", 1, 150),
    "clocks.mem": ("memory_clock_mhz", 1, 0),
}
ABSENT = ("[N/A]", "[Not Supported]", "N/A")


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    found = nvml_gpus.open_gpus(nvml_gpus.load(), 1, os.environ.get("CUDA_VISIBLE_DEVICES"))
    assert found is not None
    yield found
    found.close()


@pytest.fixture
def at_work() -> Iterator[None]:
    """bf16 matrix products without a pause."""
    over = threading.Event()

    def work() -> None:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        while not over.is_set():
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(3)
    yield
    over.set()
    thread.join()


def nvidia_smi(names: list[str], uuid: str) -> dict[str, str]:
    command = [
        "nvidia-smi",
        f"--id={uuid}",
        f"--query-gpu={','.join(names)}",
        "--format=csv,noheader,nounits",
    ]
    line = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return dict(zip(names, line.split(", "), strict=True))


def figures(gpus: Gpus) -> dict[str, Any]:
    return {name.removeprefix("gpu/0/"): value for name, value in gpus.read().items()}


def test_torch_and_nvml_select_the_same_gpu(gpus: Gpus) -> None:
    assert str(torch.cuda.get_device_properties(0).uuid) in gpus.cards[0].uuid


def test_figures_match_nvidia_smi(gpus: Gpus, at_work: None) -> None:
    ours = figures(gpus)
    theirs = nvidia_smi([*STEADY, *MOVING], gpus.cards[0].uuid)
    compared = 0
    for name, (mine, make) in STEADY.items():
        if theirs[name] not in ABSENT:
            assert ours[mine] == make(theirs[name]), name
            compared += 1
    for name, (mine, unit, tolerance) in MOVING.items():
        if theirs[name] not in ABSENT:
            assert abs(ours[mine] - float(theirs[name]) * unit) <= tolerance, (name, ours[mine], theirs[name])
            compared += 1
    assert compared >= 10


def test_busy_gpu_shows_utilization(gpus: Gpus, at_work: None) -> None:
    figures(gpus)
    time.sleep(2)
    row = figures(gpus)
    assert row["utilization_percent"] > 90
    assert row["power_watts"] > 0.4 * row["power_limit_watts"]
    assert 0.3 < row["sm_clock_ratio"] <= 1.0
    assert row["throttle_reasons"] != "idle"
    if torch.cuda.get_device_capability() >= (9, 0):
        assert row["tensor_active_percent"] > 30
        assert row["sm_active_percent"] > 80
        assert row["pcie_tx_bytes_per_second"] >= 0


def test_nvml_events_can_be_waited_for(gpus: Gpus) -> None:
    events = XidEvents(nvml_gpus.load(), gpus.cards)
    assert events.watched == 1
    began = time.monotonic()
    assert events.wait(300) is None
    assert 0.2 < time.monotonic() - began < 2
    events.close()


def test_sampling_is_cheap(gpus: Gpus, tmp_path: Path) -> None:
    rows: list[Any] = []
    source = GpuSource(
        lambda: gpus, lambda opened: XidEvents(nvml_gpus.load(), opened.cards), xid=lambda *_: None, say=print
    )
    sampler = Sampler(
        node=0,
        seconds=0.5,
        sources=[Source("gpu", source.read, print)],
        log=rows.append,
        detect=lambda row: [],
        alert=print,
        tell=print,
    )
    sampler.start()
    time.sleep(5)
    source.stop()
    sampler.close()
    taken = sorted(row["sample_seconds"] for row in rows[1:])
    print(
        f"a sample of one GPU takes {taken[len(taken) // 2] * 1e3:.1f} ms (median of {len(taken)}), "
        f"{taken[-1] * 1e3:.1f} ms at most"
    )
    assert taken[len(taken) // 2] < 0.25
