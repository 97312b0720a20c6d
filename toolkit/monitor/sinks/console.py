"""Console output of training: a row of figures every few steps, each evaluation as a line, and alerts."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.sink import Kind, Row, Sink
from toolkit.progress import Progress, duration, quantity

log = logging.getLogger(__name__)

DAY = 86400.0  # seconds
HEADING_ROWS = 25  # rows between two headings
ALERT_LENGTH = 2000  # characters; the files have the whole text


@dataclass(frozen=True, slots=True)
class StepTable:
    """Formats the rows of training, at most 80 columns wide, the same in a terminal, a pipe and the attempt's
    log.

    Attributes:
        unit: the unit of throughput, as in the key ``<unit>_per_second``.
        device: whether to show the memory of the fullest GPU instead of the rank's process.
        utilisation: whether the MFU is known.
    """

    unit: str = "tokens"
    device: bool = False
    utilisation: bool = False

    def heading(self) -> str:
        share = "MFU" if self.utilisation else "samples/s"
        return self._line("step", "loss", "grad norm", "lr", f"{self.unit}/s", share, "memory", "eta")

    def row(self, row: Row) -> str:
        speed = row[f"{self.unit}_per_second"]
        share = _format(row["mfu"], ".1%") if "mfu" in row else _format(row.get("samples_per_second"), ".3g")
        memory = row.get("device_bytes" if self.device else "host_bytes")
        left = row.get("eta_seconds")
        loss = row["loss"]
        short = isinstance(loss, int | float) and abs(loss) < 1000
        return self._line(
            f"{row['step']}",
            _format(loss, ".4f" if short else ".4g"),
            _format(row["grad_norm"], ".3g"),
            _format(row["lr"], ".2e"),
            f"{speed:,.0f}" if speed < 1e6 else f"{speed / 1e6:.4g}M",
            share,
            quantity(memory, "B") if memory is not None else "-",
            _format_eta(left) if left is not None else "-",
        )

    def _line(
        self, step: str, loss: str, norm: str, lr: str, speed: str, share: str, memory: str, left: str
    ) -> str:
        return f"{step:>7}  {loss:>8}  {norm:>9}  {lr:>8}  {speed:>9}  {share:>9}  {memory:>8}  {left:>8}"


def _format_eta(seconds: float) -> str:
    return duration(seconds) if seconds < DAY else f"{seconds // DAY:.0f}d {seconds % DAY // 3600:.0f}h"


def _format(value: object, form: str) -> str:
    """Format a number; other values, such as a loss that is not finite, are shown as they are."""
    return format(value, form) if isinstance(value, int | float) else "-" if value is None else str(value)


class ConsoleSink(Sink):
    """Logs a row every ``every`` steps, at the first step of an attempt and at the last of the run; in a
    terminal with a progress bar.

    Args:
        steps: of the whole run.
        done: steps completed by earlier attempts.
    """

    def __init__(self, progress: Progress, table: StepTable, *, steps: int, done: int, every: int) -> None:
        self._task = (progress if progress.live else Progress.silent()).task(
            "training", total=steps, unit="steps", done=done
        )
        self._table, self._steps, self._done, self._every = table, steps, done, every
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
                log.info(self._table.heading())
            self._rows += 1
            log.info(self._table.row(row))
            if row.get("skipped"):
                scale = f" after an overflow, loss scale {row['loss_scale']:g}" if "loss_scale" in row else ""
                log.info(f"step {step}: skipped{scale or ', because its gradient norm is not finite'}")
        if step == self._steps:
            self._task.finish()

    def _eval(self, row: Row) -> None:
        known = {"step", "set", "loss", "seconds", self._table.unit}
        results = [
            f"{name} {_format(value, '.1%' if name == 'accuracy' else '.4g')}"
            for name, value in row.items()
            if name not in known
        ]
        if self._table.unit == "tokens":
            results.insert(0, f"perplexity {_perplexity(row['loss'])}")
        shown = f" ({', '.join(results)})" if results else ""
        log.info(f"step {row['step']}: {row['set']} loss {row['loss']:.4f}{shown}, {row['seconds']:.1f} s")

    def close(self, exit_code: int) -> None:
        self._task.finish()


class AlertConsoleSink(Sink):
    """Logs alerts as they come."""

    def log(self, kind: Kind, row: Row) -> None:
        if kind is Kind.ALERT:
            alert = Alert.from_row(row)
            text = str(alert)
            if len(text) > ALERT_LENGTH:
                text = f"{text[:ALERT_LENGTH]} ... (the run's alerts file has the whole text)"
            log.log(logging.ERROR if alert.level is Level.ERROR else logging.WARNING, text)


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.4g}" if loss < 100 else "beyond 1e43"
