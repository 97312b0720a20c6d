"""How benchmarks/snapshot_overhead.py finds the cost of a snapshot in the durations of steps.

pytest tests/testing/test_snapshot_overhead_benchmark.py
"""

from __future__ import annotations

import random
from itertools import accumulate
from types import ModuleType
from typing import Any

import pytest

EVERY = 40


@pytest.fixture(scope="module")
def overhead(benchmarks: None) -> ModuleType:
    import snapshot_overhead

    return snapshot_overhead


def moments(overhead: ModuleType, added: float, *, noise: float = 0.02, steps: int = 20 * EVERY) -> list[Any]:
    """Return the moments of steps of 0.4 s, of which snapshots delay two by ``added`` seconds in total."""
    rng = random.Random(3)
    took = [rng.gauss(0.4, noise) + added / 2 * (step % EVERY in (1, 2)) for step in range(7, steps)]
    return [
        overhead.StepMoment(time, step, 0.4)
        for step, time in enumerate(accumulate(took, initial=1e9), start=6)
    ]


def test_cost_of_a_snapshot_is_found_in_noisy_steps(overhead: ModuleType) -> None:
    found = overhead.summarize(overhead.added_seconds(moments(overhead, 0.12), EVERY))
    assert found["seconds"] == pytest.approx(0.12, abs=3 * found["standard_error"])
    assert found["standard_error"] < 0.03


def test_control_finds_nothing_halfway_between_snapshots(overhead: ModuleType) -> None:
    found = overhead.summarize(overhead.added_seconds(moments(overhead, 0.12), EVERY, offset=EVERY // 2))
    assert abs(found["seconds"]) < 3 * found["standard_error"]


def test_only_snapshots_with_all_steps_until_the_next_count(overhead: ModuleType) -> None:
    exact = moments(overhead, 0.12, noise=0.0, steps=3 * EVERY + 5)
    assert overhead.added_seconds(exact, EVERY) == [pytest.approx(0.12, abs=1e-5)] * 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"overhead": 0.0101}, "an overhead of 1.01%"),
        ({"control": {"seconds": -0.04, "standard_error": 0.01}}, "the control differs from 0"),
    ],
)
def test_overhead_beyond_its_bound_and_a_control_that_differs_are_problems(
    overhead: ModuleType, change: dict[str, Any], problem: str | None
) -> None:
    row = {"overhead": 0.0099, "control": {"seconds": 0.02, "standard_error": 0.01}, **change}
    assert [text.startswith(problem or "") for text in overhead.find_problems(row)] == [True] * bool(problem)
