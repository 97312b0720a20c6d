"""Hooks that report progress: metric rows, ``status.json``, samples by source, and plots."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint_folder import step_of
from toolkit.config.schema import Precision
from toolkit.hooks import CompletedStep, Hook
from toolkit.monitor.sink import Kind, Row, Sink
from toolkit.monitor.throughput import RunTimer, Throughput
from toolkit.paths import Location
from toolkit.plan.types import Device, RunPlan
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

log = logging.getLogger(__name__)

STATUS_SECONDS = 1.0
PLOT_SECONDS = 60.0

SamplesConsumed = Mapping[str, tuple[int, float]]  # samples and epochs by source: ``SampleStream.consumed``


class MetricsLogger(Hook):
    """Log one row per step and per evaluation to the sinks.

    Args:
        consumed: returns the samples and epochs of each source after a step. Rows include epochs if there
            are several sources.
        clock: must be the clock of ``run_timer``.
    """

    def __init__(
        self,
        plan: RunPlan,
        sink: Sink,
        consumed: Callable[[int], SamplesConsumed],
        run_timer: RunTimer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._sink, self._consumed = plan, sink, consumed
        self._run_timer, self._clock = run_timer, clock
        self._loss_scaling = plan.config.precision.name is Precision.fp16
        self._throughput = Throughput.from_plan(plan)

    def on_step(self, completed: CompletedStep) -> None:
        result, consensus, plan = completed.result, completed.consensus, self._plan
        samples = plan.batch.at(completed.step - 1).size
        row: dict[str, Any] = {
            "step": completed.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": completed.lr,
            plan.unit: result.tokens,
            "step_seconds": completed.seconds,
            "data_seconds": consensus.data_seconds,
            "gc_seconds": consensus.gc_seconds,
            "host_bytes": consensus.host_bytes,
            **self._throughput.row(
                samples=samples,
                units=result.tokens,
                computed=result.tokens if plan.task_unit is not None else samples * plan.units_per_sample,
                seconds=completed.seconds,
            ),
            **self._run_timer.row(step=completed.step, seconds=completed.seconds, now=self._clock()),
        }
        if plan.world.device is Device.CUDA:
            row |= {"device_bytes": consensus.device_bytes, "device_peak_bytes": consensus.device_peak_bytes}
        if self._loss_scaling:
            row |= {"skipped": result.skipped, "loss_scale": result.loss_scale}
        if consensus.nonfinite:
            row |= {"skipped": result.skipped, "weights_finite": not consensus.nonfinite_state}
        consumed = self._consumed(completed.step)
        if len(consumed) > 1:
            row |= {f"epochs/{name}": epochs for name, (_, epochs) in consumed.items()}
        self._sink.log(Kind.STEP, row)

    def on_eval(self, row: Row) -> None:
        self._sink.log(Kind.EVAL, row)


class StatusWriter(Hook):
    """Write ``status.json`` while the run is under way, at a bounded rate. For rank 0.

    The process that started the run writes how it ended.
    """

    def __init__(
        self,
        directory: RunDirectory,
        attempt: int,
        newest: Location | None,
        clock: Callable[[], float] = time.monotonic,
        goodput: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        self._directory, self._attempt, self._clock, self._goodput = directory, attempt, clock, goodput
        self._checkpoint: Location | None = newest
        self._step = 0
        self._next = 0.0

    def on_start(self, step: int) -> None:
        self._write(step)

    def on_step(self, completed: CompletedStep) -> None:
        self._step = completed.step
        if self._clock() >= self._next:
            self._write(completed.step)

    def on_checkpoint(self, path: Path) -> None:
        self._checkpoint = path
        self._write(self._step)

    def on_rollback(self, path: Path) -> None:
        self._checkpoint = path
        self._write(step_of(path) or 0)

    def on_end(self, step: int) -> None:
        self._write(step)

    def _write(self, step: int) -> None:
        self._step, self._next = step, self._clock() + STATUS_SECONDS
        checkpoint = str(self._checkpoint) if self._checkpoint is not None else None
        self._directory.write_status(
            Status(
                state=RunState.RUNNING,
                attempt=self._attempt,
                step=step,
                checkpoint=checkpoint,
                goodput=self._goodput(),
            )
        )


class DataProgressLogger(Hook):
    """Log the samples taken from each source at each evaluation and checkpoint. For rank 0."""

    def __init__(self, consumed: Callable[[int], SamplesConsumed]) -> None:
        self._consumed = consumed
        self._logged_step = -1

    def on_eval(self, row: Row) -> None:
        self._log(row["step"])

    def on_checkpoint(self, path: Path) -> None:
        self._log(step_of(path))

    def on_rollback(self, path: Path) -> None:
        self._logged_step = step_of(path) or 0

    def _log(self, step: int | None) -> None:
        if step is not None and step > self._logged_step:
            self._logged_step = step
            log.info(f"step {step}: samples taken: {format_consumed(self._consumed(step))}")


def format_consumed(consumed: SamplesConsumed) -> str:
    """``code 1,200 (0.31 epochs), web 3,600 (0.02 epochs)``."""
    return ", ".join(
        f"{name} {samples:,} ({epochs:.3g} epochs)" for name, (samples, epochs) in consumed.items()
    )


class PlotWriter(Hook):
    """Draw plots at the end, and after checkpoints in a background thread at a bounded rate. For rank 0."""

    def __init__(self, draw: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._draw, self._clock = draw, clock
        self._thread: threading.Thread | None = None
        self._next = clock() + PLOT_SECONDS
        self._failed = False

    def on_checkpoint(self, path: Path) -> None:
        busy = self._thread is not None and self._thread.is_alive()
        if self._failed or busy or self._clock() < self._next:
            return
        self._next = self._clock() + PLOT_SECONDS
        self._thread = threading.Thread(target=self._run, name="plots", daemon=True)
        self._thread.start()

    def on_end(self, step: int) -> None:
        if self._thread is not None:
            self._thread.join()
        if not self._failed:
            self._run()

    def _run(self) -> None:
        try:
            self._draw()
        except Exception as error:  # noqa: BLE001  a failed plot must not end training
            self._failed = True
            log.warning(f"plots are disabled: {type(error).__name__}: {error}")
