"""Rows of a run to the detectors, and their alerts to people."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.checkpoint_folder import step_of
from toolkit.hooks import Hook
from toolkit.monitor.alert import Alert
from toolkit.monitor.health.alert_limiter import AlertLimiter
from toolkit.monitor.health.detector import Detector
from toolkit.monitor.sink import Kind, NullSink, Row, Sink


class Alerts:
    """The way by which alerts of this process get out: limited in their rate, then to the sinks. From any thread.

    RUN_DIR in a next step becomes the folder of the run: what a person should type can be typed, and who alerts need not know the folder.
    """

    def __init__(self, sink: Sink, run_dir: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._run_dir, self._clock = sink, run_dir, clock
        self._limiter, self._lock = AlertLimiter(), threading.Lock()

    def __call__(self, alert: Alert) -> None:
        with self._lock:
            told = self._limiter.admit(alert, self._clock())
        if told is not None:
            self._sink.log(
                Kind.ALERT, replace(told, next_step=told.next_step.replace("RUN_DIR", self._run_dir)).to_row()
            )


class HealthSink(NullSink):
    """Shows each row to the detectors of its kind. One that raises is told and left out: a mistake in it is no reason to lose the others.

    Behind a queue, so that it is called by one thread and costs the training none of its time.
    """

    def __init__(
        self, detectors: Sequence[Detector], alert: Callable[[Alert], None], tell: Callable[[str], None]
    ) -> None:
        self._detectors, self._alert, self._tell = list(detectors), alert, tell

    def log(self, kind: Kind, row: Row) -> None:
        for detector in list(self._detectors):
            if kind not in detector.kinds:
                continue
            try:
                found = detector.check(kind, row)
            except Exception as error:  # noqa: BLE001  a detector only watches
                self._detectors.remove(detector)
                self._tell(
                    f"{type(detector).__name__} failed and looks no more: {type(error).__name__}: {error}"
                )
            else:
                if found is not None:
                    self._alert(found)


class Saves(Hook):
    """Tells which checkpoint is the newest complete one."""

    def __init__(self, saved: Callable[[int], None]) -> None:
        self._saved = saved

    def on_checkpoint(self, path: Path) -> None:
        step = step_of(path)
        assert step is not None, f"{path} is a checkpoint of this run"
        self._saved(step)
