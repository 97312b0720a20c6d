"""Hashes on a GPU equal those of a CPU, run at memory bandwidth, and do not block the host."""

from __future__ import annotations

import time

import pytest
import torch

from toolkit.cluster.world.machine_info import detect_machine
from toolkit.engine.hashing import hash_tensors
from toolkit.observe.replicas import PendingHashes
from toolkit.plan.devices import find_gpu
from toolkit.testing.dist import RankPool

pytestmark = pytest.mark.gpu

GIB = 2**30


def both(rank: int, ranks: int) -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((3,), (1000, 7), (4096, 513))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    gpu = torch.device("cuda", 0)
    return hash_tensors(tensors, torch.device("cpu")).tolist(), hash_tensors(
        [tensor.to(gpu) for tensor in tensors], gpu
    ).tolist()


def timed(rank: int, ranks: int) -> tuple[float, float, float]:
    """Seconds of the device for 4 GiB in 64 tensors, and of the host to enqueue it and to get the result."""
    gpu = torch.device("cuda", 0)
    tensors = [torch.ones(2**25, dtype=torch.bfloat16, device=gpu) for _ in range(64)]
    PendingHashes(hash_tensors(tensors, gpu)).wait()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    start.record()
    pending = PendingHashes(hash_tensors(tensors, gpu))
    end.record()
    asked = time.perf_counter() - began
    pending.wait()
    answered = time.perf_counter() - began
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, asked, answered


def test_gpu_hashes_equal_cpu_hashes(gpu: RankPool) -> None:
    (answers,) = gpu.run(both)
    assert answers[0] == answers[1]


def test_hashing_runs_at_memory_bandwidth(gpu: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    ((device, asked, answered),) = gpu.run(timed)
    with capsys.disabled():
        print(f"hashing takes {device / 4 * 1e3:.2f} ms per GiB, and {asked * 1e3:.1f} ms of the host for 64")
    assert answered >= asked
    known = find_gpu(detect_machine().gpus[0].product)
    if known is not None:
        assert device < 4 * (4 * GIB / known.bandwidth) + 64 * 50e-6
