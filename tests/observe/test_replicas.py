"""The replica check names the rank and tensor of a flipped bit in every layout, and is silent otherwise.

pytest tests/observe/test_replicas.py             a layout of each kind
pytest tests/observe/test_replicas.py -m full     more layouts, and the cost of a hash
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.engine.cases import BF16, FP16
from tests.train.fakes import completed_step, context_of
from toolkit.engine.build import build_engine, open_initial_weights
from toolkit.engine.hashing import hash_tensors
from toolkit.engine.protocol import Engine, ReplicaSet
from toolkit.engine.rank_sync import make_flag_reduce
from toolkit.monitor.alert import Alert
from toolkit.observe.gather import make_gather, single_rank_gather
from toolkit.observe.replicas import ReplicaCheck
from toolkit.plan.types import RunPlan
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.parity import train_steps
from toolkit.testing.tiny import tiny_plan
from toolkit.train.task import text_task

EVERY, STEPS = 2, 6


@dataclass(frozen=True)
class RankResult:
    """The result of one rank.

    Attributes:
        clean: alerts without a flipped bit, on rank 0.
        flips: each flipped set, its ranks, the tensor, and the alerts that it raised.
    """

    clean: list[Alert]
    flips: list[tuple[str, tuple[int, ...], str, list[Alert]]]
    sets: list[tuple[str, tuple[int, ...], list[str]]]
    losses: list[float]


def fail(alert: Alert) -> None:
    raise AssertionError(str(alert))


def train_and_flip(rank: int, ranks: int, plan: RunPlan, odd: int, check: bool = True) -> RankResult:
    """Train six steps with comparisons, then flip a bit of each set of rank ``odd``, compare and flip it
    back.
    """
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    engine.load(open_initial_weights(plan))
    alerts: list[Alert] = []
    context = context_of(plan, Path(), rank, make_flag_reduce(ranks))
    hook = ReplicaCheck(context, engine, make_gather(rank, ranks, 2), every=EVERY, alert=alerts.append)
    losses = []
    for step in range(STEPS):
        losses += [result.loss for result in train_steps(engine, plan, range(step, step + 1), rank=rank)]
        if check:
            hook.on_step(completed_step(step + 1))
    flips = flip_each_set(rank, ranks, engine, hook, alerts, odd) if check else []
    hook.on_end(STEPS)
    sets = [(one.kind, one.ranks, list(one.tensors)) for one in engine.replica_sets()]
    engine.close()
    return RankResult([alert for alert in alerts if alert.step <= STEPS], flips, sets, losses)


def flip_each_set(
    rank: int, ranks: int, engine: Engine, hook: ReplicaCheck, alerts: list[Alert], odd: int
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
        flipped = [(mine[number].kind, mine[number].ranks, name) if rank == odd else None]
        dist.broadcast_object_list(flipped, src=odd)
        assert flipped[0] is not None
        hook.on_step(completed_step(step))
        if rank == odd:
            flip(mine[number].tensors[name])
        deadline = time.monotonic() + 3
        while rank == 0 and not any(alert.step == step for alert in alerts) and time.monotonic() < deadline:
            time.sleep(0.005)
        found.append((*flipped[0], [alert for alert in alerts if alert.step == step]))
    return found


def flip(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of one element."""
    bits = (
        tensor.detach().view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    )
    bits[len(bits) // 2] ^= 1


# The cell, further settings, and how many ranks share each compared set.
QUICK: list[tuple[Cell, dict[str, Any], dict[str, int]]] = [
    (deepspeed("llama", 0, data=2), {}, {"weights": 2, "optimizer state": 2}),
    (deepspeed("gpt2", 1, pipeline=2), {}, {"tied weights": 2}),
    (
        megatron("llama", tensor=2, data=2, zero=1),
        {},
        {"weights": 2, "weights that tensor ranks share": 4, "optimizer state that tensor ranks share": 2},
    ),
]
MORE: list[tuple[Cell, dict[str, Any], dict[str, int]]] = [
    (
        deepspeed("llama", 1, tensor=2, data=2),
        BF16,
        {"weights": 2, "weights that tensor ranks share": 4, "optimizer state that tensor ranks share": 2},
    ),
    (deepspeed("llama", 3, data=2), {}, {}),
    (megatron("gpt2", pipeline=2, data=2), {}, {"weights": 2, "tied weights": 4, "optimizer state": 2}),
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
def test_flipped_bit_is_named_and_clean_training_raises_no_alert(
    case: tuple[Cell, dict[str, Any], dict[str, int]], pool: RankPool
) -> None:
    cell, more, wanted = case
    plan = cell.plan(OptimizerCase.ADAM, **more)
    odd = cell.ranks - 1
    results: list[RankResult] = pool.run(train_and_flip, plan, odd, ranks=cell.ranks)
    first = results[0]
    assert [str(alert) for alert in first.clean] == []
    shared = {what: len(ranks) for one in results for what, ranks, _ in one.sets}
    assert shared == wanted
    for one in results:  # all ranks that share a set describe it alike
        for what, ranks, names in one.sets:
            assert all((what, ranks, names) in results[rank].sets for rank in ranks)
    assert {what for what, _, _, _ in first.flips} == {what for what, _, _ in results[odd].sets}
    if cell.label == "overlap":  # waiting for the weights gathers them, which repairs the flipped bit
        assert not any(alerts for *_, alerts in first.flips)
        return
    for what, ranks, name, alerts in first.flips:
        (alert,) = alerts
        assert alert.name == "replicas-differ"
        assert name in alert.cause
        assert alert.cause.startswith(what)
        assert alert.where == (f"rank {odd}" if len(ranks) > 2 else f"ranks {ranks[0]}, {ranks[1]}")
        assert "resume=RUN_DIR/checkpoints/step-N" in alert.next_step


def test_comparing_does_not_change_losses(pool: RankPool) -> None:
    plan = deepspeed("llama", 2, data=2).plan(OptimizerCase.ADAM)
    checked, control = (pool.run(train_and_flip, plan, 1, check, ranks=2)[0] for check in (True, False))
    assert checked.losses == control.losses


def test_single_rank_has_nothing_to_compare() -> None:
    plan = tiny_plan()
    engine = build_engine(plan, text_task(plan), rank=0, local_rank=0)
    assert engine.replica_sets() == []
    hook = ReplicaCheck(context_of(plan, Path()), engine, single_rank_gather, every=1, alert=fail)
    hook.on_step(completed_step(1))
    hook.on_end(1)


def test_failed_comparison_is_logged_and_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    def gather(block: np.ndarray) -> np.ndarray | None:
        raise RuntimeError("a rank is gone")

    weights = {"w": torch.ones(4)}
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"), replica_sets=lambda: [ReplicaSet("weights", (0, 1), weights)]
    )
    hook = ReplicaCheck(context_of(tiny_plan(ranks=2), Path()), engine, gather, every=1, alert=fail)
    for step in range(1, 4):
        hook.on_step(completed_step(step))
        hook._thread.join(5)
    hook.on_end(3)
    assert caplog.messages == ["replicas are no longer compared: RuntimeError: a rank is gone"]


def test_blocked_gather_does_not_delay_the_end() -> None:
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"), replica_sets=lambda: [ReplicaSet("weights", (0, 1), {"w": torch.ones(4)})]
    )
    context = context_of(tiny_plan(ranks=2), Path())
    hook = ReplicaCheck(context, engine, lambda block: time.sleep(3), every=1, alert=fail, end_seconds=0.1)
    hook.on_step(completed_step(1))
    began = time.monotonic()
    hook.on_end(1)
    assert time.monotonic() - began < 1


@pytest.mark.full
def test_cost_of_a_hash(capsys: pytest.CaptureFixture[str]) -> None:
    """A hash costs a few sums of the same memory. Print the cost on this machine, for docs/monitoring.md."""
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
