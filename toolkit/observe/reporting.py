"""Hooks that report training: metric rows, ``status.json`` and plots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.config.schema import Precision
from toolkit.hooks import Hook, StepDone
from toolkit.monitor.sink import Kind, Row, Sink
from toolkit.monitor.throughput import RunTimer, Throughput
from toolkit.plan.types import Device, RunPlan
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState, Status

STATUS_SECONDS = 1.0
PLOT_SECONDS = 60.0


class Metrics(Hook):
    """One row a step and one an evaluation, to the sinks."""

    def __init__(
        self,
        plan: RunPlan,
        sink: Sink,
        consumed: Callable[[int], Mapping[str, tuple[int, float]]],
        course: RunTimer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            consumed: samples and epochs of each source after a step. Rows have the epochs where there are several sources.
            clock: that of ``course``.
        """
        self._plan, self._sink, self._consumed, self._course, self._clock = (
            plan,
            sink,
            consumed,
            course,
            clock,
        )
        self._scaled = plan.config.precision.name is Precision.fp16
        self._throughput = Throughput.from_plan(plan)

    def on_step(self, done: StepDone) -> None:
        result, plan = done.result, self._plan
        samples = plan.batch.at(done.step - 1).size
        row = {
            "step": done.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": done.lr,
            plan.unit: result.tokens,
            "step_seconds": done.seconds,
            "data_seconds": done.agreed.data_seconds,
            "gc_seconds": done.agreed.gc_seconds,
            "host_bytes": done.agreed.host_bytes,
            **self._throughput.row(
                samples=samples,
                units=result.tokens,
                computed=samples * plan.units_per_sample,
                seconds=done.seconds,
            ),
            **self._course.row(step=done.step, seconds=done.seconds, now=self._clock()),
        }
        device = {"device_bytes": done.agreed.device_bytes} if plan.world.device is Device.CUDA else {}
        scaling = {"skipped": result.skipped, "loss_scale": result.loss_scale} if self._scaled else {}
        if done.agreed.nonfinite:  # the only rows with these keys, but for fp16's
            scaling |= {"skipped": result.skipped, "weights_finite": not done.agreed.bad_weights}
        consumed = self._consumed(done.step)
        epochs = (
            {f"epochs/{name}": epochs for name, (_, epochs) in consumed.items()} if len(consumed) > 1 else {}
        )
        self._sink.log(Kind.STEP, {**row, **device, **scaling, **epochs})

    def on_eval(self, row: Row) -> None:
        self._sink.log(Kind.EVAL, row)


class StatusFile(Hook):
    """``status.json`` while the run is under way, at a bounded rate; how it ended is written by whoever started it. For rank 0."""

    def __init__(
        self,
        directory: RunDirectory,
        attempt: int,
        newest: Path | None,
        clock: Callable[[], float] = time.monotonic,
        goodput: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        self._directory, self._attempt, self._clock, self._goodput = directory, attempt, clock, goodput
        self._checkpoint = newest
        self._step = 0
        self._next = 0.0

    def on_start(self, step: int) -> None:
        self._write(step)

    def on_step(self, done: StepDone) -> None:
        self._step = done.step
        if self._clock() >= self._next:
            self._write(done.step)

    def on_checkpoint(self, path: Path) -> None:
        self._checkpoint = path
        self._write(self._step)

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


class Plots(Hook):
    """Draws at the end, and where checkpoints are complete, at a bounded rate and in a thread: training does not wait for a
    picture. For rank 0."""

    def __init__(
        self,
        draw: Callable[[], object],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._draw, self._tell, self._clock = draw, tell, clock
        self._thread: threading.Thread | None = None
        self._next = clock() + PLOT_SECONDS
        self._broken = False

    def on_checkpoint(self, path: Path) -> None:
        if (
            self._broken
            or self._clock() < self._next
            or (self._thread is not None and self._thread.is_alive())
        ):
            return
        self._next = self._clock() + PLOT_SECONDS
        self._thread = threading.Thread(target=self._work, name="plots", daemon=True)
        self._thread.start()

    def on_end(self, step: int) -> None:
        if self._thread is not None:
            self._thread.join()
        if not self._broken:
            self._work()

    def _work(self) -> None:
        try:
            self._draw()
        except Exception as error:  # noqa: BLE001  a picture is no reason to end a training
            self._broken = True
            self._tell(f"no more plots: {type(error).__name__}: {error}")
