"""Copies that should be equal are compared in each layout: a flipped bit is named with its rank and tensor, and clean training is silent.

pytest tests/observe/test_replicas.py             a layout of each kind
pytest tests/observe/test_replicas.py -m full     more layouts, and the cost of a hash
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.engine.cases import BF16, FP16
from tests.train.fakes import step_done
from toolkit.engine.build import build_engine, first_weights
from toolkit.engine.hashing import hash_tensors
from toolkit.engine.protocol import Engine, ReplicaSet
from toolkit.engine.rank_sync import make_flag_reduce, single_rank_reduce
from toolkit.monitor.alert import Alert
from toolkit.observe.gather import gather_of
from toolkit.observe.replicas import Replicas
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool, rank_pool
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.parity import train_steps
from toolkit.testing.tiny import tiny_plan
from toolkit.train.task import text_task

EVERY, STEPS = 2, 6


@dataclass(frozen=True)
class Seen:
    """On one rank. Alerts are rank 0's; ``flips``: what was flipped, by ranks and name, and the alerts that it gave."""

    clean: list[Alert]
    flips: list[tuple[str, tuple[int, ...], str, list[Alert]]]
    sets: list[tuple[str, tuple[int, ...], list[str]]]
    losses: list[float]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as ranks:
        yield ranks


def fail(words: str) -> None:
    raise AssertionError(words)


def compared(rank: int, ranks: int, plan: RunPlan, odd: int, watched: bool = True) -> Seen:
    """Six steps, compared after each second one; then a bit of each set of rank ``odd`` is flipped, compared and flipped back."""
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(first_weights(plan))
    alerts: list[Alert] = []
    hook = Replicas(
        plan,
        engine,
        make_flag_reduce(ranks),
        gather_of(rank, ranks, 2),
        rank=rank,
        every=EVERY,
        alert=alerts.append,
        tell=fail,
    )
    losses = []
    for step in range(STEPS):
        losses += [result.loss for result in train_steps(engine, plan, range(step, step + 1), rank=rank)]
        if watched:
            hook.on_step(step_done(step + 1))
    flips = flipped(rank, ranks, engine, hook, alerts, odd) if watched else []
    hook.on_end(STEPS)
    sets = [(one.kind, one.ranks, list(one.tensors)) for one in engine.replica_sets()]
    engine.close()
    return Seen([alert for alert in alerts if alert.step <= STEPS], flips, sets, losses)


def flipped(
    rank: int, ranks: int, engine: Engine, hook: Replicas, alerts: list[Alert], odd: int
) -> list[Any]:
    found = []
    counts: list[Any] = [None] * ranks
    dist.all_gather_object(counts, len(engine.replica_sets()))
    for number in range(counts[odd]):
        step = STEPS + EVERY * (number + 1)
        mine = engine.replica_sets()
        name = list(mine[number].tensors)[len(mine[number].tensors) // 2] if rank == odd else ""
        if rank == odd:
            flip(mine[number].tensors[name])
        told = [(mine[number].kind, mine[number].ranks, name) if rank == odd else None]
        dist.broadcast_object_list(told, src=odd)
        assert told[0] is not None
        hook.on_step(step_done(step))
        if rank == odd:
            flip(mine[number].tensors[name])
        deadline = time.monotonic() + 3
        while rank == 0 and not any(alert.step == step for alert in alerts) and time.monotonic() < deadline:
            time.sleep(0.005)
        found.append((*told[0], [alert for alert in alerts if alert.step == step]))
    return found


def flip(tensor: torch.Tensor, place: int | None = None) -> None:
    """The lowest bit of one element."""
    bits = (
        tensor.detach().view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    )
    bits[len(bits) // 2 if place is None else place] ^= 1


# The cell, further settings, and what is compared: what is held in common by how many ranks.
QUICK: list[tuple[Cell, dict[str, Any], dict[str, int]]] = [
    (deepspeed("llama", 0, data=2), {}, {"weights": 2, "optimizer state": 2}),
    (
        deepspeed("llama", 1, tensor=2, data=2),
        BF16,
        {"weights": 2, "weights that tensor ranks share": 4, "optimizer state that tensor ranks share": 2},
    ),
    (deepspeed("gpt2", 1, pipeline=2), {}, {"tied weights": 2}),
    (deepspeed("llama", 3, data=2), {}, {}),
    (
        megatron("llama", tensor=2, data=2, zero=1),
        {},
        {"weights": 2, "weights that tensor ranks share": 4, "optimizer state that tensor ranks share": 2},
    ),
    (megatron("gpt2", pipeline=2, data=2), {}, {"weights": 2, "tied weights": 4, "optimizer state": 2}),
]
MORE: list[tuple[Cell, dict[str, Any], dict[str, int]]] = [
    (deepspeed("gpt2", 1, data=2), FP16, {"weights": 2}),
    (deepspeed("llama", 2, data=4), BF16, {"weights": 4}),
    (deepspeed("llama", 1, context=2, data=2), {}, {"weights": 4}),
    (deepspeed("mixtral", 1, data=4, expert=2), {}, {"weights": 4, "weights of experts": 2}),
    (deepspeed("qwen2", 0, pipeline=2, data=2), {}, {"weights": 2, "tied weights": 4, "optimizer state": 2}),
    (
        deepspeed("qwen3", 2, tensor=2),
        {},
        {"weights that tensor ranks share": 2, "optimizer state that tensor ranks share": 2},
    ),
    (deepspeed("llama", 3, tensor=2, data=2), {}, {"optimizer state that tensor ranks share": 2}),
    (megatron("llama", data=2), BF16, {"weights": 2, "optimizer state": 2}),
    (megatron("llama", data=4, zero=1), BF16, {"weights": 4}),
    (
        megatron(
            "llama",
            data=2,
            zero=1,
            label="overlap",
            own=(("overlap_grad_reduce", True), ("overlap_param_gather", True)),
        ),
        {},
        {"weights": 2},
    ),
    (megatron("gpt2", context=2, data=2, zero=1), {}, {"weights": 4}),
    (megatron("mixtral", data=4, expert=2, zero=1), {}, {"weights": 4, "weights of experts": 2}),
    (
        megatron("qwen3", tensor=2, pipeline=2),
        {},
        {
            "tied weights": 2,
            "weights that tensor ranks share": 2,
            "optimizer state that tensor ranks share": 2,
        },
    ),
]


def _named(case: tuple[Cell, dict[str, Any], dict[str, int]]) -> str:
    cell, more, _ = case
    return "-".join(
        [cell.name.replace("/", "-"), *(getattr(value, "name", str(value)) for value in more.values())]
    )


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)], ids=_named
)
def test_a_flipped_bit_is_named_and_clean_training_is_silent(
    case: tuple[Cell, dict[str, Any], dict[str, int]], pool: RankPool
) -> None:
    cell, more, wanted = case
    plan = cell.plan(OptimizerCase.ADAM, **more)
    odd = cell.ranks - 1
    seen: list[Seen] = pool.run(compared, plan, odd, ranks=cell.ranks)
    first = seen[0]
    assert [str(alert) for alert in first.clean] == []
    held = {what: len(ranks) for one in seen for what, ranks, _ in one.sets}
    assert held == wanted
    for one in seen:  # who holds what is told alike by all who hold it
        for what, ranks, names in one.sets:
            assert all((what, ranks, names) in seen[rank].sets for rank in ranks)
    assert {what for what, _, _, _ in first.flips} == {what for what, _, _ in seen[odd].sets}
    if (
        cell.label == "overlap"
    ):  # to wait for weights that are on their way is to gather them, which mends a flip
        assert not any(alerts for *_, alerts in first.flips)
        return
    for what, ranks, name, alerts in first.flips:
        (alert,) = alerts
        assert alert.name == "replicas-differ"
        assert name in alert.cause
        assert alert.cause.startswith(what)
        assert alert.where == (f"rank {odd}" if len(ranks) > 2 else f"ranks {ranks[0]}, {ranks[1]}")
        assert "resume=RUN_DIR/checkpoints/step-N" in alert.next_step


def test_comparing_changes_no_loss(pool: RankPool) -> None:
    plan = deepspeed("llama", 2, data=2).plan(OptimizerCase.ADAM)
    watched, alone_ = (pool.run(compared, plan, 1, watching, ranks=2)[0] for watching in (True, False))
    assert watched.losses == alone_.losses


def test_one_rank_has_nothing_to_compare() -> None:
    plan = tiny_plan()
    engine = build_engine(plan, text_task(plan), rank=0, local_rank=0)
    assert engine.replica_sets() == []
    # type: ignore[arg-type]
    hook = Replicas(
        plan,
        engine,
        single_rank_reduce,
        lambda block: block[np.newaxis],
        rank=0,
        every=1,
        alert=fail,
        tell=fail,
    )
    hook.on_step(step_done(1))
    hook.on_end(1)


def test_a_comparison_that_fails_is_told_and_training_goes_on() -> None:
    told: list[str] = []

    def gather(block: np.ndarray) -> np.ndarray | None:
        raise RuntimeError("a rank is gone")

    weights = {"w": torch.ones(4)}
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"), replica_sets=lambda: [ReplicaSet("weights", (0, 1), weights)]
    )
    # type: ignore[arg-type]
    hook = Replicas(
        tiny_plan(ranks=2), engine, single_rank_reduce, gather, rank=0, every=1, alert=fail, tell=told.append
    )
    for step in range(1, 4):
        hook.on_step(step_done(step))
        hook._thread.join(5)
    hook.on_end(3)
    assert told == ["copies are compared no more: RuntimeError: a rank is gone"]


def test_a_gather_that_never_comes_does_not_hold_up_the_end() -> None:
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"), replica_sets=lambda: [ReplicaSet("weights", (0, 1), {"w": torch.ones(4)})]
    )
    # type: ignore[arg-type]
    hook = Replicas(
        tiny_plan(ranks=2),
        engine,
        single_rank_reduce,
        lambda block: time.sleep(3),
        rank=0,
        every=1,
        alert=fail,
        tell=lambda words: None,
        end_seconds=0.1,
    )
    hook.on_step(step_done(1))
    began = time.monotonic()
    hook.on_end(1)
    assert time.monotonic() - began < 1


@pytest.mark.full
def test_the_cost_of_a_hash(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory is read once: some sums of it. What it is on this machine is printed, for docs/monitoring.md."""
    torch.set_num_threads(1)
    tensors = [torch.ones(2**22) for _ in range(16)]  # 256 MiB
    words = torch.ones(2**25, dtype=torch.int64)

    def seconds(work: Any) -> float:
        took = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            took.append(time.perf_counter() - began)
        return min(took)

    hashing, summing = (
        seconds(lambda: hash_tensors(tensors, torch.device("cpu"))),
        seconds(lambda: words.sum()),
    )
    with capsys.disabled():
        print(f"hash {hashing * 4e3:.0f} ms a GiB, one sum {summing * 4e3:.0f} ms a GiB")
    assert hashing < 6 * summing + 0.01
