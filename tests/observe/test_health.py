"""Alerts: detectors, rate limits, and process statistics.

pytest tests/observe/test_health.py
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.train.fakes import FakeClock
from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.alert_limiter import FIRST_GAP_SECONDS
from toolkit.monitor.health.detector import Detector
from toolkit.monitor.sink import Kind, Row, Sink
from toolkit.observe.health import AlertDispatcher, CheckpointListener, HealthSink


class RowList(Sink):
    def __init__(self) -> None:
        self.rows: list[tuple[Kind, Row]] = []

    def log(self, kind: Kind, row: Row) -> None:
        self.rows.append((kind, row))


class AlwaysAlerts(Detector):
    """Raise an alert for every row of its kind."""

    def __init__(self, name: str, kind: Kind) -> None:
        self.name, self.kinds = name, (kind,)  # type: ignore[misc]

    def check(self, kind: Kind, row: Row) -> Alert | None:
        return Alert(
            name=self.name,
            level=Level.WARNING,
            step=row["step"],
            cause="c",
            evidence="e",
            next_step="df -h RUN_DIR",
        )


class Broken(Detector):
    def check(self, kind: Kind, row: Row) -> Alert | None:
        raise KeyError("loss")


def test_each_detector_sees_its_kinds_and_a_broken_one_is_disabled(caplog: pytest.LogCaptureFixture) -> None:
    alerts: list[Alert] = []
    sink = HealthSink([Broken(), AlwaysAlerts("a", Kind.STEP), AlwaysAlerts("b", Kind.LEDGER)], alerts.append)
    for step in (1, 2):
        sink.log(Kind.STEP, {"step": step})
    sink.log(Kind.LEDGER, {"step": 1})
    sink.log(Kind.SYSTEM, {"step": 1})
    assert [(alert.name, alert.step) for alert in alerts] == [("a", 1), ("a", 2), ("b", 1)]
    assert caplog.messages == ["Broken failed and is disabled: KeyError: 'loss'"]


def test_alerts_from_several_threads_are_rate_limited() -> None:
    sink, clock = RowList(), FakeClock()
    dispatch = AlertDispatcher(sink, "runs/x", clock)
    detector = AlwaysAlerts("a", Kind.STEP)

    def raise_alerts(first: int) -> None:
        for step in range(first, first + 100):
            found = detector.check(Kind.STEP, {"step": step})
            assert found is not None
            dispatch(found)

    threads = [threading.Thread(target=raise_alerts, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.now += FIRST_GAP_SECONDS
    raise_alerts(9000)
    assert len(sink.rows) == 2
    kind, row = sink.rows[1]
    assert kind is Kind.ALERT
    assert row["evidence"] == "e (399 more like it since the last one shown)"
    assert Alert.from_row(row).step == 9000
    assert row["next_step"] == "df -h runs/x"


def test_listener_receives_the_step_of_a_checkpoint() -> None:
    steps: list[int] = []
    CheckpointListener(steps.append).on_checkpoint(Path("runs/x/checkpoints/step-00000123"))
    assert steps == [123]
