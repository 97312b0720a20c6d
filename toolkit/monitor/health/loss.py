"""Detect losses and gradient norms that are not finite, spike or shift, a collapsing fp16 loss scale, and
rising validation loss.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.detector import Detector
from toolkit.monitor.health.robust_stats import noise_level
from toolkit.monitor.sink import Kind, Row

NOISE_STEPS = 50  # steps from which the noise is estimated
REFERENCE_STEPS = 10  # the newest of them, whose median is the reference because the loss falls
MIN_STEPS = 20  # steps needed before anything is judged
WATCHED_STEPS = 10  # steps after a spike in which it returns or stays


def fork_advice(step: int) -> str:
    """Advise a fork: a resumed run must keep optim.*, so another learning rate needs a new run."""
    return f"start a new run with run.fork=RUN_DIR/checkpoints/step-N of a checkpoint before step {step}"


class NonFinite(Detector):
    """Detect a loss or gradient norm that is infinite or NaN, except in steps that fp16's loss scaler skips
    by design.

    Which of the two comes first shows whether forward or backward produced it. Such a step is skipped, and
    its row records whether the weights are finite.
    """

    def __init__(self) -> None:
        self._since: dict[str, int] = {}

    def check(self, kind: Kind, row: Row) -> Alert | None:
        step, broken = row["step"], [name for name in ("loss", "grad_norm") if not math.isfinite(row[name])]
        if row.get("skipped") and "weights_finite" not in row:  # skipped by the loss scaler
            broken = [name for name in broken if name == "loss"]
        for name in ("loss", "grad_norm"):
            if name in broken:
                self._since.setdefault(name, step)
            else:
                self._since.pop(name, None)
        if not broken:
            return None
        # within one step the loss, which is computed first
        first = min(broken, key=lambda name: self._since[name])
        what = "loss" if first == "loss" else "gradient norm"
        began = self._since[first]
        where_from = "forward produced it" if first == "loss" else "backward produced it from a finite loss"
        weights = ""
        if "weights_finite" in row:
            weights = (
                "; the weights are finite" if row["weights_finite"] else "; the weights are not finite either"
            )
            weights += ", and the step was skipped" if row.get("skipped") else ""
        return Alert(
            name="non-finite",
            fault="loss" if first == "loss" else "gradient",
            level=Level.ERROR,
            step=step,
            cause=f"the {what} is not a finite number, first in step {began}: {where_from}{weights}",
            evidence=f"loss {row['loss']:g}, gradient norm {row['grad_norm']:g}, learning rate {row['lr']:g}",
            next_step=f"{fork_advice(began)}, with a smaller optim.lr or optim.clip=1, or precision=bf16 "
            "instead of fp16; if it recurs in the same step, check that step's samples; if not, "
            "test the GPUs: dcgmi diag -r 3",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpCriteria:
    """A value of each step that should not jump.

    Attributes:
        key: the row's key; ``value`` transforms it for the comparison.
        least: a lower bound of the noise (standard deviation), so that without noise not every change is a
            spike.
        spike: how many times the noise above the reference a value counts as a spike.
        shift: the same for most of the watched steps to count as a shift.
    """

    key: str
    subject: str
    value: Callable[[float], float]
    least: Callable[[float], float]
    spike: float
    shift: float


def _logarithm(norm: float) -> float:
    return math.log(max(norm, 1e-30))


# The losses of batches are about normally distributed: ten standard deviations do not occur by chance, and a
# noise below 1% of the loss is raised to it. Gradient norms have heavy tails, so their logarithm is compared:
# with the least noise a spike is a factor of 20, a shift a factor of 5. A single factor of 7 occurred in a
# healthy run of 2,000 steps.
LOSS = JumpCriteria(
    key="loss",
    subject="loss",
    value=lambda loss: loss,
    least=lambda middle: 0.01 * abs(middle) + 1e-6,
    spike=10,
    shift=4,
)
GRADIENT_NORM = JumpCriteria(
    key="grad_norm", subject="gradient norm", value=_logarithm, least=lambda middle: 0.2, spike=15, shift=8
)


def reference_and_noise(before: Sequence[float], criteria: JumpCriteria) -> tuple[float, float]:
    """Return what the next value is compared with: the median of the newest values, and their noise.

    Args:
        before: at least ``MIN_STEPS`` values in the order of steps, of which the last ``NOISE_STEPS`` count.
    """
    middle = median(before[-REFERENCE_STEPS:])
    return middle, max(noise_level(before[-NOISE_STEPS:]), criteria.least(middle))


def spike_limit(before: Sequence[float], criteria: JumpCriteria) -> float | None:
    """Return the value above which the next one is a spike; None if ``before`` has too few to judge."""
    if len(before) < MIN_STEPS:
        return None
    middle, noise = reference_and_noise(before, criteria)
    return middle + criteria.spike * noise


def is_spike(value: float, before: Sequence[float], criteria: JumpCriteria) -> bool:
    """Return whether ``value`` is a spike after the values ``before``; false if they are too few to judge."""
    limit = spike_limit(before, criteria)
    return limit is not None and value > limit


class JumpDetector(Detector):
    """Detect a value that jumps up. The alert comes when it is clear whether it returned (a spike) or stayed
    (a shift), at most ten steps later.

    A rise without a spike is a shift too: eight of the last ten steps above the ten before them.
    """

    STAYED = 8  # of WATCHED_STEPS

    def __init__(self, figure: JumpCriteria) -> None:
        self._figure = figure
        self._before: deque[float] = deque(maxlen=NOISE_STEPS)
        # step, compared value, logged value
        self._newest: deque[tuple[int, float, float]] = deque(maxlen=WATCHED_STEPS)
        # step and logged value of the highest point of the watched spike
        self._spike: tuple[int, float] | None = None
        self._watched = 0

    def check(self, kind: Kind, row: Row) -> Alert | None:
        shown = row[self._figure.key]
        if not math.isfinite(shown) or row.get("skipped"):
            return None  # NonFinite reports these
        self._newest.append((row["step"], self._figure.value(shown), shown))
        alert = self._assess(row) if len(self._before) >= MIN_STEPS else None
        if len(self._newest) == WATCHED_STEPS and (self._spike is None or alert is not None):
            self._before.append(self._newest[0][1])
        return alert

    def _assess(self, row: Row) -> Alert | None:
        figure, before = self._figure, list(self._before)
        middle, scale = reference_and_noise(before, figure)
        high = [(step, shown) for step, value, shown in self._newest if value > middle + figure.shift * scale]
        if len(high) >= self.STAYED:
            first = high[0][0]
            self._restart_window()
            return self._alert(
                "shift", row, high, middle, scale, f"has risen in step {first} and stays there"
            )
        _, newest, shown = self._newest[-1]
        if self._spike is None:
            if not is_spike(newest, before, figure):
                return None
            self._spike, self._watched = (row["step"], shown), 0
        elif shown > self._spike[1]:
            self._spike = (row["step"], shown)
        self._watched += 1
        calm = len(self._newest) >= 3 and all(
            value <= middle + figure.shift * scale for _, value, _ in list(self._newest)[-3:]
        )
        if not calm and self._watched < WATCHED_STEPS:
            return None
        at, _ = self._spike
        self._spike = None
        return self._alert(
            "spike",
            row,
            high,
            middle,
            scale,
            f"jumped in step {at} and returned" if calm else f"jumped in step {at}",
        )

    def _restart_window(self) -> None:
        """Use the values after the shift as the new reference."""
        self._spike = None
        self._before.clear()
        self._before.extend(value for _, value, _ in self._newest)

    def _alert(
        self, what: str, row: Row, high: list[tuple[int, float]], middle: float, scale: float, text: str
    ) -> Alert:
        figure = self._figure
        usual = middle if figure.key == "loss" else math.exp(middle)
        peak_step, peak = max(high, key=lambda entry: entry[1], default=(row["step"], row[figure.key]))
        times = (figure.value(peak) - middle) / scale
        return Alert(
            name="loss-jump",
            fault=f"{'loss' if figure.key == 'loss' else 'gradient'}-{what}",
            level=Level.WARNING,
            step=row["step"],
            cause=f"the {figure.subject} {text}",
            evidence=f"{peak:.4g} in step {peak_step}, {times:.0f} times the noise above the "
            f"{REFERENCE_STEPS} steps before (median {usual:.4g})",
            next_step=f"if it does not recover: {fork_advice(peak_step)}, with a smaller optim.lr or "
            "optim.clip"
            if what == "shift"
            else "none if it stays a single one; if they become more frequent, use a smaller optim.clip "
            f"or optim.lr, and check the samples of step {peak_step}",
        )


class LossScaleCollapse(Detector):
    """Detect an fp16 loss scale that collapses: ten skipped steps in a row halve it to 1/1024.

    At the start, while the scale is searched for, it takes twice as many.
    """

    IN_A_ROW, AT_START, START = 10, 20, 30

    def __init__(self) -> None:
        self._seen = 0
        self._skipped = 0  # consecutive
        self._from = 0.0

    def check(self, kind: Kind, row: Row) -> Alert | None:
        if "loss_scale" not in row:
            return None
        self._seen += 1
        if not row["skipped"]:
            self._skipped = 0
            return None
        self._skipped += 1
        if self._skipped == 1:
            self._from = row["loss_scale"]
        if self._skipped < (self.AT_START if self._seen <= self.START else self.IN_A_ROW):
            return None
        return Alert(
            name="non-finite",
            fault="loss-scale",
            level=Level.ERROR,
            step=row["step"],
            cause="fp16's loss scale collapses: every step overflows and is skipped, so the model does not "
            "learn",
            evidence=f"{self._skipped} consecutive steps were skipped; the loss scale went from "
            f"{self._from:g} to {row['loss_scale']:g}",
            next_step="start the same command with precision=bf16 if the GPU supports it, or "
            f"{fork_advice(row['step'] - self._skipped)}, with a smaller optim.lr",
        )


class RisingValidation(Detector):
    """Detect a rising evaluation loss: the last three evaluations of a set are above the best by more than
    noise and 1%.

    A set has the same samples each time, so the noise is estimated from the differences of neighbouring
    evaluations. The best is the smallest median of three neighbours, because the minimum of many noisy values
    is too optimistic.
    """

    LAST, NOISES, LEAST = 3, 4.0, 0.01

    def __init__(self) -> None:
        self._sets: dict[str, _Curve] = {}

    kinds = (Kind.EVAL,)

    def check(self, kind: Kind, row: Row) -> Alert | None:
        name, step, loss = row["set"], row["step"], row["loss"]
        if not math.isfinite(loss):
            return Alert(
                name="non-finite",
                fault="evaluation",
                where=name,
                level=Level.ERROR,
                step=step,
                cause=f"the loss on {name} is not a finite number",
                evidence=f"loss {loss:g} after step {step}",
                next_step=f"{fork_advice(step)}; if the training loss is finite, look for samples in {name} "
                "that are unlike all training samples",
            )
        curve = self._sets.setdefault(name, _Curve())
        curve.add(step, loss)
        if curve.best is None or len(curve.newest) < 2 * self.LAST:
            return None
        best_step, best = curve.best
        limit = best + max(self.LEAST * best, self.NOISES * curve.noise())
        last = list(curve.newest)[-self.LAST :]
        if not all(value > limit for _, value in last) or last[-1][1] <= last[0][1] - curve.noise():
            return None
        return Alert(
            name="validation-rising",
            where=name,
            level=Level.WARNING,
            step=step,
            cause=f"the loss on {name} rises: the model gets worse on data that it is not trained on",
            evidence=f"{', '.join(f'{value:.4f}' for _, value in last)} in the last {self.LAST} "
            f"evaluations, {best:.4f} around step "
            f"{best_step} (noise {curve.noise():.4f})",
            next_step="if the training loss still falls, the model overfits: stop (the best checkpoint is "
            f"the nearest to step {best_step}; checkpoint.keep_every keeps such checkpoints), "
            "use more data or a larger optim.weight_decay; if both rise, use a smaller optim.lr",
        )


class _Curve:
    """The evaluations of one set."""

    def __init__(self) -> None:
        self.newest: deque[tuple[int, float]] = deque(maxlen=20)
        self.best: tuple[int, float] | None = None

    def add(self, step: int, loss: float) -> None:
        self.newest.append((step, loss))
        if len(self.newest) >= 3:
            (_, a), (middle, b), (_, c) = list(self.newest)[-3:]
            loss = median((a, b, c))
            if self.best is None or loss < self.best[1]:
                self.best = (middle, loss)

    def noise(self) -> float:
        """Return the standard deviation of one evaluation."""
        return noise_level([loss for _, loss in self.newest])
