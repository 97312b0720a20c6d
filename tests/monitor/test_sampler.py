"""Samples of simulated nodes: a hanging or failing source affects only its own metrics.

pytest tests/monitor/test_sampler.py
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.fake_nvml import FakeGpu, FakeNvml
from tests.waiting import wait_until
from toolkit.monitor.alert import Alert
from toolkit.monitor.health import gpu_faults
from toolkit.monitor.health.node_detector import NodeDetector
from toolkit.monitor.sink import Kind, Row
from toolkit.monitor.sinks.jsonl import JsonlSink
from toolkit.monitor.system.gpu import XidEvents, open_gpus
from toolkit.monitor.system.metrics import SystemMetrics
from toolkit.monitor.system.sampler import CLOSE_SECONDS, GpuMetricSource, MetricSource, NodeSampler
from toolkit.rows import read_rows

EVERY = 0.02


class Node:
    """One node's sampler on a fake NVML, with its rows and alerts."""

    def __init__(
        self, number: int, nvml: FakeNvml, host: Callable[[], SystemMetrics] = lambda: {"host/load_1m": 0.5}
    ) -> None:
        self.rows: list[Row] = []
        self.alerts: list[Alert] = []
        self.nvml = nvml
        self.gpus = GpuMetricSource(
            lambda: open_gpus(nvml, 8, None),
            lambda gpus: XidEvents(nvml, gpus.gpus),
            on_xid=lambda gpu, xid: self.alerts.append(
                gpu_faults.xid_alert(xid, gpu and gpu.index, number, self.sampler.step)
            ),
            node=number,
        )
        self.sampler = NodeSampler(
            node=number,
            seconds=EVERY,
            sources=[MetricSource("host", host), MetricSource("gpu", self.gpus.read, self.gpus.close)],
            log_row=self.rows.append,
            detect=NodeDetector(number).check,
            alert=self.alerts.append,
        )

    def __enter__(self) -> Node:
        self.sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gpus.stop()
        self.sampler.close()


def test_each_node_logs_its_own_rows() -> None:
    with (
        Node(0, FakeNvml([FakeGpu(), FakeGpu()])) as first,
        Node(1, FakeNvml([FakeGpu(uuid="GPU-other", milliwatts=300_000)])) as second,
    ):
        first.sampler.step = 12
        wait_until(
            lambda: all(
                any(row["step"] == step for row in node.rows) and len(node.rows) > 5
                for node, step in ((first, 12), (second, 0))
            )
        )
    assert {row["node"] for row in first.rows} == {0}
    assert {row["node"] for row in second.rows} == {1}
    assert first.rows[0]["gpu/count"] == 2
    assert second.rows[0]["gpu/0/uuid"] == "GPU-other"
    assert "gpu/0/uuid" not in second.rows[1]
    assert [row["gpu/0/power_watts"] for row in second.rows] == [300.0] * len(second.rows)
    assert all(row["host/load_1m"] == 0.5 and row["gpu/0/xid_events"] == 0 for row in second.rows[:1])
    times = [row["time"] for row in first.rows]
    assert times == sorted(times)
    assert all(isinstance(row["sample_seconds"], float) for row in first.rows)
    assert first.alerts == second.alerts == []
    json.dumps(first.rows)


def test_throttling_and_xid_are_attributed_to_their_node() -> None:
    with Node(0, FakeNvml([FakeGpu()])) as first, Node(1, FakeNvml([FakeGpu(), FakeGpu()])) as second:
        wait_until(lambda: len(second.rows) > 3)
        second.nvml.gpus[1].throttle, second.nvml.gpus[1].sm_clock = 0x48, 990
        second.nvml.happens(0, xid=94)
        wait_until(lambda: any("gpu/0/xid" in row for row in second.rows))
        wait_until(lambda: {alert.name for alert in second.alerts} == {"gpu-slow", "gpu-fault"})
    assert first.alerts == []
    assert {(alert.name, alert.fault, alert.where) for alert in second.alerts} == {
        ("gpu-slow", "throttled", "node 1, GPU 1"),
        ("gpu-fault", "xid", "node 1, GPU 0"),
    }
    assert any(row.get("gpu/0/xid") == 94 and row["gpu/0/xid_events"] == 1 for row in second.rows)


def test_without_gpu_only_the_host_is_sampled(caplog: pytest.LogCaptureFixture) -> None:
    with Node(0, FakeNvml([FakeGpu()], driver=False)) as node:
        wait_until(lambda: len(node.rows) > 3)
    assert caplog.messages == ["node 0: no GPU, only the host is sampled"]
    assert node.rows[0].keys() == {"node", "step", "time", "sample_seconds", "host/load_1m"}


def test_hanging_driver_affects_only_its_own_metrics() -> None:
    nvml = FakeNvml([FakeGpu()])
    with Node(0, nvml) as node:
        wait_until(lambda: len(node.rows) > 2)
        release = nvml.hangs("nvmlDeviceGetPowerUsage")
        wait_until(lambda: "gpu/silent_seconds" in node.rows[-1])
        threads = threading.active_count()
        wait_until(lambda: node.rows[-1].get("gpu/silent_seconds", 0) > 1.5)
        assert node.rows[-1]["host/load_1m"] == 0.5
        assert threading.active_count() == threads, "nothing piles up"
        assert nvml.calls.count("nvmlDeviceGetPowerUsage") < len(node.rows)
        nvml.happens(0, xid=119)  # the thread of events does not hang with it
        wait_until(lambda: [alert.fault for alert in node.alerts] == ["xid"])
        release.set()
        wait_until(lambda: "gpu/0/power_watts" in node.rows[-1])
        nvml.hangs("nvmlDeviceGetPowerUsage")
        began = time.monotonic()
    assert time.monotonic() - began < CLOSE_SECONDS + 1.0


def test_nothing_is_logged_after_close() -> None:
    late = threading.Event()

    def slow() -> SystemMetrics:
        late.wait(5)
        return {}

    with Node(0, FakeNvml([FakeGpu()]), host=slow) as node:
        time.sleep(0.1)
        threading.Timer(0.3, late.set).start()
    count = len(node.rows)
    time.sleep(0.2)
    assert len(node.rows) == count == 0


def test_failing_source_is_reported_once_and_read_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def flaky() -> SystemMetrics:
        calls.append(1)
        if len(calls) in (2, 4):
            raise FileNotFoundError("the run's directory is gone")
        return {"host/load_1m": float(len(calls))}

    with Node(0, FakeNvml([], driver=False), host=flaky) as node:
        wait_until(lambda: len(node.rows) > 6)
    assert [row.get("host/load_1m") for row in node.rows[:6]] == [1, None, 3, None, 5, 6]
    assert [text for text in caplog.messages if "missing" in text] == [
        "host metrics are missing: FileNotFoundError: the run's directory is gone"
    ]


def test_late_rows_are_not_caught_up() -> None:
    def slow() -> SystemMetrics:
        time.sleep(5 * EVERY)
        return {}

    began = time.monotonic()
    with Node(0, FakeNvml([], driver=False), host=slow) as node:
        wait_until(lambda: len(node.rows) >= 4)
        taken = time.monotonic() - began
    assert taken >= 4 * 5 * EVERY * 0.9


def bytes_per_day(folder: Path, gpus: int, host: dict[str, Any]) -> float:
    """Bytes of JSONL per day at ten seconds per sample."""
    nvml = FakeNvml(
        [FakeGpu(used=63_456_789_012 + gpu, milliwatts=612_345 + gpu) for gpu in range(gpus)], driver=gpus > 0
    )
    file = folder / f"{gpus}.jsonl"
    with Node(0, nvml, host=lambda: host) as node:
        wait_until(lambda: len(node.rows) > 6)
    sink = JsonlSink({Kind.SYSTEM: file})
    for row in node.rows[3:6]:
        sink.log(Kind.SYSTEM, row)
    sink.close(0)
    assert len(list(read_rows(file))) == 3
    return file.stat().st_size / 3 * 8640


def test_size_of_a_day_of_samples_matches_the_guide(tmp_path: Path) -> None:
    """docs/monitoring.md states them."""
    host = {f"host/metric_{number}_bytes": 123_456_789_012 for number in range(24)}
    with_gpus, without = bytes_per_day(tmp_path, 8, host), bytes_per_day(tmp_path, 0, host)
    assert 30e6 < with_gpus < 70e6
    assert without < 12e6


def test_failing_detector_disables_alerts_but_not_rows(caplog: pytest.LogCaptureFixture) -> None:
    with Node(0, FakeNvml([FakeGpu()])) as node:
        wait_until(lambda: len(node.rows) > 2)
        node.sampler._detect = lambda row: [row["no such metric"]]
        wait_until(lambda: any("disabled" in text for text in caplog.messages))
        count = len(node.rows)
        wait_until(lambda: len(node.rows) > count + 2)
    assert caplog.messages == ["alerts of samples are disabled: KeyError: 'no such metric'"]


def test_driver_is_shut_down_at_the_end() -> None:
    with Node(0, FakeNvml([FakeGpu()])) as node:
        wait_until(lambda: len(node.rows) > 2)
    wait_until(lambda: node.nvml.started == 0)
