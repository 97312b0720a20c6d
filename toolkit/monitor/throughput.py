"""How fast a run is, against what its machines could do; how long it has taken, what that cost, and when it will be done.

A step's speed is of its ``step_seconds``: from when it begins to wait for its samples to when all ranks know its result. Evaluation,
saving and logging lie between steps; they are in the time left and in the cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.monitor.sink import Row
from toolkit.plan.flops import hardware_flops, model_flops, peak_flops
from toolkit.plan.types import Device, RunPlan
from toolkit.progress import duration

TERA = 1e12
HOUR = 3600.0
WINDOW = 100  # steps that the time left is reckoned from
LEFT_OUT = 0.05  # of them, at either end: a hiccup says nothing of what is to come


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What speed is reckoned with, the same for all steps.

    Attributes:
        unit: see ``RunPlan.unit``.
        gpus: None where ranks are on CPUs: then nothing is told per GPU.
        model_flops, hardware_flops: of training on one unit, without and with what is computed again; None: unknown.
        peak_flops: of one GPU a second, in the run's precision; None: unknown.
    """

    unit: str
    gpus: int | None
    model_flops: float | None
    hardware_flops: float | None
    peak_flops: float | None

    @classmethod
    def of(cls, plan: RunPlan) -> Throughput:
        return cls(
            unit=plan.unit,
            gpus=plan.world.ranks if plan.world.device is Device.CUDA else None,
            model_flops=model_flops(plan),
            hardware_flops=hardware_flops(plan),
            peak_flops=peak_flops(plan),
        )

    def row(self, *, samples: int, units: int, computed: int, seconds: float) -> dict[str, float]:
        """Of one step of ``seconds``.

        Args:
            samples: of its global batch.
            units: that its loss is a mean over.
            computed: units that went through the model, masked ones too; FLOPs are theirs.

        Returns:
            Per second; FLOP/s in units of 10^12, utilisations as fractions of 1. What is computed again has its own figures where
            there is any.
        """
        row = {f"{self.unit}_per_second": units / seconds, "samples_per_second": samples / seconds}
        if self.gpus is None:
            return row
        row[f"{self.unit}_per_second_per_gpu"] = units / seconds / self.gpus
        if self.model_flops is not None and self.hardware_flops is not None:
            row |= self._flops("model", "mfu", self.model_flops * computed / seconds / self.gpus)
            if self.hardware_flops > self.model_flops:
                row |= self._flops("hardware", "hfu", self.hardware_flops * computed / seconds / self.gpus)
        return row

    def _flops(self, of: str, utilisation: str, achieved: float) -> dict[str, float]:
        row = {f"{of}_tflops_per_gpu": achieved / TERA}
        if self.peak_flops is not None:
            row[utilisation] = achieved / self.peak_flops
        return row


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """By a run, over its attempts. ``gpu_hours`` are 0 on CPUs."""

    seconds: float = 0.0
    gpu_hours: float = 0.0


def time_spent(rows: Iterable[Row]) -> TimeSpent:
    """By the attempts of which these rows are some: each row has the sums up to it, so the largest are those of the last."""
    kept = [row for row in rows if "elapsed_seconds" in row]
    return TimeSpent(
        max((row["elapsed_seconds"] for row in kept), default=0.0),
        max((row.get("gpu_hours", 0.0) for row in kept), default=0.0),
    )


class RunTimer:
    """Where a run stands between its beginning and its end: time, cost and time left.

    What each attempt took before its first step (starting, loading) is counted with that step. What it took after its last row is lost
    when it is killed.

    Args:
        before: spent by earlier attempts.
        now: when this attempt began, by a clock that never goes back; later times are by the same one.
    """

    def __init__(self, plan: RunPlan, before: TimeSpent, now: float) -> None:
        self._plan, self._before, self._began = plan, before, now
        self._gpus = plan.world.ranks if plan.world.device is Device.CUDA else 0
        self._price = plan.config.monitor.price_per_gpu_hour
        self._samples = plan.batch.at(plan.config.train.steps).first_sample
        self._recent: deque[float] = deque(maxlen=WINDOW)  # seconds a sample of each step
        self._last: float | None = None  # when the last row was
        self._between = 0.0  # seconds, between the steps since the first row
        self._steps = 0  # since the first row

    def row(self, *, step: int, seconds: float, now: float) -> dict[str, float]:
        """After ``step`` completed steps, the last of which took ``seconds``. ``eta_seconds`` is there from an attempt's second step on:
        the first one has compilation and warm-up in it."""
        if self._last is not None:
            self._steps += 1
            self._between += max(0.0, now - self._last - seconds)
            self._recent.append(seconds / self._plan.batch.at(step - 1).size)
        self._last = now
        sums = self.spent(now)
        row = {"elapsed_seconds": sums.seconds}
        if self._gpus:
            row["gpu_hours"] = sums.gpu_hours
            if self._price is not None:
                row["cost"] = sums.gpu_hours * self._price
        if self._recent:
            row["eta_seconds"] = self._left(step)
        return row

    def spent(self, now: float) -> TimeSpent:
        seconds = now - self._began
        return TimeSpent(self._before.seconds + seconds, self._before.gpu_hours + seconds * self._gpus / HOUR)

    def words(self, now: float) -> str:
        """The time that the run took, and what it cost."""
        sums = self.spent(now)
        words = duration(sums.seconds) + (" over all attempts" if self._before.seconds else "")
        if self._gpus:
            words += (
                f", {sums.gpu_hours:,.3g} GPU-hours"
                if sums.gpu_hours < 100
                else f", {sums.gpu_hours:,.0f} GPU-hours"
            )
            if self._price is not None:
                words += f", cost {sums.gpu_hours * self._price:,.2f} at {self._price:g} each"
        return words

    def _left(self, step: int) -> float:
        """The samples to come, at the pace of the recent ones without the extremes, and after each step what lay between steps on average
        so far: evaluations and saves come too seldom for a window."""
        ordered = sorted(self._recent)
        out = -(-len(ordered) // round(1 / LEFT_OUT)) if len(ordered) > 2 else 0
        middle = ordered[out : len(ordered) - out]
        samples = self._samples - self._plan.batch.at(step).first_sample
        return (
            samples * sum(middle) / len(middle)
            + (self._plan.config.train.steps - step) * self._between / self._steps
        )
