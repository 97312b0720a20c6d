"""Follow a metric of the evaluations: stop early when it no longer improves, and rank checkpoints by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from toolkit.config.checkpoint import KeepBestConfig, MetricMode
from toolkit.config.schema import EarlyStoppingConfig
from toolkit.errors import ConfigError, Problem
from toolkit.hooks import Hook
from toolkit.monitor.sink import Row
from toolkit.rows import float_or_nan


def read_metric(row: Row, key: str, metric: str) -> float | None:
    """Return the metric ``SET/NAME`` of the row of an evaluation; None if the row is of another set.

    Raises:
        ConfigError: the row has no such metric.
    """
    name, _, column = metric.rpartition("/")
    if row["set"] != name:
        return None
    if column not in row:
        known = [f"{name}/{other}" for other in row if other not in ("step", "set", "seconds")]
        raise ConfigError(
            Problem(
                key,
                f"{key}={metric}",
                f"the evaluation of {name} has {', '.join(known)}",
                f"write {key}={known[0]}, or add the metric: +metrics.{column}.target=my.package.Metric",
            )
        )
    return float_or_nan(row[column])


def is_better(value: float, best: float, mode: MetricMode, min_delta: float = 0.0) -> bool:
    """Return whether ``value`` is better than ``best`` by more than ``min_delta``. NaN is never better."""
    if math.isnan(value) or math.isnan(best):
        return math.isnan(best) and not math.isnan(value)
    return value < best - min_delta if mode is MetricMode.min else value > best + min_delta


class EarlyStopping(Hook):
    """End the run after ``patience`` evaluations in a row without improvement: ``train.early_stopping``.

    Args:
        end: receives the reason; the run ends after the next step.
    """

    def __init__(self, settings: EarlyStoppingConfig, end: Callable[[str], None]) -> None:
        assert settings.metric is not None, "early stopping follows a metric"
        self._settings, self._metric, self._end = settings, settings.metric, end
        self._best, self._best_step, self._waited = math.nan, 0, 0

    def on_eval(self, row: Row) -> None:
        settings = self._settings
        value = read_metric(row, "train.early_stopping.metric", self._metric)
        if value is None:
            return
        if is_better(value, self._best, settings.mode, settings.min_delta):
            self._best, self._best_step, self._waited = value, row["step"], 0
            return
        self._waited += 1
        if self._waited >= settings.patience:
            best = "was never a number" if math.isnan(self._best) else f"was best at step {self._best_step}"
            value_text = "" if math.isnan(self._best) else f" ({self._best:.6g})"
            self._end(
                f"train.early_stopping: {self._metric} {best}{value_text} and has not improved in "
                f"{self._waited} evaluations since"
            )

    def state_dict(self) -> dict[str, Any]:
        best = None if math.isnan(self._best) else self._best
        return {"metric": self._metric, "best": best, "best_step": self._best_step, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to wait. A start with another metric begins with a new best value."""
        if state["metric"] == self._metric:
            self._best = math.nan if state["best"] is None else float(state["best"])
            self._best_step, self._waited = state["best_step"], state["waited"]


class BestCheckpoints(Hook):
    """Which checkpoints are the best by a metric: ``checkpoint.keep_best``.

    All ranks make the same decision, because the rows of evaluations are equal on all ranks.

    Args:
        exists: returns those of some steps that have a checkpoint, the same on all ranks. Collective.
    """

    def __init__(
        self, settings: KeepBestConfig, exists: Callable[[Collection[int]], Collection[int]]
    ) -> None:
        assert settings.metric is not None, "checkpoints are ranked by a metric"
        self._settings, self._metric, self._exists = settings, settings.metric, exists
        self._saved: dict[int, float] = {}  # values by step of the best checkpoints
        self._measured: tuple[int, float] | None = None  # of the last evaluation, by step

    def on_eval(self, row: Row) -> None:
        value = read_metric(row, "checkpoint.keep_best.metric", self._metric)
        if value is not None and not math.isnan(value):
            self._measured = (row["step"], value)

    def due(self, step: int) -> bool:
        """Return whether the evaluation after ``step`` is among the best."""
        return step in self._ranking(step)

    def steps(self, step: int) -> list[int]:
        """Record that the state after ``step`` is saved, and return the best steps, the best first."""
        self._saved = self._ranking(step)
        return list(self._saved)

    def _ranking(self, step: int) -> dict[int, float]:
        """Return the best steps with their values if the state after ``step`` is saved. Earlier ones win."""
        candidates = dict(self._saved)
        if self._measured is not None and self._measured[0] == step:
            candidates[step] = self._measured[1]
        sign = 1 if self._settings.mode is MetricMode.min else -1
        ranked = sorted(candidates.items(), key=lambda item: (sign * item[1], item[0]))
        return dict(ranked[: self._settings.count])

    def state_dict(self) -> dict[str, Any]:
        settings = self._settings
        saved = [[step, value] for step, value in self._saved.items()]
        return {"metric": self._metric, "mode": settings.mode.value, "saved": saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the recorded checkpoints that still exist. Collective."""
        recorded = {int(step): float(value) for step, value in state["saved"]}
        existing = self._exists(recorded)
        if (state["metric"], state["mode"]) == (self._metric, self._settings.mode.value):
            self._saved = {step: value for step, value in recorded.items() if step in existing}
