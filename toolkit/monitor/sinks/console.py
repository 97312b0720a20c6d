"""What a person sees of training: steps done of all, speed and time left, the loss, each evaluation as a line, and alerts."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from toolkit.monitor.alert import Alert
from toolkit.monitor.sink import Kind, NullSink, Row
from toolkit.progress import Progress, quantity

ALERT_LENGTH = 2000  # characters; the files have the whole


def say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)


def warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def shown(kind: Kind, row: Row, *, every: int, steps: int) -> bool:
    """What a person is shown: of the steps each ``every``-th, and the last of the run's."""
    if kind is Kind.STEP:
        return row["step"] % every == 0 or row["step"] == steps
    return kind in (Kind.EVAL, Kind.ALERT)


class ConsoleSink(NullSink):
    """
    Args:
        steps, done: of the whole run, and of earlier attempts.
        unit: what rows count: their ``<unit>_per_second`` is the speed.
    """

    def __init__(self, progress: Progress, *, steps: int, done: int, unit: str = "tokens",
                 say: Callable[[str], None] = say) -> None:
        self._task = progress.task("training", total=steps, unit="steps", done=done)
        self._steps, self._shown = steps, done
        self._unit, self._say = unit, say

    def log(self, kind: Kind, row: Row) -> None:
        if kind is Kind.STEP:
            self._step(row)
        elif kind is Kind.EVAL:
            self._eval(row)

    def _step(self, row: Row) -> None:
        step = row["step"]
        skipped = "  skipped" if row.get("skipped") else ""
        if skipped and "loss_scale" in row:
            skipped += f", loss scale {row['loss_scale']:g}"
        used = f"  MFU {row['mfu']:.1%}" if "mfu" in row else ""
        note = f"loss {row['loss']:.4f}  {quantity(row[f'{self._unit}_per_second'], self._unit)}/s{used}{skipped}"
        self._task.advance(step - self._shown, note)
        self._shown = step
        if step == self._steps:
            self._task.finish()

    def _eval(self, row: Row) -> None:
        meaning = f"accuracy {row['accuracy']:.1%}" if "accuracy" in row else f"perplexity {_perplexity(row['loss'])}"
        self._say(f"step {row['step']}: {row['set']} loss {row['loss']:.4f} ({meaning}), {row['seconds']:.1f} s")

    def close(self, exit_code: int) -> None:
        self._task.finish()


class AlertLines(NullSink):
    """Alerts, as they come."""

    def __init__(self, warn: Callable[[str], None] = warn) -> None:
        self._warn = warn

    def log(self, kind: Kind, row: Row) -> None:
        if kind is Kind.ALERT:
            words = f"{row['level']}: {Alert.of(row)}"
            self._warn(words if len(words) <= ALERT_LENGTH else f"{words[:ALERT_LENGTH]} ... (whole in the run's alerts)")


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.4g}" if loss < 100 else "beyond 1e43"
