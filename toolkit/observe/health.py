"""Run the health detectors on the rows of a run, and pass their alerts to the sinks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.checkpoint_folder import step_of
from toolkit.hooks import Hook
from toolkit.monitor.alert import Alert
from toolkit.monitor.health.alert_limiter import AlertLimiter
from toolkit.monitor.health.build import build_detectors
from toolkit.monitor.health.checkpoints import LateCheckpoint
from toolkit.monitor.health.detector import Detector
from toolkit.monitor.sink import CompositeSink, FilteredSink, Kind, Row, Sink
from toolkit.monitor.sinks.queued import QueuedSink
from toolkit.plan.types import RunPlan

log = logging.getLogger(__name__)

LAG_SECONDS = 0.5  # waking a thread for every row costs more than the detectors' work
CLOSE_SECONDS = 5.0  # how long the end waits until the detectors have seen the last rows


class AlertDispatcher:
    """Limit the rate of this process's alerts and log them to a sink. May be called from any thread.

    ``RUN_DIR`` in a next step is replaced by the run directory, so that the user can paste the command.
    """

    def __init__(self, sink: Sink, run_dir: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._run_dir, self._clock = sink, run_dir, clock
        self._limiter, self._lock = AlertLimiter(), threading.Lock()

    def __call__(self, alert: Alert) -> None:
        with self._lock:
            admitted = self._limiter.admit(alert, self._clock())
        if admitted is not None:
            next_step = admitted.next_step.replace("RUN_DIR", self._run_dir)
            self._sink.log(Kind.ALERT, replace(admitted, next_step=next_step).to_row())


class HealthSink(Sink):
    """Pass each row to the detectors of its kind. A detector that raises is logged and removed.

    It runs behind a queue, so a single thread calls it and training does not wait for it.
    """

    def __init__(self, detectors: Sequence[Detector], alert: Callable[[Alert], None]) -> None:
        self._detectors, self._alert = list(detectors), alert

    def log(self, kind: Kind, row: Row) -> None:
        for detector in list(self._detectors):
            if kind not in detector.kinds:
                continue
            try:
                alert = detector.check(kind, row)
            except Exception as error:  # noqa: BLE001  a broken detector must not disable the others
                self._detectors.remove(detector)
                log.warning(
                    f"{type(detector).__name__} failed and is disabled: {type(error).__name__}: {error}"
                )
            else:
                if alert is not None:
                    self._alert(alert)


def open_health_sink(plan: RunPlan, alert: Callable[[Alert], None], late: LateCheckpoint) -> Sink:
    """Return a sink that runs the health detectors on the rows of the run in a thread. For rank 0."""
    active = [*build_detectors(plan), late]
    queued = QueuedSink(
        lambda: HealthSink(active, alert), "health", lag_seconds=LAG_SECONDS, close_seconds=CLOSE_SECONDS
    )
    kinds = {kind for detector in active for kind in detector.kinds}
    # A CompositeSink of one logs errors instead of raising them.
    return CompositeSink([FilteredSink(queued, lambda kind, row: kind in kinds)])


class CheckpointListener(Hook):
    """Call ``on_saved`` with the step of each complete checkpoint, and of one to which the run goes back."""

    def __init__(self, on_saved: Callable[[int], None]) -> None:
        self._on_saved = on_saved

    def on_checkpoint(self, path: Path) -> None:
        step = step_of(path)
        assert step is not None, f"{path} is a checkpoint of this run"
        self._on_saved(step)

    def on_rollback(self, path: Path) -> None:
        self.on_checkpoint(path)
