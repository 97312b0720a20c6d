"""Reduce a run's rows of steps, evaluations, the ledger and alerts to what the report shows.

Only downsampled data is kept, so memory does not grow with the number of rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.monitor.report.curve_reader import Advance, is_number, read_curves, rows_with, step_bucket_width
from toolkit.monitor.report.downsample import Curves, RunningStats, bucket_width, downsample
from toolkit.monitor.report.run_data import (
    MAX_ALERTS,
    AlertRows,
    AttemptRecord,
    LedgerCurves,
    effective_attempts,
    mapping_at,
)
from toolkit.rows import float_or_nan, read_rows
from toolkit.step_parts import COMMUNICATION, PARTS

# The keys of step rows (``MetricsLogger`` in ``observe/progress_hooks.py``); those of sources begin
# with EPOCHS.
STEP_METRICS = frozenset(
    (
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "images",
        "step_seconds",
        "data_seconds",
        "tokens_per_second",
        "images_per_second",
        "samples_per_second",
        "tokens_per_second_per_gpu",
        "images_per_second_per_gpu",
        "model_tflops_per_gpu",
        "hardware_tflops_per_gpu",
        "mfu",
        "hfu",
        "elapsed_seconds",
        "eta_seconds",
        "gpu_hours",
        "cost",
        "loss_scale",
        "skipped",
        "gc_seconds",
        "host_bytes",
        "device_bytes",
        "device_peak_bytes",
        "dropped_rows",
    )
)
EPOCHS = "epochs/"
PLANNED = frozenset(
    (
        "tokens",
        "images",
        "step_seconds",
        "device_bytes",
        "device_peak_bytes",
        "host_bytes",
        "wall_seconds",
        *PARTS,
    )
)
ATTEMPT_SAMPLE = 4096  # values of one metric of one attempt from which the median is computed
RowMetrics = Callable[[Mapping[str, Any]], Mapping[str, float]]


class AttemptStats:
    """Collects the planned metrics by attempt, over the steps of each. A run of one attempt needs no separate
    statistics.
    """

    def __init__(self, attempts: Sequence[AttemptRecord]) -> None:
        standing = effective_attempts(attempts)
        self._numbers = [attempt.number for attempt, _ in standing]
        self._firsts = [first for _, first in standing]
        self.totals: dict[int, dict[str, RunningStats]] = (
            {number: {} for number in self._numbers} if len(standing) > 1 else {}
        )

    def wrap(self, metrics: RowMetrics) -> RowMetrics:
        """Wrap ``metrics`` so that the planned ones are also added to the attempt of the row's step."""
        if not self.totals:
            return metrics

        def added(row: Mapping[str, Any]) -> Mapping[str, float]:
            row_values = metrics(row)
            index = bisect_left(self._firsts, row["step"]) - 1
            if index >= 0:
                totals = self.totals[self._numbers[index]]
                for name in filter(_is_planned, row_values):
                    totals.setdefault(name, RunningStats(ATTEMPT_SAMPLE)).add([row_values[name]])
            return row_values

        return added


def _is_planned(name: str) -> bool:
    """Return whether a plan states the metric or part, rather than its spread over ranks."""
    return name in PLANNED or (name.startswith(COMMUNICATION) and not name.endswith((" min", " max")))


def step_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    metrics = {
        name: float_or_nan(value)
        for name, value in row.items()
        if (name in STEP_METRICS or name.startswith(EPOCHS))
        and (value is None or isinstance(value, int | float))
    }
    return {**metrics, "step": row["step"]}


def ledger_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    metrics = {"wall_seconds": row["wall_seconds"]} if is_number(row.get("wall_seconds")) else {}
    for name, spread in mapping_at(row, "parts").items():
        if isinstance(spread, list) and len(spread) == 3 and all(map(is_number, spread)):
            metrics |= {f"{name} min": spread[0], name: spread[1], f"{name} max": spread[2]}
    return metrics


def read_eval_curves(path: Path, advance: Advance) -> dict[str, Curves]:
    sets: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for row in rows_with(path, "step", advance):
        metrics: dict[str, float] = {
            name: float_or_nan(row[name])
            for name in ("loss", "accuracy", "seconds")
            if name in row and (row[name] is None or is_number(row[name]))
        }
        sets.setdefault(str(row.get("set")), []).append((row["step"], metrics))
    return {
        name: downsample(rows, rows[0][0], bucket_width(rows[0][0], max(rows[0][0], rows[-1][0])))
        for name, rows in sorted(sets.items())
    }


def read_ledger_curves(path: Path, advance: Advance, attempt_stats: AttemptStats) -> LedgerCurves:
    counters: dict[str, Counter[int]] = {"slowest_rank": Counter(), "data_rank": Counter()}
    excess, ranks = 0.0, 0

    def metrics(row: Mapping[str, Any]) -> dict[str, float]:
        nonlocal excess, ranks
        if isinstance(row.get("ranks"), int):
            ranks = max(ranks, row["ranks"])
        for key, counter in counters.items():
            if isinstance(row.get(key), int):
                counter[row[key]] += 1
        if is_number(row.get("slowest_busy_seconds")) and is_number(row.get("median_busy_seconds")):
            excess += row["slowest_busy_seconds"] - row["median_busy_seconds"]
        return ledger_metrics(row)

    curves = read_curves(path, "step", attempt_stats.wrap(metrics), advance, width=step_bucket_width)
    return LedgerCurves(curves, ranks, counters["slowest_rank"], counters["data_rank"], excess)


def read_alerts(paths: Sequence[Path], advance: Advance) -> AlertRows:
    counts: Counter[tuple[str, str]] = Counter()
    newest: list[dict[str, Any]] = []
    for path in paths:
        last_rows: deque[dict[str, Any]] = deque(maxlen=MAX_ALERTS)
        for row in read_rows(path, advance):
            counts[str(row.get("level", "warning")), str(row.get("name", "unnamed"))] += 1
            last_rows.append(row)
        newest += last_rows
    return AlertRows(
        sorted(newest, key=lambda row: row["step"] if is_number(row.get("step")) else 0)[-MAX_ALERTS:], counts
    )
