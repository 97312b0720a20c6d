"""Ranks' times reach rank 0 beside training: all steps, from two nodes too, the slow rank by name; and nobody waits for a rank that stops.

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

from tests.train.fakes import FakeClock, FakeEngine, samples, step_done
from toolkit.engine.protocol import StepResult
from toolkit.engine.rank_sync import GlooFlagReduce, StepConsensus
from toolkit.hooks import Hook, Hooks, StepDone
from toolkit.layout.axes import Axes
from toolkit.monitor.ledger_rows import StepVectors, part_names
from toolkit.monitor.recorder import StepTime, step_time
from toolkit.monitor.sink import Row
from toolkit.monitor.step_parts import FORWARD
from toolkit.observe.gather import Gather, alone, gather_of
from toolkit.observe.ledger import Ledger
from toolkit.testing.dist import RankPool, RanksFailed, rank_pool
from toolkit.testing.tiny import tiny_plan
from toolkit.train.loop import train
from toolkit.train.state import TrainState
from toolkit.train.task import NextToken

STEPS = 40
SLOW = 2


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as ranks:
        ranks.run(ready)  # what is timed below is not their start
        yield ranks


def ready(rank: int, ranks: int) -> None:
    pass


class Recorded(Hook):
    """A recorder whose clock lags ``lag`` steps behind: so many are handed over later."""

    def __init__(self, rank: int, lag: int = 0) -> None:
        self._rank, self._lag = rank, lag
        self._over: list[StepTime] = []

    def on_step(self, done: StepDone) -> None:
        self._over.append(step_time(done.step, {FORWARD: 0.3 if self._rank == SLOW else 0.1}))

    def on_end(self, step: int) -> None:
        self._lag = 0

    def take_steps(self) -> list[StepTime]:
        ready = len(self._over) - self._lag
        found, self._over = self._over[: max(0, ready)], self._over[max(0, ready) :]
        return found


def followed(
    rank: int,
    ranks: int,
    ranks_per_node: int,
    lags: dict[int, int],
    gather: Gather | None = None,
    end_seconds: float = 5.0,
    stream: Iterator[Any] | None = None,
) -> dict[str, Any]:
    """A training of no work, whose ledger gathers as often as it can."""
    rows: list[Row] = []
    said: list[str] = []
    told: list[str] = []
    recorded = Recorded(rank, lags.get(rank, 0))
    clock = FakeClock()

    def fast_clock() -> float:
        clock.now += 10.0
        return clock.now

    ledger = Ledger(
        recorded.take_steps,
        StepVectors(part_names(Axes(data=ranks))),
        gather or gather_of(rank, ranks, ranks_per_node),
        rows.append,
        rank=rank,
        ranks=ranks,
        say=said.append,
        tell=told.append,
        end_seconds=end_seconds,
        clock=fast_clock,
    )
    all_reduce_flags, state, asked = GlooFlagReduce(), TrainState(), []

    def agree(waited: float, result: StepResult) -> StepConsensus:
        time.sleep(0.002)
        (slots,) = all_reduce_flags([ledger.due()])
        asked.append(slots)
        return StepConsensus(ledger=slots)

    with closing(ledger):
        train(
            tiny_plan(train__steps=STEPS),
            FakeEngine(),
            NextToken(),
            stream or samples(),
            state,
            Hooks(recorded, ledger),
            agree,
        )
    return {"rows": rows, "said": said, "told": told, "asked": asked, "step": state.step}


@pytest.mark.parametrize(
    ("ranks_per_node", "lags"), [(4, {}), (4, {1: 3}), (2, {0: 2, 3: 1}), (3, {}), (1, {})], ids=str
)
def test_every_step_of_every_rank_arrives_and_the_slow_one_is_named(
    pool: RankPool, ranks_per_node: int, lags: dict[int, int]
) -> None:
    first, *others = pool.run(followed, ranks_per_node, lags)
    assert [row["step"] for row in first["rows"]] == list(range(1, STEPS + 1))
    assert {row["ranks"] for row in first["rows"]} == {4}
    assert {row["slowest_rank"] for row in first["rows"]} == {SLOW}
    assert {(row["slowest_busy_seconds"], row["median_busy_seconds"]) for row in first["rows"]} == {
        (0.3, 0.1)
    }
    assert first["said"] == ["where the time went, by the median rank: forward 100.0%, unexplained 0.0%"]
    assert first["told"] == []
    assert sum(slots > 0 for slots in first["asked"]) > 2  # beside the one at the end
    for other in others:
        assert (other["rows"], other["said"], other["told"], other["asked"]) == ([], [], [], first["asked"])


def several(rank: int, ranks: int) -> list[Any]:
    """Two ways to rank 0 on two nodes, one beside the other: each has groups of its own."""
    ways = [gather_of(rank, ranks, 2) for _ in range(2)]
    found = []
    for number, way in enumerate(ways):
        blocks = way(np.full((2, 3), 10 * number + rank, dtype=np.float32))
        found.append(None if blocks is None else blocks[:, 0, 0].tolist())
    return found


def loops() -> int:
    """Threads of this process in which gloo looks for something to do."""
    return sum((task / "comm").read_text() == "gloo_tcp_loop\n" for task in Path("/proc/self/task").iterdir())


def loops_of_ways(rank: int, ranks: int) -> list[int]:
    found = [loops()]
    ways = [gather_of(rank, ranks, 1) for _ in range(2)]  # two nodes: two groups each on the first rank
    found.append(loops())
    group = dist.new_group(backend="gloo")
    found.append(loops())
    assert len(ways) == 2
    dist.destroy_process_group(group)
    return found


def test_ways_take_no_thread_that_looks_for_work(pool: RankPool) -> None:
    """The control: a group of torch's own does."""
    for before, with_ways, with_group in pool.run(loops_of_ways, ranks=2):
        assert (with_ways, with_group) == (before, before + 1)


def test_a_second_way_has_groups_of_its_own(pool: RankPool) -> None:
    assert pool.run(several) == [
        [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]],
        [None, None],
        [None, None],
        [None, None],
    ]


def stops_sending(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 sends twice and never again, while its training goes on."""
    real, calls = gather_of(rank, ranks, ranks), 0

    def gather(block: np.ndarray) -> np.ndarray | None:
        nonlocal calls
        calls += 1
        if rank == 1 and calls > 2:
            raise RuntimeError("no longer")
        return real(block)

    began = time.monotonic()
    found = followed(rank, ranks, ranks, {}, gather, end_seconds=0.5)
    return {
        **found,
        "seconds": time.monotonic() - began,
        "threads": [thread.name for thread in threading.enumerate()],
    }


def test_a_rank_that_stops_sending_keeps_nobody(pool: RankPool) -> None:
    began = time.monotonic()
    first, second = pool.run(stops_sending, ranks=2)
    assert first["step"] == second["step"] == STEPS
    assert max(first["seconds"], second["seconds"]) < 2.0
    assert second["told"] == ["no more rows of the ledger: RuntimeError: no longer"]
    # Rank 0's thread still waits: it asked for no further gather, and the end did not wait for it.
    assert first["told"] == ["the ledger lacks the last steps: some rank did not send them within 0.5 s"]
    assert "ledger" in first["threads"]
    assert 0 < len(first["rows"]) < STEPS
    assert time.monotonic() - began < 5.0  # leaving the process group did not wait either
    again = pool.run(followed, 2, {}, ranks=2)
    assert len(again[0]["rows"]) == STEPS


def dies(rank: int, ranks: int, folder: Path) -> None:
    """Rank 1 is killed in the middle of its training; rank 0 writes how long its own end took."""
    steps = 0

    def taken_until_the_end() -> Iterator[Any]:
        nonlocal steps
        for batch in samples():
            steps += 1
            if rank == 1 and steps == STEPS // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    began = time.monotonic()
    try:
        followed(rank, ranks, ranks, {}, stream=taken_until_the_end())
    except RuntimeError:
        (folder / "told").write_text(json.dumps({"steps": steps, "seconds": time.monotonic() - began}))
        raise


def test_a_rank_that_dies_ends_the_others_at_once(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="the process died"):
        pool.run(dies, tmp_path, ranks=2)
    told = json.loads((tmp_path / "told").read_text())
    assert told["steps"] in (STEPS // 2, STEPS // 2 + 1)
    assert told["seconds"] < 2.0


class Waiting:
    """A way to rank 0 that opens when told."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, block: np.ndarray) -> np.ndarray | None:
        assert self.open.wait(10)
        return alone(block)


def alone_ledger(gather: Gather, clock: FakeClock, rows: list[Row]) -> tuple[Hooks, Ledger]:
    recorded = Recorded(rank=0)
    ledger = Ledger(
        recorded.take_steps,
        StepVectors(part_names(Axes())),
        gather,
        rows.append,
        rank=0,
        ranks=1,
        say=print,
        tell=print,
        clock=clock,
    )
    return Hooks(recorded, ledger), ledger


def test_nothing_is_asked_for_while_a_gather_is_under_way() -> None:
    clock, gather, rows = FakeClock(), Waiting(), []
    hooks, ledger = alone_ledger(gather, clock, rows)
    hooks.on_start(0)
    asked = []
    for step in range(1, 8):
        clock.now += 0.5
        slots = ledger.due()
        asked.append(slots)
        hooks.on_step(StepDone(step, 0.1, step_done(step).result, 0.5, StepConsensus(ledger=slots), False))
    assert asked == [0, 5, 0, 0, 0, 0, 0]  # after a second: of one step that is over, and four to spare
    gather.open.set()
    hooks.on_end(7)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]


def test_many_quick_steps_are_gathered_before_a_second_is_over() -> None:
    clock, rows = FakeClock(), []
    hooks, ledger = alone_ledger(alone, clock, rows)
    hooks.on_start(0)
    first = next(step for step in range(1, 10_000) if _due_after(hooks, ledger, step))
    assert first == 512 + 1
    ledger.close()


def _due_after(hooks: Hooks, ledger: Ledger, step: int) -> bool:
    due = ledger.due() > 0
    hooks.on_step(step_done(step))
    return due
