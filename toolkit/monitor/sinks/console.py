"""What a person sees of training: a row of figures every few steps, each evaluation as a line, and alerts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.sink import Kind, NullSink, Row
from toolkit.progress import Progress, duration, quantity

log = logging.getLogger(__name__)

DAY = 86400.0  # seconds
HEADING_ROWS = 25  # rows below which the heading is repeated
ALERT_LENGTH = 2000  # characters; the files have the whole


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of training: at most 80 columns wide, the same in a terminal, a pipe and the attempt's log.

    Attributes:
        unit: what rows count: their ``<unit>_per_second`` is the speed.
        device: whether memory is that of the GPU (its fullest one), not of the rank's process.
        utilisation: whether the share of the GPUs' peak is known.
    """

    unit: str = "tokens"
    device: bool = False
    utilisation: bool = False

    def heading(self) -> str:
        share = "MFU" if self.utilisation else "samples/s"
        return self._line("step", "loss", "grad norm", "lr", f"{self.unit}/s", share, "memory", "eta")

    def row(self, row: Row) -> str:
        speed = row[f"{self.unit}_per_second"]
        share = _shown(row["mfu"], ".1%") if "mfu" in row else _shown(row.get("samples_per_second"), ".3g")
        memory = row.get("device_bytes" if self.device else "host_bytes")
        left = row.get("eta_seconds")
        loss = row["loss"]
        short = isinstance(loss, int | float) and abs(loss) < 1000
        return self._line(
            f"{row['step']}",
            _shown(loss, ".4f" if short else ".4g"),
            _shown(row["grad_norm"], ".3g"),
            _shown(row["lr"], ".2e"),
            f"{speed:,.0f}" if speed < 1e6 else f"{speed / 1e6:.4g}M",
            share,
            quantity(memory, "B") if memory is not None else "-",
            _left(left) if left is not None else "-",
        )

    def _line(
        self, step: str, loss: str, norm: str, lr: str, speed: str, share: str, memory: str, left: str
    ) -> str:
        return f"{step:>7}  {loss:>8}  {norm:>9}  {lr:>8}  {speed:>9}  {share:>9}  {memory:>8}  {left:>8}"


def _left(seconds: float) -> str:
    return duration(seconds) if seconds < DAY else f"{seconds // DAY:.0f}d {seconds % DAY // 3600:.0f}h"


def _shown(value: object, form: str) -> str:
    """A number as ``form`` says; anything else, of a loss that is no number say, as it is."""
    return format(value, form) if isinstance(value, int | float) else "-" if value is None else str(value)


class ConsoleSink(NullSink):
    """A row of training each ``every`` steps, at the first step of a start and at the last of the run; in a terminal, a bar below them.

    Args:
        steps, done: of the whole run, and of earlier attempts.
    """

    def __init__(
        self,
        progress: Progress,
        table: Table,
        *,
        steps: int,
        done: int,
        every: int,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._task = (progress if progress.live else Progress.silent()).task(
            "training", total=steps, unit="steps", done=done
        )
        self._table, self._steps, self._done, self._every, self._say = table, steps, done, every, say
        self._rows = 0

    def log(self, kind: Kind, row: Row) -> None:
        if kind is Kind.STEP:
            self._step(row)
        elif kind is Kind.EVAL:
            self._eval(row)

    def _step(self, row: Row) -> None:
        step = row["step"]
        self._task.advance(step - self._done)
        self._done = step
        if self._rows == 0 or step % self._every == 0 or step == self._steps:
            if self._rows % HEADING_ROWS == 0:
                self._say(self._table.heading())
            self._rows += 1
            self._say(self._table.row(row))
            if row.get("skipped"):
                scale = f" after an overflow, loss scale {row['loss_scale']:g}" if "loss_scale" in row else ""
                self._say(f"step {step}: skipped{scale or ', because its gradient norm is not finite'}")
        if step == self._steps:
            self._task.finish()

    def _eval(self, row: Row) -> None:
        meaning = (
            f"accuracy {row['accuracy']:.1%}"
            if "accuracy" in row
            else f"perplexity {_perplexity(row['loss'])}"
        )
        self._say(
            f"step {row['step']}: {row['set']} loss {row['loss']:.4f} ({meaning}), {row['seconds']:.1f} s"
        )

    def close(self, exit_code: int) -> None:
        self._task.finish()


class AlertLines(NullSink):
    """Alerts, as they come."""

    def log(self, kind: Kind, row: Row) -> None:
        if kind is Kind.ALERT:
            alert = Alert.of(row)
            text = str(alert)
            if len(text) > ALERT_LENGTH:
                text = f"{text[:ALERT_LENGTH]} ... (the run's alerts file has the whole text)"
            log.log(logging.ERROR if alert.level is Level.ERROR else logging.WARNING, text)


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.4g}" if loss < 100 else "beyond 1e43"
