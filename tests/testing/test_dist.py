"""Ranks for tests: results, failures, timeouts, and no leftover processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from toolkit.plan.devices import HIDE_GPUS
from toolkit.testing import dist as dist_module
from toolkit.testing.dist import RankPool, RanksFailed, _SpawnedRanks, rank_pool, run_ranks


def add_up(rank: int, ranks: int, start: int) -> tuple[int, int, int]:
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return int(total), dist.get_world_size(), os.getpid()


def fail_on_one(rank: int, ranks: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def die_on_one(rank: int, ranks: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_on_one(rank: int, ranks: int) -> int:
    if rank == 1:
        time.sleep(60)
    return os.getpid()


def give_tensors(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    return {"mine": torch.full((3,), float(rank))}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(3) as found:
        yield found


def test_every_rank_returns_and_is_reused(pool: RankPool) -> None:
    first = pool.run(add_up, 10)
    assert [answer[:2] for answer in first] == [(33, 3)] * 3
    assert pool.run(add_up, 10) == first, "the same processes"
    some = pool.run(add_up, 0, ranks=2)
    assert some == [(1, 2, first[0][2]), (1, 2, first[1][2])], "a group of their own"
    assert pool.run(add_up, 7, ranks=1) == [(7, 1, first[0][2])]


def test_tensors_are_returned(pool: RankPool) -> None:
    assert [answer["mine"].tolist() for answer in pool.run(give_tensors)] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_failure_is_reported_and_the_pool_recovers(pool: RankPool) -> None:
    before = {answer[2] for answer in pool.run(add_up, 0)}
    with pytest.raises(
        RanksFailed, match=r"(?s)rank 1: Traceback.*fail_on_one.*ValueError: rank one is unwell"
    ):
        pool.run(fail_on_one, timeout=20)
    assert gone(before)
    assert pool.run(add_up, 0)[0][:2] == (3, 3)


def test_dead_rank_is_reported(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="rank 1: the process died"):
        pool.run(die_on_one, timeout=20)


def test_timeout_is_enforced(pool: RankPool) -> None:
    started = time.monotonic()
    with pytest.raises(RanksFailed, match="did not return within 1 s"):
        pool.run(sleep_on_one, ranks=2, timeout=1)
    assert time.monotonic() - started < 5


def test_run_ranks_leaves_no_process() -> None:
    answers = run_ranks(add_up, 2, 1)
    assert gone({answer[2] for answer in answers})


@pytest.mark.full
def test_spawned_ranks() -> None:
    """As on GPUs, whose state does not survive a fork; here with gloo."""
    pool = RankPool(2)
    pool._source = _SpawnedRanks()
    first = pool.run(add_up, 10)
    assert [answer[:2] for answer in first] == [(21, 2)] * 2
    assert pool.run(add_up, 10) == first, "the same processes"
    with pytest.raises(RanksFailed, match="rank one is unwell"):
        pool.run(fail_on_one, timeout=20)
    assert gone({answer[2] for answer in first})
    pool.close()


def test_ranks_on_cpus_see_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries choose a GPU if they see one; the variables may select some for this process."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(dist_module.subprocess, "Popen", lambda *_, env, **__: started.append(env))
    for name in HIDE_GPUS:
        monkeypatch.setenv(name, "0,1")
    dist_module._ForkServer()
    assert {name: started[0][name] for name in HIDE_GPUS} == HIDE_GPUS
    assert started[0]["DS_ACCELERATOR"] == "cpu"


def gone(pids: set[int]) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
