"""Ledger rows from the vectors of all ranks.

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
from toolkit.monitor.ledger_rows import (
    MAX_GATHERS,
    LedgerAssembler,
    LedgerTotals,
    StepVectors,
    ledger_row,
    part_names,
)
from toolkit.monitor.recorder import StepTime, ThreadDelays, step_time
from toolkit.observe.ledger import MAX_GATHER_BYTES, MAX_SLOTS, MIN_SLOTS, max_slots
from toolkit.step_parts import (
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

AXES = Axes(data=2, tensor=2)
VECTORS = StepVectors(part_names(AXES))
TENSOR = communication("tensor")


def one(step: int, **parts: float) -> StepTime:
    return step_time(step, {FORWARD: 0.1, TENSOR: 0.05, UNEXPLAINED: 0.01, **parts})


def blocks(base: int, slots: int, *ranks: list[StepTime]) -> np.ndarray:
    return np.stack([VECTORS.pack(steps, base, slots) for steps in ranks])


def test_part_names_follow_from_the_layout() -> None:
    assert part_names(Axes()) == PARTS
    names = part_names(Axes(data=2, tensor=2, pipeline=2, context=2, expert=2))
    assert len(set(names)) == len(names)
    assert names[: len(PARTS)] == PARTS
    assert {
        communication(name)
        for name in ("tensor", "context", "data", "pipeline", "context+data", "all", "expert")
    } <= set(names)
    assert communication("data") not in part_names(Axes(tensor=2))


def test_row_has_minimum_median_maximum_and_slowest_rank() -> None:
    steps = [[one(7)], [one(7, backward=0.2)], [one(7, backward=0.5)], [one(7, backward=0.3, data=1.0)]]
    (row,) = LedgerAssembler(VECTORS, ranks=4).add(8, blocks(8, 3, *steps))
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
    # Rank 3 waited for its samples; rank 2 computed longest.
    assert row["slowest_rank"] == 2
    assert row["slowest_busy_seconds"] == pytest.approx(0.61, abs=1e-6)
    assert row["median_busy_seconds"] == pytest.approx(np.median([0.11, 0.31, 0.61, 0.41]), abs=1e-6)
    assert row["unexplained_share"] == pytest.approx(0.01 / row["wall_seconds"], abs=1e-6)


def test_negligible_evaluation_is_omitted() -> None:
    (row,) = LedgerAssembler(VECTORS, ranks=1).add(
        1, blocks(1, 1, [one(1, evaluation=1e-5, checkpoint=0.1, data=1e-5)])
    )
    assert (CHECKPOINT in row["parts"], EVALUATION in row["parts"]) == (True, False)
    assert row["parts"][DATA] == [1e-5] * 3


def test_unknown_part_is_unexplained() -> None:
    (row,) = LedgerAssembler(VECTORS, ranks=1).add(1, blocks(1, 1, [one(1, lunch=0.5)]))
    assert row["parts"][UNEXPLAINED] == [0.51] * 3


def test_lagging_ranks_are_added_by_the_next_gather() -> None:
    assembly = LedgerAssembler(VECTORS, ranks=2)
    assert [row["step"] for row in assembly.add(3, blocks(3, 3, [one(1), one(2)], [one(1)]))] == [1]
    late = assembly.add(5, blocks(5, 3, [one(3), one(4)], [one(2), one(3)]))
    assert [(row["step"], row["ranks"]) for row in late] == [(2, 2), (3, 2)]
    assert [(row["step"], row["ranks"]) for row in assembly.flush()] == [(4, 1)]
    assert assembly.flush() == []


def test_silent_rank_delays_rows_for_a_bounded_number_of_gathers() -> None:
    assembly, found = LedgerAssembler(VECTORS, ranks=3), []
    for step in range(1, 101):
        found += assembly.add(step + 1, blocks(step + 1, 1, [one(step)], [], [one(step)]))
        assert len(assembly._waiting) == len(assembly._gathers) <= MAX_GATHERS
    found += assembly.flush()
    assert [(row["step"], row["ranks"]) for row in found] == [(step, 2) for step in range(1, 101)]


def test_slowest_rank_is_global_if_some_ranks_are_missing() -> None:
    table = np.full((4, VECTORS.width), np.nan, dtype=np.float32)
    for rank, backward in ((1, 0.1), (3, 0.4)):
        table[rank] = VECTORS.pack([one(1, backward=backward)], 1, 1)[0]
    row = ledger_row(1, table, VECTORS.names)
    assert row["ranks"] == 2
    assert row["slowest_rank"] == 3


def test_starved_and_stopped_time_does_not_make_a_rank_slowest() -> None:
    """Rank 0 was busy longest but starved for half of it; rank 2 was stopped."""
    delays = [ThreadDelays(starved=0.4), ThreadDelays(), ThreadDelays(stopped=3.0, crowded=1.0)]
    steps = [
        [replace(one(1, backward=backward), delays=delay)]
        for backward, delay in zip((0.8, 0.6, 3.2), delays, strict=True)
    ]
    (row,) = LedgerAssembler(VECTORS, ranks=3).add(1, blocks(1, 1, *steps))
    assert (row["slowest_rank"], row["slowest_busy_seconds"]) == (1, pytest.approx(0.71, abs=1e-6))
    assert row["median_busy_seconds"] == pytest.approx(0.91, abs=1e-6), (
        "what ranks are compared with is not corrected"
    )
    assert row["delays"] == {"starved": [0.4, 0], "stopped": [3.0, 2], "crowded": [1.0, 2]}
    (idle,) = LedgerAssembler(VECTORS, ranks=1).add(1, blocks(1, 1, [one(1)]))
    assert idle["delays"] == {}


def test_step_numbers_beyond_float32_precision() -> None:
    """The control: the number itself is not exact in float32."""
    step = 2**26 + 1
    assert int(np.float32(step)) != step
    (row,) = LedgerAssembler(VECTORS, ranks=1).add(step + 2, blocks(step + 2, 1, [one(step)]))
    assert row["step"] == step


def test_gather_of_a_thousand_ranks_is_small_and_fast() -> None:
    vectors = StepVectors(part_names(Axes(data=4, tensor=8, pipeline=8, context=4, expert=4)))
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
    rows = LedgerAssembler(vectors, ranks).add(slots + 1, gathered)
    assert time.process_time() - began < 1.0
    assert [row["step"] for row in rows] == [step.step for step in steps]
    assert {row["slowest_rank"] for row in rows} == {slow}
    assert {row["parts"][OPTIMIZER][1] for row in rows} == {0.0}
    assert max(len(json.dumps(row)) for row in rows) < 1000


def test_totals_are_formatted_by_size() -> None:
    totals = LedgerTotals()
    row: Mapping[str, Any] = ledger_row(
        1,
        VECTORS.pack(
            [step_time(1, {FORWARD: 0.3, BACKWARD: 0.6, TENSOR: 0.09, UNEXPLAINED: 0.008, DATA: 0.002})], 1, 1
        ),
        VECTORS.names,
    )
    for _ in range(10):
        totals.add(row)
    assert (
        totals.format_shares() == "backward 60.0%, forward 30.0%, communication/tensor 9.0%, unexplained 0.8%"
    )
    assert LedgerTotals().format_shares() == "unexplained 0.0%"


def test_busy_time_comes_from_the_recorder() -> None:
    step = replace(one(1), busy=42.0)
    (row,) = LedgerAssembler(VECTORS, ranks=1).add(1, blocks(1, 1, [step]))
    assert row["slowest_busy_seconds"] == 42.0
