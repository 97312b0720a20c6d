"""The probe finds each axis' group on both engines, names a slow one, and changes no loss.

pytest tests/observe/test_probe.py             axes of two ranks
pytest tests/observe/test_probe.py -m full     of four, and two at a time
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.engine.build import build_engine, first_weights
from toolkit.engine.rank_sync import GlooFlagReduce
from toolkit.layout.axes import ORDER, Axis
from toolkit.monitor.sink import NullSink
from toolkit.observe import probe as probe_module
from toolkit.observe.probe import Probe, find_group, peers_along
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool, rank_pool
from toolkit.testing.matrix import Case, Cell, deepspeed, megatron
from toolkit.testing.parity import step_all
from toolkit.testing.tiny import tiny_plan
from toolkit.train.task import text_task


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as ranks:
        yield ranks


def probed(rank: int, plan: RunPlan, device: torch.device, folder: Path) -> dict[str, Any]:
    said: list[str] = []
    taken: list[Callable[[int], float]] = []
    began = time.monotonic()
    Probe(
        plan,
        device,
        GlooFlagReduce(),
        rank=rank,
        file=folder / "attempts" / "001" / "probe.json",
        sink=NullSink(),
        take=taken.append,
        say=said.append,
    ).on_start(0)
    seconds = [transfer(size) for transfer in taken for size in (0, 2**20, 2**24)]
    return {"said": said, "transfers": seconds, "seconds": time.monotonic() - began}


def of_a_cell(rank: int, ranks: int, cell: Cell, folder: Path, with_probe: bool) -> dict[str, Any]:
    plan = cell.plan(Case.ADAM)
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(first_weights(plan))
    found = probed(rank, plan, engine.device, folder) if with_probe else {}
    results = step_all(engine, plan, range(3), rank=rank)
    engine.close()
    return {**found, "losses": [(result.loss, result.grad_norm) for result in results]}


TWO = [
    deepspeed("llama", 1, data=2),
    deepspeed("llama", 0, pipeline=2),
    megatron("llama", tensor=2),
    megatron("llama", pipeline=2),
]
MORE = [
    deepspeed("llama", 1, tensor=2),
    deepspeed("llama", 1, context=2),
    megatron("llama", context=2),
    megatron("llama", data=2, zero=1),
    deepspeed("llama", 3, data=4),
    deepspeed("llama", 1, tensor=2, data=2),
    deepspeed("llama", 0, pipeline=4, layers=4),
    deepspeed("llama", 0, pipeline=2, data=2),
    megatron("llama", tensor=4),
    megatron("llama", tensor=2, pipeline=2),
    megatron("llama", pipeline=4, layers=4),
    megatron("mixtral", data=2, expert=2),
    megatron("llama", tensor=2, context=2),
]


@pytest.mark.parametrize(
    "cell", [*TWO, *(pytest.param(cell, marks=pytest.mark.full) for cell in MORE)], ids=lambda cell: cell.name
)
def test_each_axis_is_measured_and_no_loss_changes(cell: Cell, pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(of_a_cell, cell, tmp_path, True, ranks=cell.ranks)
    bare = pool.run(of_a_cell, cell, tmp_path, False, ranks=cell.ranks)
    assert [answer["losses"] for answer in found] == [answer["losses"] for answer in bare]
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
    assert found[0]["said"][0].startswith(f"probe of axis {rows[0]['axis']} ({rows[0]['ranks']} ranks): ")
    assert [answer["said"] for answer in found[1:]] == [[]] * (cell.ranks - 1)
    for answer in found:
        assert answer["seconds"] < 3.0
        if cell.pipeline > 1:
            nothing, little, much = answer["transfers"]
            assert 0 < nothing <= little <= much < 10
        else:
            assert answer["transfers"] == []


def two_by_two(rank: int, ranks: int, folder: Path, slow: int | None) -> list[str]:
    """Tensor 2 x data 2, of which ``slow`` is a rank whose small collectives take 5 ms more; the tensor axis' groups are there."""
    plan = tiny_plan(ranks=4, parallel__tensor=2)
    made = [dist.new_group(group) for group in plan.axes.groups(Axis.TENSOR)]
    real = dist.all_reduce

    def brake(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if rank == slow and tensor.numel() <= 8 and named.get("group") in made:
            time.sleep(0.005)
        return real(tensor, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module.dist, "all_reduce", brake)
        said: list[str] = probed(rank, plan, torch.device("cpu"), folder)["said"]
    return said


def test_a_slow_rank_shows_in_the_latency_and_an_axis_without_a_group_is_told(
    pool: RankPool, tmp_path: Path
) -> None:
    """The control is the same without the brake."""
    rows = {}
    for name, slow in (("braked", 3), ("free", None)):
        first, *others = pool.run(two_by_two, tmp_path / name, slow)
        assert (
            first[1]
            == "probe of axis data (2 ranks): skipped, no process group of just the ranks along this axis"
        )
        assert others == [[], [], []]
        rows[name] = json.loads((tmp_path / name / "attempts" / "001" / "probe.json").read_text())["axes"]
    assert rows["braked"][0]["latency_p50_seconds"] > 0.005
    assert rows["free"][0]["latency_p50_seconds"] < 0.005
    assert "missing" in rows["braked"][1]


def slow_links(rank: int, ranks: int, folder: Path) -> None:
    """As above, with large tensors: the group of ranks 2 and 3 is slower."""
    plan = tiny_plan(ranks=4, parallel__tensor=2)
    made = [dist.new_group(group) for group in plan.axes.groups(Axis.TENSOR)]
    real = dist.all_reduce

    def brake(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if rank == 3 and tensor.numel() > 8 and named.get("group") in made:
            time.sleep(0.2)
        return real(tensor, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module.dist, "all_reduce", brake)
        probed(rank, plan, torch.device("cpu"), folder)


def test_the_slowest_group_is_named(pool: RankPool, tmp_path: Path) -> None:
    pool.run(slow_links, tmp_path)
    row = json.loads((tmp_path / "attempts" / "001" / "probe.json").read_text())["axes"][0]
    assert row["slowest_ranks"] == [2, 3]
    assert row["best_bandwidth_bytes_per_second"] > 2 * row["bandwidth_bytes_per_second"]


def groups_of_the_same_ranks(rank: int, ranks: int) -> list[bool]:
    """Which of them is taken: the one of this axis by its maker's words, else the oldest."""
    axes = tiny_plan(ranks=4, parallel__tensor=2).axes
    peers = peers_along(axes, Axis.TENSOR, rank)
    made: dict[str, dist.ProcessGroup] = {}
    for description in ("MODEL_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP"):
        for group in axes.groups(Axis.TENSOR):
            one = dist.new_group(list(group), group_desc=description)
            if rank in group:
                made[description] = one
    device = torch.device("cpu")
    return [
        find_group(peers, Axis.TENSOR, device) is made["TENSOR_MODEL_PARALLEL_GROUP"],
        find_group(peers, Axis.CONTEXT, device) is made["MODEL_PARALLEL_GROUP"],
        find_group(range(4), Axis.DATA, device) is dist.group.WORLD,
        find_group((0, 3), Axis.DATA, device) is None,
    ]


def test_of_several_groups_the_axis_own_is_taken(pool: RankPool) -> None:
    assert pool.run(groups_of_the_same_ranks) == [[True] * 4] * 4
