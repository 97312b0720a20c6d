"""The ranks' vectors of a step become one row: who is slowest, what is missing, a thousand ranks.

pytest tests/monitor/test_ledger_rows.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from toolkit.layout.axes import Axes
from toolkit.monitor.delays import Delays
from toolkit.monitor.ledger import PATIENCE, Assembly, Totals, Vectors, ledger_row, part_names, shares
from toolkit.monitor.parts import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    PARTS,
    UNEXPLAINED,
    communication,
)
from toolkit.monitor.recorder import StepTime, step_time
from toolkit.observe.ledger import MAX_GATHER_BYTES, MAX_SLOTS, MIN_SLOTS, max_slots

AXES = Axes(data=2, tensor=2)
VECTORS = Vectors(part_names(AXES))
TENSOR = communication("tensor")


def one(step: int, **parts: float) -> StepTime:
    return step_time(step, {FORWARD: 0.1, TENSOR: 0.05, UNEXPLAINED: 0.01, **parts})


def blocks(base: int, slots: int, *ranks: list[StepTime]) -> np.ndarray:
    return np.stack([VECTORS.pack(steps, base, slots) for steps in ranks])


def test_names_are_those_that_the_layout_can_have() -> None:
    assert part_names(Axes()) == PARTS
    names = part_names(Axes(data=2, tensor=2, pipeline=2, context=2, expert=2))
    assert len(set(names)) == len(names)
    assert names[: len(PARTS)] == PARTS
    assert {
        communication(name)
        for name in ("tensor", "context", "data", "pipeline", "context+data", "all", "expert")
    } <= set(names)
    assert communication("data") not in part_names(Axes(tensor=2))


def test_a_row_has_minimum_median_maximum_and_the_slowest_rank() -> None:
    steps = [[one(7)], [one(7, backward=0.2)], [one(7, backward=0.5)], [one(7, backward=0.3, data=1.0)]]
    (row,) = Assembly(VECTORS, ranks=4).add(8, blocks(8, 3, *steps))
    assert json.loads(json.dumps(row)) == row
    assert row["step"] == 7
    assert row["ranks"] == 4
    assert row["parts"] == {
        DATA: [0.0, 0.0, 1.0],
        FORWARD: [0.1] * 3,
        BACKWARD: [0.0, 0.25, 0.5],
        UNEXPLAINED: [0.01] * 3,
        TENSOR: [0.05] * 3,
    }
    assert row["wall_seconds"] == pytest.approx(np.median([0.16, 0.36, 0.66, 1.46]), abs=1e-6)
    # Rank 3 waited for its samples; rank 2 is who computed longest.
    assert row["slowest_rank"] == 2
    assert row["slowest_busy_seconds"] == pytest.approx(0.61, abs=1e-6)
    assert row["median_busy_seconds"] == pytest.approx(np.median([0.11, 0.31, 0.61, 0.41]), abs=1e-6)
    assert row["unexplained_share"] == pytest.approx(0.01 / row["wall_seconds"], abs=1e-6)
    assert shares(row)[BACKWARD] == pytest.approx(0.25 / row["wall_seconds"])


def test_asking_whether_it_is_time_to_evaluate_is_no_evaluation() -> None:
    (row,) = Assembly(VECTORS, ranks=1).add(
        1, blocks(1, 1, [one(1, evaluation=1e-5, checkpoint=0.1, data=1e-5)])
    )
    assert (CHECKPOINT in row["parts"], EVALUATION in row["parts"]) == (True, False)
    assert row["parts"][DATA] == [1e-5] * 3


def test_a_part_that_nobody_planned_is_unexplained() -> None:
    (row,) = Assembly(VECTORS, ranks=1).add(1, blocks(1, 1, [one(1, lunch=0.5)]))
    assert row["parts"][UNEXPLAINED] == [0.51] * 3


def test_ranks_whose_clocks_lag_come_with_the_next_gather() -> None:
    assembly = Assembly(VECTORS, ranks=2)
    assert [row["step"] for row in assembly.add(3, blocks(3, 3, [one(1), one(2)], [one(1)]))] == [1]
    late = assembly.add(5, blocks(5, 3, [one(3), one(4)], [one(2), one(3)]))
    assert [(row["step"], row["ranks"]) for row in late] == [(2, 2), (3, 2)]
    assert [(row["step"], row["ranks"]) for row in assembly.rest()] == [(4, 1)]
    assert assembly.rest() == []


def test_a_rank_that_sends_nothing_holds_up_rows_for_so_many_gathers_only() -> None:
    assembly, told = Assembly(VECTORS, ranks=3), []
    for step in range(1, 101):
        told += assembly.add(step + 1, blocks(step + 1, 1, [one(step)], [], [one(step)]))
        assert len(assembly._waiting) == len(assembly._gathers) <= PATIENCE
    told += assembly.rest()
    assert [(row["step"], row["ranks"]) for row in told] == [(step, 2) for step in range(1, 101)]


def test_the_slowest_is_named_by_its_number_among_those_that_sent() -> None:
    table = np.full((4, VECTORS.width), np.nan, dtype=np.float32)
    for rank, backward in ((1, 0.1), (3, 0.4)):
        table[rank] = VECTORS.pack([one(1, backward=backward)], 1, 1)[0]
    row = ledger_row(1, table, VECTORS.names)
    assert row["ranks"] == 2
    assert row["slowest_rank"] == 3


def test_time_without_a_processor_or_stopped_is_not_the_slowest_ranks_own() -> None:
    """Rank 0 was busy longest by the clock, and half of it was another process's; rank 2 was stopped."""
    delays = [Delays(starved=0.4), Delays(), Delays(stopped=3.0, crowded=1.0)]
    steps = [
        [replace(one(1, backward=backward), delays=delay)]
        for backward, delay in zip((0.8, 0.6, 3.2), delays, strict=True)
    ]
    (row,) = Assembly(VECTORS, ranks=3).add(1, blocks(1, 1, *steps))
    assert (row["slowest_rank"], row["slowest_busy_seconds"]) == (1, pytest.approx(0.71, abs=1e-6))
    assert row["median_busy_seconds"] == pytest.approx(0.91, abs=1e-6), (
        "what ranks are compared with is not corrected"
    )
    assert row["delays"] == {"starved": [0.4, 0], "stopped": [3.0, 2], "crowded": [1.0, 2]}
    (idle,) = Assembly(VECTORS, ranks=1).add(1, blocks(1, 1, [one(1)]))
    assert idle["delays"] == {}


def test_steps_beyond_what_float32_counts() -> None:
    """The control is the number itself: as float32 it is another one."""
    step = 2**26 + 1
    assert int(np.float32(step)) != step
    (row,) = Assembly(VECTORS, ranks=1).add(step + 2, blocks(step + 2, 1, [one(step)]))
    assert row["step"] == step


def test_a_gather_of_a_thousand_ranks_is_small_and_quick() -> None:
    vectors = Vectors(part_names(Axes(data=4, tensor=8, pipeline=8, context=4, expert=4)))
    ranks, slots = 1024, max_slots(1024, vectors.width)
    assert MIN_SLOTS <= slots <= MAX_SLOTS
    assert ranks * slots * vectors.width * 4 <= MAX_GATHER_BYTES
    steps = [one(step) for step in range(1, slots + 1)]
    gathered = np.stack([vectors.pack(steps, slots + 1, slots)] * ranks)
    slow = 777
    gathered[slow] = vectors.pack(
        [step_time(step.step, {**step.parts, OPTIMIZER: 0.2}) for step in steps], slots + 1, slots
    )
    began = time.process_time()
    rows = Assembly(vectors, ranks).add(slots + 1, gathered)
    assert time.process_time() - began < 1.0
    assert [row["step"] for row in rows] == [step.step for step in steps]
    assert {row["slowest_rank"] for row in rows} == {slow}
    assert {row["parts"][OPTIMIZER][1] for row in rows} == {0.0}
    assert max(len(json.dumps(row)) for row in rows) < 1000


def test_the_last_line_tells_large_parts_first() -> None:
    totals = Totals()
    row: Mapping[str, Any] = ledger_row(
        1,
        VECTORS.pack(
            [step_time(1, {FORWARD: 0.3, BACKWARD: 0.6, TENSOR: 0.09, UNEXPLAINED: 0.008, DATA: 0.002})], 1, 1
        ),
        VECTORS.names,
    )
    for _ in range(10):
        totals.add(row)
    assert totals.words() == "backward 60.0%, forward 30.0%, communication/tensor 9.0%, unexplained 0.8%"
    assert Totals().words() == "unexplained 0.0%"


def test_busy_is_what_the_recorder_says() -> None:
    step = replace(one(1), busy=42.0)
    (row,) = Assembly(VECTORS, ranks=1).add(1, blocks(1, 1, [step]))
    assert row["slowest_busy_seconds"] == 42.0
