"""The ledger gathers every step of every rank, names the slow rank, and never waits for a rank that stops.

pytest tests/observe/test_ledger_gather.py
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.captured import captured_logs
from tests.train.fakes import FakeClock, FakeEngine, completed_step, samples
from toolkit.engine.protocol import StepResult
from toolkit.engine.rank_sync import GlooFlagReduce, StepConsensus
from toolkit.hooks import CompletedStep, Hook, Hooks
from toolkit.layout.axes import Axes
from toolkit.monitor.ledger_rows import StepVectors, part_names
from toolkit.monitor.recorder import StepTime, step_time
from toolkit.monitor.sink import Row
from toolkit.observe.gather import Gather, make_gather, single_rank_gather
from toolkit.observe.ledger import LedgerHook
from toolkit.step_parts import FORWARD
from toolkit.testing.dist import RankPool, RanksFailed
from toolkit.testing.tiny import tiny_plan
from toolkit.train.loop import train
from toolkit.train.state import TrainState
from toolkit.train.task import NextTokenTask

STEPS = 40
SLOW = 2


class FakeRecorder(Hook):
    """A recorder whose clock is ``lag`` steps behind."""

    def __init__(self, rank: int, lag: int = 0) -> None:
        self._rank, self._lag = rank, lag
        self._over: list[StepTime] = []

    def on_step(self, completed: CompletedStep) -> None:
        self._over.append(step_time(completed.step, {FORWARD: 0.3 if self._rank == SLOW else 0.1}))

    def on_end(self, step: int) -> None:
        self._lag = 0

    def take_steps(self) -> list[StepTime]:
        ready = len(self._over) - self._lag
        found, self._over = self._over[: max(0, ready)], self._over[max(0, ready) :]
        return found


def train_with_ledger(
    rank: int,
    ranks: int,
    ranks_per_node: int,
    lags: dict[int, int],
    gather: Gather | None = None,
    end_seconds: float = 5.0,
    stream: Iterator[Any] | None = None,
) -> dict[str, Any]:
    """Train without work; the ledger gathers as often as it can."""
    rows: list[Row] = []
    recorder = FakeRecorder(rank, lags.get(rank, 0))
    clock = FakeClock()

    def fast_clock() -> float:
        clock.now += 10.0
        return clock.now

    ledger = LedgerHook(
        recorder.take_steps,
        StepVectors(part_names(Axes(data=ranks))),
        gather or make_gather(rank, ranks, ranks_per_node),
        rows.append,
        rank=rank,
        ranks=ranks,
        end_seconds=end_seconds,
        clock=fast_clock,
    )
    all_reduce_flags, state, requested = GlooFlagReduce(), TrainState(), []

    def sync(data_seconds: float, result: StepResult) -> StepConsensus:
        time.sleep(0.002)
        (slots,) = all_reduce_flags([ledger.due()])
        requested.append(slots)
        return StepConsensus(ledger_steps=slots)

    with captured_logs() as (messages, warnings), closing(ledger):
        train(
            tiny_plan(train__steps=STEPS, train__global_batch=4),
            FakeEngine(),
            NextTokenTask(),
            stream or samples(),
            state,
            Hooks(recorder, ledger),
            sync,
        )
    return {
        "rows": rows,
        "messages": messages,
        "warnings": warnings,
        "requested": requested,
        "step": state.step,
    }


@pytest.mark.parametrize(
    ("ranks_per_node", "lags"),
    [
        (4, {1: 3}),
        (3, {}),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((4, {}), (2, {0: 2, 3: 1}), (1, {}))),
    ],
    ids=str,
)
def test_ledger_has_every_step_and_names_the_slow_rank(
    pool: RankPool, ranks_per_node: int, lags: dict[int, int]
) -> None:
    first, *others = pool.run(train_with_ledger, ranks_per_node, lags)
    assert [row["step"] for row in first["rows"]] == list(range(1, STEPS + 1))
    assert {row["ranks"] for row in first["rows"]} == {4}
    assert {row["slowest_rank"] for row in first["rows"]} == {SLOW}
    assert {(row["slowest_busy_seconds"], row["median_busy_seconds"]) for row in first["rows"]} == {
        (0.3, 0.1)
    }
    assert first["messages"] == ["where the time went, by the median rank: forward 100.0%, unexplained 0.0%"]
    assert first["warnings"] == []
    assert sum(slots > 0 for slots in first["requested"]) > 2  # not only at the end
    for other in others:
        assert (other["rows"], other["messages"], other["warnings"], other["requested"]) == (
            [],
            [],
            [],
            first["requested"],
        )


def gather_twice(rank: int, ranks: int) -> list[Any]:
    """Use two gathers on two nodes, each with its own groups."""
    gathers = [make_gather(rank, ranks, 2) for _ in range(2)]
    found = []
    for number, gather in enumerate(gathers):
        blocks = gather(np.full((2, 3), 10 * number + rank, dtype=np.float32))
        found.append(None if blocks is None else blocks[:, 0, 0].tolist())
    return found


def gloo_threads() -> int:
    """Return the number of gloo's polling threads in this process."""
    return sum((task / "comm").read_text() == "gloo_tcp_loop\n" for task in Path("/proc/self/task").iterdir())


def count_gloo_threads(rank: int, ranks: int) -> list[int]:
    found = [gloo_threads()]
    gathers = [make_gather(rank, ranks, 1) for _ in range(2)]  # two nodes: two groups each on the first rank
    found.append(gloo_threads())
    group = dist.new_group(backend="gloo")
    found.append(gloo_threads())
    assert len(gathers) == 2
    dist.destroy_process_group(group)
    return found


def test_gathers_start_no_polling_threads(pool: RankPool) -> None:
    """The control, a group of torch, does."""
    for before, with_ways, with_group in pool.run(count_gloo_threads, ranks=2):
        assert (with_ways, with_group) == (before, before + 1)


def test_second_gather_has_its_own_groups(pool: RankPool) -> None:
    assert pool.run(gather_twice) == [
        [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]],
        [None, None],
        [None, None],
        [None, None],
    ]


def stop_sending(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 sends only twice, while its training continues."""
    real, calls = make_gather(rank, ranks, ranks), 0

    def gather(block: np.ndarray) -> np.ndarray | None:
        nonlocal calls
        calls += 1
        if rank == 1 and calls > 2:
            raise RuntimeError("no longer")
        return real(block)

    began = time.monotonic()
    found = train_with_ledger(rank, ranks, ranks, {}, gather, end_seconds=0.5)
    return {
        **found,
        "seconds": time.monotonic() - began,
        "threads": [thread.name for thread in threading.enumerate()],
    }


def test_rank_that_stops_sending_delays_no_rank(pool: RankPool) -> None:
    began = time.monotonic()
    first, second = pool.run(stop_sending, ranks=2)
    assert first["step"] == second["step"] == STEPS
    assert max(first["seconds"], second["seconds"]) < 2.0
    assert second["warnings"] == []
    # Rank 0's thread still waits, but requests no further gather and does not delay the end.
    assert first["warnings"] == ["the ledger lacks the last steps: a rank did not send them within 0.5 s"]
    assert "ledger" in first["threads"]
    assert 0 < len(first["rows"]) < STEPS
    assert time.monotonic() - began < 5.0
    again = pool.run(train_with_ledger, 2, {}, ranks=2)
    assert len(again[0]["rows"]) == STEPS


def die(rank: int, ranks: int, folder: Path) -> None:
    """Kill rank 1 during training; rank 0 writes how long its own end takes."""
    steps = 0

    def samples_until_killed() -> Iterator[Any]:
        nonlocal steps
        for batch in samples():
            steps += 1
            if rank == 1 and steps == STEPS // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    began = time.monotonic()
    try:
        train_with_ledger(rank, ranks, ranks, {}, stream=samples_until_killed())
    except RuntimeError:
        (folder / "result.json").write_text(json.dumps({"steps": steps, "seconds": time.monotonic() - began}))
        raise


def test_death_of_a_rank_ends_the_others_at_once(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="the process died"):
        pool.run(die, tmp_path, ranks=2)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] in (STEPS // 2, STEPS // 2 + 1)
    assert result["seconds"] < 2.0


class BlockedGather:
    """A gather that blocks until ``open`` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, block: np.ndarray) -> np.ndarray | None:
        assert self.open.wait(10)
        return single_rank_gather(block)


def single_rank_ledger(gather: Gather, clock: FakeClock, rows: list[Row]) -> tuple[Hooks, LedgerHook]:
    recorder = FakeRecorder(rank=0)
    ledger = LedgerHook(
        recorder.take_steps,
        StepVectors(part_names(Axes())),
        gather,
        rows.append,
        rank=0,
        ranks=1,
        clock=clock,
    )
    return Hooks(recorder, ledger), ledger


def test_no_gather_is_requested_while_one_is_under_way() -> None:
    clock, gather, rows = FakeClock(), BlockedGather(), []
    hooks, ledger = single_rank_ledger(gather, clock, rows)
    hooks.on_start(0)
    requested = []
    for step in range(1, 8):
        clock.now += 0.5
        slots = ledger.due()
        requested.append(slots)
        hooks.on_step(
            CompletedStep(
                step, 0.1, completed_step(step).result, 0.5, StepConsensus(ledger_steps=slots), False
            )
        )
    assert requested == [0, 5, 0, 0, 0, 0, 0]  # after a second: one step and four spare slots
    gather.open.set()
    hooks.on_end(7)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]


def test_many_quick_steps_are_gathered_before_a_second_has_passed() -> None:
    clock, rows = FakeClock(), []
    hooks, ledger = single_rank_ledger(single_rank_gather, clock, rows)
    hooks.on_start(0)
    first = next(step for step in range(1, 10_000) if _due_after(hooks, ledger, step))
    assert first == 512 + 1
    ledger.close()


def _due_after(hooks: Hooks, ledger: LedgerHook, step: int) -> bool:
    due = ledger.due() > 0
    hooks.on_step(completed_step(step))
    return due
