"""A rank runs on the cores near its GPU, unless it is bound already."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from toolkit.cluster.cpu_affinity import bind_to_gpu
from toolkit.cluster.world.machine_info import GpuInfo

GPUS = [GpuInfo("H100", None, "GPU-a"), GpuInfo("H100", None, "GPU-b")]
NEAR = {"GPU-a": {0, 1}, "GPU-b": {2, 3}}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Two NUMA nodes of two cores, each with a GPU."""
    for number, cores in enumerate(("0-1", "2-3")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores + "\n")
    state = SimpleNamespace(cores={0, 1, 2, 3}, nodes=tmp_path, refuses=False)

    def set_affinity(uuid: str) -> None:
        if state.refuses:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        state.cores = NEAR[uuid]

    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: state.cores)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceSetCpuAffinity", set_affinity)
    return state


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_runs_on_the_cores_of_its_gpus_node(rank: int, machine: SimpleNamespace) -> None:
    assert bind_to_gpu(GPUS, rank, machine.nodes)
    assert machine.cores == NEAR[GPUS[rank].uuid]


def test_rank_that_the_launcher_has_bound_stays_there(machine: SimpleNamespace) -> None:
    machine.cores = {2}
    assert not bind_to_gpu(GPUS, 0, machine.nodes)
    assert machine.cores == {2}


def test_one_numa_node_needs_no_binding(machine: SimpleNamespace, tmp_path: Path) -> None:
    (machine.nodes / "node1" / "cpulist").unlink()
    (machine.nodes / "node1").rmdir()
    assert not bind_to_gpu(GPUS, 0, machine.nodes)


def test_gpu_without_affinity_is_a_warning(
    machine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    machine.refuses = True
    assert not bind_to_gpu(GPUS, 0, machine.nodes)
    assert "not bound" in caplog.text
