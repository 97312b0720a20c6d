"""Robust statistics in bounded memory.

pytest tests/monitor/test_robust_stats.py
"""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.monitor.health.robust_stats import BestMedian, BlockMinima, LastingCondition, noise_level


def test_noise_ignores_a_trend() -> None:
    random = np.random.default_rng(0)
    for slope in (0.0, 0.05, -0.05):
        values = [slope * number + random.normal(0, 0.2) for number in range(2000)]
        values[::50] = [100.0] * 40  # outliers
        assert noise_level(values) == pytest.approx(0.2, rel=0.1)


def test_best_median_never_rises() -> None:
    best = BestMedian(10, first=4)
    for value, after in (
        (5, None),
        (1, None),
        (5, None),
        (5, 5),
        *[(9, 5)] * 10,
        *[(3, 5)] * 9,
        (3, 3),
        *[(8, 3)] * 10,
    ):
        best.add(value)
        assert best.value == after


def test_lasting_condition_needs_most_of_the_window() -> None:
    lasting = LastingCondition(5, 4)
    assert [lasting.add(so) for so in (True, True, False, True, True, False, False)] == [
        False,
        False,
        False,
        False,
        True,
        False,
        False,
    ]


def test_block_minima_are_bounded() -> None:
    blocks = BlockMinima(20, first=10)
    for number in range(1_000_000):
        blocks.add(number + (5000 if number % 3 else 0))
    assert 10 <= len(blocks.values) < 20
    assert all(0 <= value - index * blocks.length <= 2 for index, value in enumerate(blocks.values))
