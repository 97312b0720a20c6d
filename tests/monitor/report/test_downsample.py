"""Downsampling of rows to bounded curves without losing extremes.

pytest tests/monitor/report/test_downsample.py
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolkit.monitor.report.curve_reader import ignore_progress, read_curves, time_bucket_width
from toolkit.monitor.report.downsample import POINTS, RunningStats, bucket_width, downsample


def rows(count: int) -> Iterator[tuple[float, dict[str, float]]]:
    noise = random.Random(1)
    for step in range(1, count + 1):
        figures = {"loss": noise.gauss(3, 1)}
        if step % 7 == 0:
            figures["save"] = 2.0
        yield step, figures


def test_few_rows_are_kept_unchanged() -> None:
    all_rows = list(rows(500))
    curves = downsample(all_rows, 1, bucket_width(1, 500))
    assert curves.width == 1
    assert curves.x == [step for step, _ in all_rows]
    for part in (
        curves.curves["loss"].low,
        curves.curves["loss"].mid,
        curves.curves["loss"].high,
        curves.curves["loss"].sum,
    ):
        assert part == [figures["loss"] for _, figures in all_rows]
    assert curves.curves["save"].mid == [figures.get("save") for _, figures in all_rows]


def test_many_rows_become_minimum_median_and_maximum() -> None:
    count = 10 * POINTS + 3
    all_rows = list(rows(count))
    width = bucket_width(1, count)
    curves = downsample(all_rows, 1, width)
    assert len(curves.x) <= POINTS
    assert width == 11
    for number, x in enumerate(curves.x):
        bucket = all_rows[int(number * width) : int((number + 1) * width)]
        values = [figures["loss"] for _, figures in bucket]
        saves = [figures["save"] for _, figures in bucket if "save" in figures]
        assert x == (bucket[0][0] + bucket[-1][0]) / 2
        assert curves.curves["loss"].low[number] == min(values)
        assert curves.curves["loss"].mid[number] == statistics.median(values)
        assert curves.curves["loss"].high[number] == max(values)
        assert curves.curves["save"].sum[number] == (sum(saves) or None)
    total = curves.total("loss")
    everything = [figures["loss"] for _, figures in all_rows]
    assert (total.count, total.low, total.high, total.first, total.last) == (
        count,
        min(everything),
        max(everything),
        everything[0],
        everything[-1],
    )
    assert total.sum == pytest.approx(sum(everything))
    assert total.median == pytest.approx(statistics.median(everything))
    assert curves.total("save").count == count // 7
    assert curves.total("nothing").median is None


def test_values_that_are_not_finite_are_gaps_and_counted() -> None:
    all_rows = [
        (1.0, {"loss": 1.0}),
        (2.0, {"loss": math.nan}),
        (3.0, {"loss": math.inf}),
        (4.0, {}),
        (5.0, {"loss": 2.0}),
    ]
    curves = downsample(all_rows, 1, 1)
    assert curves.curves["loss"].mid == [1.0, None, None, None, 2.0]
    assert curves.total("loss").not_finite == 2
    whole = downsample(all_rows, 1, 10)
    assert (whole.curves["loss"].low, whole.curves["loss"].mid, whole.curves["loss"].high) == (
        [1.0],
        [1.5],
        [2.0],
    )


def test_median_of_a_bounded_sample_is_close() -> None:
    noise, total, everything = random.Random(2), RunningStats(keep=1000), []
    for _ in range(400):
        values = [noise.gauss(10, 2) for _ in range(100)]
        everything += values
        total.add(values)
        assert len(total._sample) <= 1000
    assert total.median == pytest.approx(statistics.median(everything), abs=0.3)
    none = RunningStats(keep=0)
    none.add([1.0, 2.0])
    assert (none.median, none.mean, len(none._sample)) == (None, 1.5, 0)


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 1200), (1, 1201), (500, 10_000_019), (7, 8)])
def test_number_of_buckets_is_bounded(first: int, last: int) -> None:
    width = bucket_width(first, last)
    assert width == int(width)
    assert (last - first) // width < POINTS


def test_pauses_between_attempts_take_no_buckets(tmp_path: Path) -> None:
    """Two attempts of 3,000 samples each, three days apart."""
    times = [10 * number + (3 * 86_400 if number >= 3000 else 0) for number in range(6000)]
    file = tmp_path / "node-0.jsonl"
    file.write_text("".join(json.dumps({"time": 1e9 + at, "value": at % 7}) + "\n" for at in times))
    curves = read_curves(
        file,
        "time",
        lambda row: {"value": row["value"]},
        ignore_progress,
        width=time_bucket_width,
        points=300,
    )
    assert curves.rows == 6000
    assert 280 <= len(curves.x) <= 310
    assert sum(x < 1e9 + 40_000 for x in curves.x) == pytest.approx(len(curves.x) / 2, abs=2)
    few = read_curves(
        file,
        "time",
        lambda row: {"value": row["value"]},
        ignore_progress,
        width=time_bucket_width,
        points=6000,
    )
    assert few.x == [1e9 + at for at in times]
