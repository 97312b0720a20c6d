"""The way from a row to a person: detectors, the limit on alerts, what comes with each step, and how they are put together.

pytest tests/observe/test_health.py
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.fakes import FakeClock
from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.alert_limiter import FIRST_GAP_SECONDS
from toolkit.monitor.health.detector import Detector
from toolkit.monitor.sink import Kind, NullSink, Row
from toolkit.observe.health import Alerts, HealthSink, Saves
from toolkit.observe.process_stats import ProcessStats


class Kept(NullSink):
    def __init__(self) -> None:
        self.rows: list[tuple[Kind, Row]] = []

    def log(self, kind: Kind, row: Row) -> None:
        self.rows.append((kind, row))


class Says(Detector):
    """Every row of its kind is an alert."""

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


class Breaks(Detector):
    def check(self, kind: Kind, row: Row) -> Alert | None:
        raise KeyError("loss")


def test_each_detector_sees_its_kinds_and_one_that_breaks_is_left_out() -> None:
    told: list[str] = []
    alerts: list[Alert] = []
    sink = HealthSink([Breaks(), Says("a", Kind.STEP), Says("b", Kind.LEDGER)], alerts.append, told.append)
    for step in (1, 2):
        sink.log(Kind.STEP, {"step": step})
    sink.log(Kind.LEDGER, {"step": 1})
    sink.log(Kind.SYSTEM, {"step": 1})
    assert [(alert.name, alert.step) for alert in alerts] == [("a", 1), ("a", 2), ("b", 1)]
    assert told == ["Breaks failed and looks no more: KeyError: 'loss'"]


def test_alerts_are_limited_and_come_from_any_thread() -> None:
    sink, clock = Kept(), FakeClock()
    alert = Alerts(sink, "runs/x", clock)
    detector = Says("a", Kind.STEP)

    def say(first: int) -> None:
        for step in range(first, first + 100):
            found = detector.check(Kind.STEP, {"step": step})
            assert found is not None
            alert(found)

    threads = [threading.Thread(target=say, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.now += FIRST_GAP_SECONDS
    say(9000)
    assert len(sink.rows) == 2
    kind, row = sink.rows[1]
    assert kind is Kind.ALERT
    assert row["evidence"] == "e (399 more like it since the last one shown)"
    assert Alert.from_row(row).step == 9000
    assert row["next_step"] == "df -h runs/x"


def test_the_newest_checkpoint_is_told() -> None:
    steps: list[int] = []
    Saves(steps.append).on_checkpoint(Path("runs/x/checkpoints/step-00000123"))
    assert steps == [123]


CPU = torch.device("cpu")


def test_collections_of_garbage_are_timed() -> None:
    process_stats = ProcessStats()
    kept = [[number] for number in range(300_000)]
    process_stats.read(CPU)
    gc.collect()
    collected, _, _ = process_stats.read(CPU)
    assert collected > 1000, "microseconds"
    gc.disable()
    assert process_stats.read(CPU)[0] == 0
    gc.enable()
    process_stats.close()
    assert not any(getattr(callback, "__self__", None) is process_stats for callback in gc.callbacks)
    assert len(kept) == 300_000


def test_memory_of_the_process_is_without_files(tmp_path: Path) -> None:
    process_stats, size = ProcessStats(), 64 * 2**20
    before = process_stats.read(CPU)[1]
    block = mmap.mmap(
        -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # not malloc's, which may have kept freed memory
    block.write(b"x" * size)
    with_block = process_stats.read(CPU)[1]
    assert with_block - before == pytest.approx(size, rel=0.1)
    (tmp_path / "data").touch()
    os.truncate(tmp_path / "data", size)
    mapped: Any = np.memmap(tmp_path / "data", dtype=np.uint8, mode="r")
    assert int(mapped.sum()) == 0  # all pages are here now
    assert process_stats.read(CPU)[1] - with_block < size / 4
    assert len(block)
    process_stats.close()
