"""The communication benchmark finds each axis' group on both engines, names a slow one, and changes no loss.

pytest tests/observe/test_comm_benchmark.py             one axis
pytest tests/observe/test_comm_benchmark.py -m full     all axes
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.captured import captured_logs
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.rank_sync import GlooFlagReduce
from toolkit.layout.axes import ORDER, Axis
from toolkit.monitor.sink import Sink
from toolkit.observe import comm_benchmark
from toolkit.observe.comm_benchmark import CommBenchmark, find_group, peers_along
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.parity import train_steps
from toolkit.testing.tiny import tiny_plan
from toolkit.train.task import text_task


def run_benchmark(rank: int, plan: RunPlan, device: torch.device, folder: Path) -> dict[str, Any]:
    transfer_times: list[Callable[[int], float]] = []
    hook = CommBenchmark(
        plan,
        device,
        GlooFlagReduce(),
        rank=rank,
        file=folder / "attempts" / "001" / "probe.json",
        sink=Sink(),
        set_transfer_time=transfer_times.append,
    )
    start = time.monotonic()
    with captured_logs() as (messages, _):
        hook.on_start(0)
    seconds = [transfer(size) for transfer in transfer_times for size in (0, 2**20, 2**24)]
    return {"messages": messages, "transfers": seconds, "seconds": time.monotonic() - start}


def train_cell(rank: int, ranks: int, cell: Cell, folder: Path, benchmark: bool) -> dict[str, Any]:
    plan = cell.plan(OptimizerCase.ADAM)
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    found = run_benchmark(rank, plan, engine.device, folder) if benchmark else {}
    results = train_steps(engine, plan, range(3), rank=rank)
    engine.close()
    return {**found, "losses": [(result.loss, result.grad_norm) for result in results]}


QUICK = [megatron("llama", tensor=2)]
MORE = [  # each axis of each engine, alone or with another
    deepspeed("llama", 0, pipeline=2),
    deepspeed("llama", 1, context=2),
    deepspeed("llama", 3, data=4),
    deepspeed("llama", 1, tensor=2, data=2),
    megatron("llama", data=2, zero=1),
    megatron("llama", tensor=2, pipeline=2),
    megatron("llama", tensor=2, context=2),
    megatron("mixtral", data=2, expert=2),
]


@pytest.mark.parametrize(
    "cell",
    [*QUICK, *(pytest.param(cell, marks=pytest.mark.full) for cell in MORE)],
    ids=lambda cell: cell.name,
)
def test_each_axis_is_measured_without_changing_losses(cell: Cell, pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(train_cell, cell, tmp_path, True, ranks=cell.ranks)
    control = pool.run(train_cell, cell, tmp_path, False, ranks=cell.ranks)
    assert [answer["losses"] for answer in found] == [answer["losses"] for answer in control]
    rows = json.loads((tmp_path / "attempts" / "001" / "probe.json").read_text())["axes"]
    assert [(row["axis"], row["ranks"]) for row in rows] == [
        (axis.value, getattr(cell, axis)) for axis in ORDER if getattr(cell, axis) > 1
    ]
    for row in rows:
        assert "missing" not in row
        assert row["operation"] == ("send" if row["axis"] == Axis.PIPELINE else "all_reduce")
        assert 1e-6 < row["latency_p50_seconds"] <= row["latency_p99_seconds"] < 1.0
        assert 1e6 < row["bandwidth_bytes_per_second"] <= row["best_bandwidth_bytes_per_second"] < 1e12
        assert cell.ranks >= len(row["slowest_ranks"]) == row["ranks"]
    assert found[0]["messages"][0].startswith(f"probe of axis {rows[0]['axis']} ({rows[0]['ranks']} ranks): ")
    assert [answer["messages"] for answer in found[1:]] == [[]] * (cell.ranks - 1)
    for answer in found:
        assert answer["seconds"] < 3.0
        if cell.pipeline > 1:
            none, little, much = answer["transfers"]
            assert 0 < none <= little <= much < 10
        else:
            assert answer["transfers"] == []


def two_by_two(rank: int, ranks: int, folder: Path, slow: int | None) -> list[str]:
    """Tensor 2 x data 2 with groups for the tensor axis only; small collectives of rank ``slow`` take 5 ms
    more.
    """
    plan = tiny_plan(ranks=4, parallel__tensor=2)
    groups = [dist.new_group(group) for group in plan.axes.groups(Axis.TENSOR)]
    real = dist.all_reduce

    def delayed(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if rank == slow and tensor.numel() <= 8 and named.get("group") in groups:
            time.sleep(0.005)
        return real(tensor, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_benchmark.dist, "all_reduce", delayed)
        messages: list[str] = run_benchmark(rank, plan, torch.device("cpu"), folder)["messages"]
    return messages


def test_slow_rank_raises_the_latency_and_an_axis_without_a_group_is_reported(
    pool: RankPool, tmp_path: Path
) -> None:
    """The control is the same without the delay."""
    rows = {}
    for name, slow in (("delayed", 3), ("free", None)):
        first, *others = pool.run(two_by_two, tmp_path / name, slow)
        assert (
            first[1]
            == "probe of axis data (2 ranks): skipped, no process group of just the ranks along this axis"
        )
        assert others == [[], [], []]
        rows[name] = json.loads((tmp_path / name / "attempts" / "001" / "probe.json").read_text())["axes"]
    assert rows["delayed"][0]["latency_p50_seconds"] > 0.005
    assert rows["free"][0]["latency_p50_seconds"] < 0.005
    assert "missing" in rows["delayed"][1]


def slow_links(rank: int, ranks: int, folder: Path) -> None:
    """Large collectives of the group of ranks 2 and 3 are slower."""
    plan = tiny_plan(ranks=4, parallel__tensor=2)
    groups = [dist.new_group(group) for group in plan.axes.groups(Axis.TENSOR)]
    real = dist.all_reduce

    def delayed(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if rank == 3 and tensor.numel() > 8 and named.get("group") in groups:
            time.sleep(0.2)
        return real(tensor, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_benchmark.dist, "all_reduce", delayed)
        run_benchmark(rank, plan, torch.device("cpu"), folder)


def test_slowest_group_is_named(pool: RankPool, tmp_path: Path) -> None:
    pool.run(slow_links, tmp_path)
    row = json.loads((tmp_path / "attempts" / "001" / "probe.json").read_text())["axes"][0]
    assert row["slowest_ranks"] == [2, 3]
    assert row["best_bandwidth_bytes_per_second"] > 2 * row["bandwidth_bytes_per_second"]


def find_among_equal_groups(rank: int, ranks: int) -> list[bool]:
    """Return whether the group described as the axis is found, or else the oldest one."""
    axes = tiny_plan(ranks=4, parallel__tensor=2).axes
    peers = peers_along(axes, Axis.TENSOR, rank)
    groups: dict[str, dist.ProcessGroup] = {}
    for description in ("MODEL_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP"):
        for group in axes.groups(Axis.TENSOR):
            created = dist.new_group(list(group), group_desc=description)
            if rank in group:
                groups[description] = created
    device = torch.device("cpu")
    return [
        find_group(peers, Axis.TENSOR, device) is groups["TENSOR_MODEL_PARALLEL_GROUP"],
        find_group(peers, Axis.CONTEXT, device) is groups["MODEL_PARALLEL_GROUP"],
        find_group(range(4), Axis.DATA, device) is dist.group.WORLD,
        find_group((0, 3), Axis.DATA, device) is None,
    ]


def test_group_described_as_the_axis_is_preferred(pool: RankPool) -> None:
    assert pool.run(find_among_equal_groups) == [[True] * 4] * 4
