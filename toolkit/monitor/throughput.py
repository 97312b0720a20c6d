"""Throughput and utilisation of a run, its elapsed time, cost and remaining time.

Throughput refers to ``step_seconds``, from the start of the wait for samples until all ranks have the step's
result. Evaluation, saving and logging happen between steps; they count for the remaining time and the cost.
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
WINDOW = 100  # steps from which the remaining time is estimated
TRIMMED_SHARE = 0.05  # trimmed at either end, so that a hiccup does not change the estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The constants of a run's throughput.

    Attributes:
        unit: see ``RunPlan.unit``.
        gpus: None if ranks run on CPUs, in which case nothing is computed per GPU.
        model_flops, hardware_flops: of training on one unit, without and with recomputation; None if unknown.
        peak_flops: peak FLOP/s of one GPU in the run's precision; None if unknown.
    """

    unit: str
    gpus: int | None
    model_flops: float | None
    hardware_flops: float | None
    peak_flops: float | None

    @classmethod
    def from_plan(cls, plan: RunPlan) -> Throughput:
        return cls(
            unit=plan.unit,
            gpus=plan.world.ranks if plan.world.device is Device.CUDA else None,
            model_flops=model_flops(plan),
            hardware_flops=hardware_flops(plan),
            peak_flops=peak_flops(plan),
        )

    def row(self, *, samples: int, units: int, computed: int, seconds: float) -> dict[str, float]:
        """Return the throughput of one step of ``seconds``.

        Args:
            samples: samples in the global batch.
            units: units that the loss is a mean over.
            computed: units that went through the model, including masked ones; they determine the FLOPs.

        Returns:
            Rates per second, FLOP/s in units of 10^12, utilisation as fractions of 1. With recomputation
            there are hardware figures as well.
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
    """Time spent by a run over its attempts. ``gpu_hours`` is 0 on CPUs."""

    seconds: float = 0.0
    gpu_hours: float = 0.0


def time_spent(rows: Iterable[Row]) -> TimeSpent:
    """Return the time spent by the attempts that logged these rows. Each row has cumulative sums, so the
    maximum is the latest.
    """
    rows_with_time = [row for row in rows if "elapsed_seconds" in row]
    return TimeSpent(
        max((row["elapsed_seconds"] for row in rows_with_time), default=0.0),
        max((row.get("gpu_hours", 0.0) for row in rows_with_time), default=0.0),
    )


class RunTimer:
    """Tracks elapsed time, cost and remaining time of a run.

    The time of an attempt before its first step (starting, loading) is counted with that step. The time after
    its last row is lost if the attempt is killed.

    Args:
        before: time spent by earlier attempts.
        now: the start of this attempt on a monotonic clock; later times are on the same clock.
    """

    def __init__(self, plan: RunPlan, before: TimeSpent, now: float) -> None:
        self._plan, self._before, self._began = plan, before, now
        self._gpus = plan.world.ranks if plan.world.device is Device.CUDA else 0
        self._price = plan.config.monitor.price_per_gpu_hour
        self._samples = plan.batch.at(plan.config.train.steps).first_sample
        self._recent: deque[float] = deque(maxlen=WINDOW)  # seconds per sample of each step
        self._last: float | None = None  # time of the last row
        self._between = 0.0  # seconds between steps since the first row
        self._steps = 0  # since the first row

    def row(self, *, step: int, seconds: float, now: float) -> dict[str, float]:
        """Return the time figures after ``step`` completed steps, the last of which took ``seconds``.

        ``eta_seconds`` is present from an attempt's second step on, because the first one includes
        compilation and warm-up.
        """
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

    def format_spent(self, now: float) -> str:
        """Format the run's time and cost."""
        sums = self.spent(now)
        text = duration(sums.seconds) + (" over all attempts" if self._before.seconds else "")
        if self._gpus:
            text += (
                f", {sums.gpu_hours:,.3g} GPU-hours"
                if sums.gpu_hours < 100
                else f", {sums.gpu_hours:,.0f} GPU-hours"
            )
            if self._price is not None:
                text += f", cost {sums.gpu_hours * self._price:,.2f} at {self._price:g} each"
        return text

    def _left(self, step: int) -> float:
        """Estimate the remaining time from the trimmed pace of recent steps and the mean time between steps.

        Evaluations and saves are too rare for a window, so all steps of the attempt count for the latter.
        """
        ordered = sorted(self._recent)
        out = -(-len(ordered) // round(1 / TRIMMED_SHARE)) if len(ordered) > 2 else 0
        middle = ordered[out : len(ordered) - out]
        samples = self._samples - self._plan.batch.at(step).first_sample
        return (
            samples * sum(middle) / len(middle)
            + (self._plan.config.train.steps - step) * self._between / self._steps
        )
