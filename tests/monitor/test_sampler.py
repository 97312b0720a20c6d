"""Rows of two simulated nodes, beside a training that never waits: sources that hang or fail cost their own figures and nothing else.

pytest tests/monitor/test_sampler.py
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.monitor.fake_nvml import FakeGpu, FakeNvml
from toolkit.monitor.alert import Alert
from toolkit.monitor.health import node_detector
from toolkit.monitor.health.node_detector import NodeDetector
from toolkit.monitor.sink import Kind, Row
from toolkit.monitor.sinks.jsonl import JsonlSink
from toolkit.monitor.system.gpu import XidEvents, open_gpus
from toolkit.monitor.system.metrics import SystemMetrics
from toolkit.monitor.system.sampler import CLOSE_SECONDS, GpuMetricSource, MetricSource, NodeSampler
from toolkit.rows import read_rows

EVERY = 0.02


def until(so: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


class Node:
    """One node's sampler over a fake NVML, and what came out of it."""

    def __init__(
        self, number: int, nvml: FakeNvml, host: Callable[[], SystemMetrics] = lambda: {"host/load_1m": 0.5}
    ) -> None:
        self.rows: list[Row] = []
        self.alerts: list[Alert] = []
        self.said: list[str] = []
        self.nvml = nvml
        self.gpus = GpuMetricSource(
            lambda: open_gpus(nvml, 8, None),
            lambda gpus: XidEvents(nvml, gpus.cards),
            say=self.said.append,
            xid=lambda card, xid: self.alerts.append(
                node_detector.xid_alert(xid, card and card.place, number, self.sampler.step)
            ),
        )
        self.sampler = NodeSampler(
            node=number,
            seconds=EVERY,
            tell=self.said.append,
            sources=[
                MetricSource("host", host, self.said.append),
                MetricSource("gpu", self.gpus.read, self.said.append, self.gpus.close),
            ],
            log=self.rows.append,
            detect=NodeDetector(number).see,
            alert=self.alerts.append,
        )

    def __enter__(self) -> Node:
        self.sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gpus.stop()
        self.sampler.close()


def test_two_nodes_have_rows_of_their_own() -> None:
    with (
        Node(0, FakeNvml([FakeGpu(), FakeGpu()])) as first,
        Node(1, FakeNvml([FakeGpu(uuid="GPU-other", milliwatts=300_000)])) as second,
    ):
        first.sampler.step = 12
        until(
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


def test_throttling_and_xid_of_one_node_are_its_own() -> None:
    with Node(0, FakeNvml([FakeGpu()])) as first, Node(1, FakeNvml([FakeGpu(), FakeGpu()])) as second:
        until(lambda: len(second.rows) > 3)
        second.nvml.gpus[1].throttle, second.nvml.gpus[1].sm_clock = 0x48, 990
        second.nvml.happens(0, xid=94)
        until(lambda: any("gpu/0/xid" in row for row in second.rows))
        until(lambda: {alert.name for alert in second.alerts} == {"gpu-throttled", "gpu-xid"})
    assert first.alerts == []
    assert {(alert.name, alert.where) for alert in second.alerts} == {
        ("gpu-throttled", "node 1, GPU 1"),
        ("gpu-xid", "node 1, GPU 0"),
    }
    assert any(row.get("gpu/0/xid") == 94 and row["gpu/0/xid_events"] == 1 for row in second.rows)


def test_without_a_gpu_the_host_is_measured_and_that_is_said_once() -> None:
    with Node(0, FakeNvml([FakeGpu()], driver=False)) as node:
        until(lambda: len(node.rows) > 3)
    assert node.said == ["no GPU on this node: host only"]
    assert node.rows[0].keys() == {"node", "step", "time", "sample_seconds", "host/load_1m"}


def test_a_driver_that_hangs_costs_its_figures_and_nothing_else() -> None:
    nvml = FakeNvml([FakeGpu()])
    with Node(0, nvml) as node:
        until(lambda: len(node.rows) > 2)
        release = nvml.hangs("nvmlDeviceGetPowerUsage")
        until(lambda: "gpu/silent_seconds" in node.rows[-1])
        threads = threading.active_count()
        until(lambda: node.rows[-1].get("gpu/silent_seconds", 0) > 1.5)
        assert node.rows[-1]["host/load_1m"] == 0.5
        assert threading.active_count() == threads, "nothing piles up"
        assert nvml.calls.count("nvmlDeviceGetPowerUsage") < len(node.rows)
        nvml.happens(0, xid=119)  # the thread of events does not hang with it
        until(lambda: [alert.name for alert in node.alerts] == ["gpu-xid"])
        release.set()
        until(lambda: "gpu/0/power_watts" in node.rows[-1])
        nvml.hangs("nvmlDeviceGetPowerUsage")
        began = time.monotonic()
    assert time.monotonic() - began < CLOSE_SECONDS + 1.0


def test_nothing_is_logged_after_the_end() -> None:
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


def test_a_source_that_fails_is_told_once_and_asked_again() -> None:
    calls: list[int] = []

    def flaky() -> SystemMetrics:
        calls.append(1)
        if len(calls) in (2, 4):
            raise FileNotFoundError("the run's directory is gone")
        return {"host/load_1m": float(len(calls))}

    with Node(0, FakeNvml([], driver=False), host=flaky) as node:
        until(lambda: len(node.rows) > 6)
    assert [row.get("host/load_1m") for row in node.rows[:6]] == [1, None, 3, None, 5, 6]
    assert [words for words in node.said if "host" in words and "only" not in words] == [
        "figures of host are missing: FileNotFoundError: the run's directory is gone"
    ]


def test_late_rows_are_not_made_up_for() -> None:
    def slow() -> SystemMetrics:
        time.sleep(5 * EVERY)
        return {}

    began = time.monotonic()
    with Node(0, FakeNvml([], driver=False), host=slow) as node:
        until(lambda: len(node.rows) >= 4)
        taken = time.monotonic() - began
    assert taken >= 4 * 5 * EVERY * 0.9


def bytes_a_day(folder: Path, gpus: int, host: dict[str, Any]) -> float:
    """Of rows as they are written, at ten seconds a sample."""
    nvml = FakeNvml(
        [FakeGpu(used=63_456_789_012 + gpu, milliwatts=612_345 + gpu) for gpu in range(gpus)], driver=gpus > 0
    )
    file = folder / f"{gpus}.jsonl"
    with Node(0, nvml, host=lambda: host) as node:
        until(lambda: len(node.rows) > 6)
    sink = JsonlSink({Kind.SYSTEM: file})
    for row in node.rows[3:6]:
        sink.log(Kind.SYSTEM, row)
    sink.close(0)
    assert len(list(read_rows(file))) == 3
    return file.stat().st_size / 3 * 8640


def test_months_of_samples_are_no_burden(tmp_path: Path) -> None:
    """The guide says how much a day; docs/monitoring.md."""
    host = {f"host/figure_{number}_bytes": 123_456_789_012 for number in range(24)}
    with_gpus, without = bytes_a_day(tmp_path, 8, host), bytes_a_day(tmp_path, 0, host)
    assert 30e6 < with_gpus < 70e6
    assert without < 12e6


def test_a_mistake_in_detecting_ends_alerts_and_no_rows() -> None:
    with Node(0, FakeNvml([FakeGpu()])) as node:
        until(lambda: len(node.rows) > 2)
        node.sampler._detect = lambda row: [row["no such figure"]]
        until(lambda: any("no more alerts" in words for words in node.said))
        count = len(node.rows)
        until(lambda: len(node.rows) > count + 2)
    assert [words for words in node.said if "alerts" in words] == [
        "no more alerts of samples: KeyError: 'no such figure'"
    ]


def test_the_driver_is_given_back_at_the_end() -> None:
    with Node(0, FakeNvml([FakeGpu()])) as node:
        until(lambda: len(node.rows) > 2)
    until(lambda: node.nvml.started == 0)
