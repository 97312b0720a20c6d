"""Whether training still learns: losses and gradient norms that are no numbers, spike or shift; fp16's loss scale; validation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.detector import Detector
from toolkit.monitor.health.robust_stats import noise_level
from toolkit.monitor.sink import Kind, Row

BEFORE = 50  # steps whose noise a value is compared with
LEVEL = 10  # the newest of them, whose median it is compared with: a loss falls
ENOUGH = 20  # of them, before anything is judged
WATCHED = 10  # steps after a spike, in which it comes back or stays


def go_back(step: int) -> str:
    """A resumed run must keep optim.*, so that another learning rate makes a new run."""
    return f"start a new run with run.fork=RUN_DIR/checkpoints/step-N of a checkpoint before step {step}"


class NonFinite(Detector):
    """A loss or a gradient norm that is infinite or NaN. A step that fp16's loss scaler skipped has an infinite norm by
    design.

    Which of them came first tells where to look: a loss comes out of forward; the norm, if the loss is finite, out of
    backward. Such a step is skipped, so the weights are as sound as they were before: rows of such steps record whether
    they are finite.
    """

    def __init__(self) -> None:
        self._since: dict[str, int] = {}

    def see(self, kind: Kind, row: Row) -> Alert | None:
        step, broken = row["step"], [name for name in ("loss", "grad_norm") if not math.isfinite(row[name])]
        if row.get("skipped") and "weights_finite" not in row:  # by the loss scale
            broken = [name for name in broken if name == "loss"]
        for name in ("loss", "grad_norm"):
            if name in broken:
                self._since.setdefault(name, step)
            else:
                self._since.pop(name, None)
        if not broken:
            return None
        first = min(
            broken, key=lambda name: self._since[name]
        )  # of one step the loss, which is computed before
        what = "loss" if first == "loss" else "gradient norm"
        began = self._since[first]
        where_from = (
            "forward gave it" if first == "loss" else "backward gave it, from a loss that was a number"
        )
        weights = ""
        if "weights_finite" in row:
            weights = (
                "; the weights are finite" if row["weights_finite"] else "; the weights are not finite either"
            )
            weights += ", and the step was skipped" if row.get("skipped") else ""
        return Alert(
            name="non-finite-loss" if first == "loss" else "non-finite-gradient",
            level=Level.ERROR,
            step=step,
            cause=f"the {what} is not a finite number, first in step {began}: {where_from}{weights}",
            evidence=f"loss {row['loss']:g}, gradient norm {row['grad_norm']:g}, learning rate {row['lr']:g}",
            next_step=f"{go_back(began)}, with a smaller optim.lr or optim.clip=1, or precision=bf16 instead of fp16; where it comes again "
            "in the same step look at that step's samples, where it does not test the GPUs: dcgmi diag -r 3",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JumpCriteria:
    """One figure of a step that should not jump.

    Attributes:
        key: of the row; ``value`` makes of it what is compared.
        least: the least noise (standard deviation) that is believed, so that a run without noise does not call every change a spike.
        spike: so many times the noise above the level is one.
        shift: so many, and most of the steps that are watched, is a shift.
    """

    key: str
    words: str
    value: Callable[[float], float]
    least: Callable[[float], float]
    spike: float
    shift: float


def _logarithm(norm: float) -> float:
    return math.log(max(norm, 1e-30))


# Losses of batches scatter about normally: ten standard deviations do not happen by chance, and less than 1% of the loss is not believed.
# Gradient norms have heavy tails, so their logarithm is compared: at the least noise a spike is a factor of 20, a shift one of 5. A single
# one of 7 came in a sound run of 2,000 steps.
LOSS = JumpCriteria(
    key="loss",
    words="loss",
    value=lambda loss: loss,
    least=lambda middle: 0.01 * abs(middle) + 1e-6,
    spike=10,
    shift=4,
)
GRADIENT_NORM = JumpCriteria(
    key="grad_norm", words="gradient norm", value=_logarithm, least=lambda middle: 0.2, spike=15, shift=8
)


class JumpDetector(Detector):
    """A figure that jumps up: it is told when it is known whether it came back (a spike) or stayed (a shift), ten steps later at most.

    A rise without a spike is a shift as well: eight of the last ten steps above the ten before them.
    """

    STAYED = 8  # of WATCHED

    def __init__(self, figure: JumpCriteria) -> None:
        self._figure = figure
        self._before: deque[float] = deque(maxlen=BEFORE)
        self._newest: deque[tuple[int, float, float]] = deque(maxlen=WATCHED)  # step, compared, as it is
        self._spike: tuple[int, float] | None = None  # step, as it is: the highest of the one that is watched
        self._watched = 0

    def see(self, kind: Kind, row: Row) -> Alert | None:
        shown = row[self._figure.key]
        if not math.isfinite(shown) or row.get("skipped"):
            return None  # NonFinite's
        self._newest.append((row["step"], self._figure.value(shown), shown))
        found = self._judge(row) if len(self._before) >= ENOUGH else None
        if len(self._newest) == WATCHED and (self._spike is None or found is not None):
            self._before.append(self._newest[0][1])
        return found

    def _judge(self, row: Row) -> Alert | None:
        figure, before = self._figure, list(self._before)
        middle = median(before[-LEVEL:])
        scale = max(noise_level(before), figure.least(middle))
        high = [(step, shown) for step, value, shown in self._newest if value > middle + figure.shift * scale]
        if len(high) >= self.STAYED:
            first = high[0][0]
            self._begin_anew()
            return self._alert(
                "shift", row, high, middle, scale, f"has gone up in step {first} and stays there"
            )
        _, newest, shown = self._newest[-1]
        if self._spike is None:
            if newest <= middle + figure.spike * scale:
                return None
            self._spike, self._watched = (row["step"], shown), 0
        elif shown > self._spike[1]:
            self._spike = (row["step"], shown)
        self._watched += 1
        calm = len(self._newest) >= 3 and all(
            value <= middle + figure.shift * scale for _, value, _ in list(self._newest)[-3:]
        )
        if not calm and self._watched < WATCHED:
            return None
        at, _ = self._spike
        self._spike = None
        return self._alert(
            "spike",
            row,
            high,
            middle,
            scale,
            f"jumped in step {at} and came back" if calm else f"jumped in step {at}",
        )

    def _begin_anew(self) -> None:
        """What came after the shift is what later steps are compared with."""
        self._spike = None
        self._before.clear()
        self._before.extend(value for _, value, _ in self._newest)

    def _alert(
        self, what: str, row: Row, high: list[tuple[int, float]], middle: float, scale: float, words: str
    ) -> Alert:
        figure = self._figure
        usual = middle if figure.key == "loss" else math.exp(middle)
        peak_step, peak = max(high, key=lambda entry: entry[1], default=(row["step"], row[figure.key]))
        times = (figure.value(peak) - middle) / scale
        return Alert(
            name=f"{'loss' if figure.key == 'loss' else 'gradient'}-{what}",
            level=Level.WARNING,
            step=row["step"],
            cause=f"the {figure.words} {words}",
            evidence=f"{peak:.4g} in step {peak_step}, {times:.0f} times the noise above the {LEVEL} steps before (median {usual:.4g})",
            next_step=f"if it does not recover: {go_back(peak_step)}, with a smaller optim.lr or optim.clip"
            if what == "shift"
            else f"nothing, if it stays one; if they come more often, a smaller optim.clip or optim.lr, and a look at the samples of "
            f"step {peak_step}",
        )


class LossScaleCollapse(Detector):
    """fp16: the scale halves with every step that is skipped. Ten in a row are a factor of 1,024: what overflows then is not the scale.

    A start may need as many to find its scale: there twice as many.
    """

    IN_A_ROW, AT_START, START = 10, 20, 30

    def __init__(self) -> None:
        self._seen = 0
        self._skipped = 0  # in a row
        self._from = 0.0

    def see(self, kind: Kind, row: Row) -> Alert | None:
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
            name="loss-scale",
            level=Level.ERROR,
            step=row["step"],
            cause="fp16's loss scale collapses: step after step overflows and is skipped, so nothing is learnt",
            evidence=f"{self._skipped} steps in a row were skipped; the loss scale went from {self._from:g} to {row['loss_scale']:g}",
            next_step="start the same command with precision=bf16 if the GPU has it, or "
            f"{go_back(row['step'] - self._skipped)}, with a smaller optim.lr",
        )


class RisingValidation(Detector):
    """The loss of an evaluation set rises: the last three evaluations are all above the best by more than noise.

    A set is the same samples each time, so what scatters is the model: the differences of neighbouring evaluations say by how much. Best is
    the smallest median of three neighbours, since the smallest of many noisy values says little. At least 1%.
    """

    LAST, NOISES, LEAST = 3, 4.0, 0.01

    def __init__(self) -> None:
        self._sets: dict[str, _Curve] = {}

    kinds = (Kind.EVAL,)

    def see(self, kind: Kind, row: Row) -> Alert | None:
        name, step, loss = row["set"], row["step"], row["loss"]
        if not math.isfinite(loss):
            return Alert(
                name="non-finite-evaluation",
                where=name,
                level=Level.ERROR,
                step=step,
                cause=f"the loss on {name} is not a finite number",
                evidence=f"loss {loss:g} after step {step}",
                next_step=f"{go_back(step)}; if the training loss is finite, look for samples in {name} that no training sample is like",
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
            cause=f"the loss on {name} rises: the model gets worse on what it is not trained on",
            evidence=f"{', '.join(f'{value:.4f}' for _, value in last)} in the last {self.LAST} evaluations, {best:.4f} around step "
            f"{best_step} (noise {curve.noise():.4f})",
            next_step=f"if the training loss still falls, it learns its samples by heart: stop here (the best checkpoint is the nearest "
            f"to step {best_step}; checkpoint.keep_every keeps such), take more data or a larger optim.weight_decay; if both "
            "rise, a smaller optim.lr",
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
        """The standard deviation of one evaluation."""
        return noise_level([loss for _, loss in self.newest])
