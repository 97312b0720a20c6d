"""Alerts of nodes: each fault is located, and 2,000 healthy samples with spikes give no alert.

pytest tests/monitor/test_node_detector.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health import gpu_faults, node_detector
from toolkit.monitor.health.memory import GROWN_SHARE, POINTS, SCALES, GrowthTracker, steady_growth
from toolkit.monitor.health.node_detector import LASTING_SAMPLES, SILENT_SECONDS, NodeDetector

GB = 10**9
GPUS = 8
Change = Callable[[int, dict[str, Any]], None]  # number of the sample, row


def sample(number: int, noise: random.Random) -> dict[str, Any]:
    """A healthy busy node: clocks at the power limit, memory that fluctuates with evaluations."""
    row: dict[str, Any] = {
        "node": 1,
        "step": 3 * number,
        "time": 1.78e9 + 10.0 * number,
        "gpu/count": GPUS,
        "host/memory_total_bytes": 1000 * GB,
        "host/memory_available_bytes": 700 * GB + noise.uniform(-20, 20) * GB,
        "disk/total_bytes": 5000 * GB,
        "disk/free_bytes": 800 * GB - number * GB / 100,
    }
    for gpu in range(GPUS):
        clock = noise.randint(1500, 1800)
        row |= {
            f"gpu/{gpu}/{name}": value
            for name, value in {
                "uuid": f"GPU-{gpu}",
                "utilization_percent": noise.choice((0, 40, 97, 100)),
                "sm_clock_mhz": clock,
                "sm_clock_max_mhz": 1980,
                "sm_clock_ratio": round(clock / 1980, 3),
                "temperature_celsius": noise.randint(55, 70),
                "ecc_uncorrected_errors": 2,
                "throttle_reasons": noise.choice(("none", "power-cap", "idle")),
                "throttled": 0,
                "throttled_percent": noise.uniform(0, 2),
                "row_remap_pending": 0,
                "row_remap_failed": 0,
                "remapped_rows_corrected": 3,
                "remapped_rows_uncorrected": 0,
            }.items()
        }
        # 3 GB of caches fill in the first minutes, and every 50 samples an evaluation uses 10 GB for a while.
        row[f"rank/{8 + gpu}/private_bytes"] = (
            20 * GB
            + 3 * GB * min(1.0, number / 30)
            + noise.uniform(0, 0.2) * GB
            + (10 * GB if number % 50 < 5 else 0)
        )
    return row


def alerts(
    count: int, change: Change = lambda number, row: None, checkpoint_bytes: float = 0.0
) -> list[tuple[int, Alert]]:
    """Simulate samples; return the number of the sample and the alert."""
    detector, noise = NodeDetector(1, checkpoint_bytes), random.Random(7)
    found = []
    for number in range(count):
        row = sample(number, noise)
        change(number, row)
        found += [(number, alert) for alert in detector.check(row)]
    return found


def only(found: Sequence[tuple[int, Alert]], name: str, fault: str) -> list[tuple[int, Alert]]:
    """Assert that all alerts are of one kind."""
    assert {(alert.name, alert.fault) for _, alert in found} == {(name, fault)}, found
    assert all(alert.cause and alert.evidence and alert.next_step for _, alert in found)
    return list(found)


def test_healthy_samples_with_spikes_give_no_alert() -> None:
    def spikes(number: int, row: dict[str, Any]) -> None:
        if number % 9 < LASTING_SAMPLES - 1:  # two of nine samples
            row |= {
                "gpu/2/throttled": 1,
                "gpu/2/throttle_reasons": "hardware-thermal",
                "gpu/2/throttled_percent": 60.0,
                "gpu/5/sm_clock_ratio": 0.3,
                "gpu/5/utilization_percent": 100,
                "host/memory_available_bytes": GB,
                "disk/free_bytes": 1,
            }
        if number % 400 == 399:  # a slow driver, and missing host metrics
            for name in [name for name in row if name.startswith(("gpu/", "host/", "rank/", "disk/"))]:
                del row[name]
            row |= {"gpu/silent_seconds": SILENT_SECONDS / 2, "host/silent_seconds": 1.0}
        if number >= 1000:
            row["gpu/3/ecc_uncorrected_errors"] = 0  # the driver was reloaded

    assert alerts(2000, spikes) == []


def test_lasting_spikes_give_alerts() -> None:
    """The control of the test above, with one more sample each."""

    def spikes(number: int, row: dict[str, Any]) -> None:
        if 90 <= number < 90 + LASTING_SAMPLES:
            row |= {
                "gpu/2/throttled": 1,
                "gpu/2/throttle_reasons": "hardware-thermal",
                "gpu/5/sm_clock_ratio": 0.3,
                "gpu/5/utilization_percent": 100,
                "host/memory_available_bytes": GB,
                "disk/free_bytes": 1,
            }
            row |= {f"gpu/{gpu}/utilization_percent": 100 for gpu in range(GPUS)}

    found = alerts(200, spikes)
    assert {number for number, _ in found} == {90 + LASTING_SAMPLES - 1}
    assert sorted(alert.fault for _, alert in found) == ["disk-low", "memory-low", "slow-clock", "throttled"]


def test_throttled_gpu_is_reported_with_reason_clock_and_temperature() -> None:
    def hot(number: int, row: dict[str, Any]) -> None:
        if number >= 50:
            row |= {
                "gpu/3/throttled": 1,
                "gpu/3/throttle_reasons": "power-cap+hardware-slowdown+hardware-thermal",
                "gpu/3/sm_clock_mhz": 990,
                "gpu/3/sm_clock_ratio": 0.5,
                "gpu/3/temperature_celsius": 91,
                "gpu/3/utilization_percent": 0,
            }

    found = only(alerts(60, hot), "gpu-slow", "throttled")
    number, alert = found[0]
    assert number == 50 + LASTING_SAMPLES - 1
    assert (alert.where, alert.level, alert.step) == ("node 1, GPU 3", Level.WARNING, 3 * number)
    assert alert.cause.endswith("hardware-slowdown and hardware-thermal")
    assert "990 of 1980 MHz (50%)" in alert.evidence
    assert "91 °C" in alert.evidence
    assert "nvidia-smi -i GPU-3" in alert.next_step
    assert "fans" in alert.next_step
    assert [number for number, _ in found] == list(range(52, 60)), (
        "for every sample; the limiter decides which are shown"
    )


def test_power_brake_advises_on_the_power_supply() -> None:
    def brake(number: int, row: dict[str, Any]) -> None:
        row |= {"gpu/0/throttled": 1, "gpu/0/throttle_reasons": "power-brake", "gpu/0/utilization_percent": 0}

    assert "power supplies" in only(alerts(5, brake), "gpu-slow", "throttled")[0][1].next_step


def test_throttling_between_samples_is_detected() -> None:
    def now_and_then(number: int, row: dict[str, Any]) -> None:
        row["gpu/6/throttled_percent"] = 45.0

    alert = only(alerts(LASTING_SAMPLES, now_and_then), "gpu-slow", "throttled")[0][1]
    assert alert.where == "node 1, GPU 6"
    assert "45 % of the time" in alert.evidence


def test_gpu_with_a_low_clock_setting_is_detected() -> None:
    def slow(number: int, row: dict[str, Any]) -> None:
        row |= {f"gpu/{gpu}/utilization_percent": 98 for gpu in range(GPUS)}
        row |= {
            "gpu/4/sm_clock_mhz": 1000,
            "gpu/4/sm_clock_ratio": 0.505,
            "gpu/4/throttle_reasons": "application-clocks",
        }

    found = only(alerts(10, slow), "gpu-slow", "slow-clock")
    assert {alert.where for _, alert in found} == {"node 1, GPU 4"}
    assert "application-clocks" in found[0][1].evidence


def test_idle_gpu_is_not_slow() -> None:
    def idle(number: int, row: dict[str, Any]) -> None:
        row |= {f"gpu/{gpu}/utilization_percent": 98 for gpu in range(GPUS)}
        row |= {"gpu/4/sm_clock_ratio": 0.17, "gpu/4/utilization_percent": 0}

    assert alerts(10, idle) == []


def test_memory_errors_are_reported_when_they_occur() -> None:
    def errors(number: int, row: dict[str, Any]) -> None:
        if number == 20:  # missing in one sample
            del row["gpu/7/ecc_uncorrected_errors"]
        if number > 20:
            row["gpu/7/ecc_uncorrected_errors"] = 5
        if number >= 30:
            row["gpu/7/row_remap_pending"] = 1
        if number >= 40:
            row["gpu/7/row_remap_failed"] = 1

    found = alerts(100, errors)
    assert [(number, alert.fault, alert.level) for number, alert in found] == [
        (21, "memory-error", Level.ERROR),
        (30, "row-remap-pending", Level.WARNING),
        (40, "row-remap-failed", Level.ERROR),
    ]
    assert found[0][1].evidence.startswith("3 since the previous sample, 5 since the driver was loaded")
    assert all(alert.where == "node 1, GPU 7" for _, alert in found)


def test_remapping_pending_from_before_the_run_is_reported() -> None:
    def pending(number: int, row: dict[str, Any]) -> None:
        row["gpu/0/row_remap_pending"] = 1

    assert [number for number, _ in only(alerts(50, pending), "gpu-fault", "row-remap-pending")] == [0]


def test_lost_gpu_is_reported_once() -> None:
    def lose(number: int, row: dict[str, Any]) -> None:
        if number >= 10:
            for name in [name for name in row if name.startswith("gpu/2/")]:
                del row[name]
            row["gpu/2/lost"] = 1

    ((number, alert),) = only(alerts(50, lose), "gpu-fault", "lost")
    assert (number, alert.where, alert.level) == (10, "node 1, GPU 2", Level.ERROR)
    assert "GPU-2" in alert.evidence


@pytest.mark.parametrize(
    ("number", "meaning", "level"),
    [
        (79, "fallen off the bus", Level.ERROR),
        (48, "double-bit", Level.ERROR),
        (31, "page fault", Level.ERROR),
        (63, "remapped at the next reset", Level.WARNING),
        (94, "contained", Level.ERROR),
        (119, "did not answer", Level.ERROR),
        (777, "not in this toolkit's table", Level.ERROR),
    ],
)
def test_xid_alert_explains_the_number(number: int, meaning: str, level: Level) -> None:
    alert = gpu_faults.xid_alert(number, 5, 2, 1234)
    assert (alert.fault, alert.where, alert.step, alert.level) == ("xid", "node 2, GPU 5", 1234, level)
    assert f"XID {number} on GPU 5 of node 2" in alert.cause
    assert meaning in alert.cause
    assert gpu_faults.xid_alert(number, None, 2, 0).where == "node 2"
    assert "INDEX" not in gpu_faults.xid_alert(number, 5, 2, 0, "GPU-5").next_step


def test_low_memory_is_reported_with_the_effective_limit() -> None:
    def full(number: int, row: dict[str, Any]) -> None:
        row |= {
            "host/memory_limit_bytes": 400 * GB,
            "host/memory_available_bytes": 5 * GB,
            "rank/9/private_bytes": 99 * GB,
        }

    alert = only(alerts(LASTING_SAMPLES, full), "host-fault", "memory-low")[0][1]
    assert "control group" in alert.evidence
    assert "400 GB" in alert.evidence
    assert "rank 9 uses most: 99 GB" in alert.evidence
    assert alert.level is Level.ERROR


def test_disk_without_room_for_a_checkpoint_is_reported() -> None:
    def at(free: float) -> list[tuple[int, Alert]]:
        return alerts(
            LASTING_SAMPLES,
            lambda number, row: row.update({"disk/free_bytes": free}),
            checkpoint_bytes=840 * GB,
        )

    assert at(850 * GB) == []
    assert "840 GB" in only(at(830 * GB), "host-fault", "disk-low")[0][1].evidence


def test_silent_source_is_reported() -> None:
    def hang(number: int, row: dict[str, Any]) -> None:
        if number >= 5:
            for name in [name for name in row if name.startswith("gpu/")]:
                del row[name]
            row["gpu/silent_seconds"] = 10.0 * (number - 4)

    found = only(alerts(15, hang), "host-fault", "sampling-stalled")
    assert found[0][0] == 10
    assert found[0][1].where == "node 1, gpu"


# ---- growing memory


def leak(start: int, per_sample: float) -> Change:
    def change(number: int, row: dict[str, Any]) -> None:
        row["rank/11/private_bytes"] += max(0, number - start) * per_sample

    return change


@pytest.mark.parametrize(
    ("per_sample", "within"),
    [
        (2 * GB, 2 * POINTS),
        (0.2 * GB, 2 * POINTS * SCALES[1]),
        pytest.param(0.02 * GB, 2 * POINTS * SCALES[2], marks=pytest.mark.full),
    ],
)
def test_leak_is_found_in_the_matching_window(per_sample: float, within: int) -> None:
    found = only(alerts(100 + within, leak(100, per_sample)), "memory-growth", "rank-memory")
    number, alert = found[0]
    assert alert.where == "rank 11"
    assert number <= 100 + within
    assert "an hour" in alert.evidence
    # Not reported before it matters, and not for every sample.
    assert (number - 100) * per_sample >= 0.5 * GROWN_SHARE * 700 * GB
    assert len(found) < 1 + within * per_sample / (0.5 * GROWN_SHARE * 700 * GB)


def test_loading_a_model_is_not_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(number: int, row: dict[str, Any]) -> None:
        row["step"] = 5000 + number if number >= 60 else 5000 if number >= 55 else 0  # a resumed run
        row["rank/11/private_bytes"] += 5 * GB * min(number, 60)

    assert alerts(120, load) == []
    monkeypatch.setattr(node_detector, "MIN_STEPPED_SAMPLES", 0)
    assert {alert.fault for _, alert in alerts(120, load)} == {"rank-memory"}, (
        "the control: without it, loading looks like a leak"
    )


@pytest.mark.parametrize(
    "curve",
    [
        lambda at: 0.0,
        lambda at: 50 * GB * (at >= 8),  # a jump
        lambda at: 50 * GB * (1 - 0.5**at),  # fills and stays
        lambda at: 50 * GB * (at % 4),  # saw
        lambda at: -5 * GB * at,
    ],
)
def test_unsteady_curves_are_not_growth(curve: Callable[[int], float]) -> None:
    points = [(10.0 * at, 20 * GB + curve(at)) for at in range(POINTS)]
    found = steady_growth(points)
    assert found is None, found


def test_growth_estimate_ignores_outliers() -> None:
    points = [(10.0 * at, 20 * GB + GB * at + (30 * GB if at in (3, 9, 14) else 0)) for at in range(POINTS)]
    found = steady_growth(points)
    assert found is not None
    assert abs(found.per_second - GB / 10) < 0.05 * GB / 10


def test_clock_that_is_set_back_gives_no_growth() -> None:
    assert steady_growth([(10.0, float(GB * at)) for at in range(POINTS)]) is None
    assert steady_growth([(-10.0 * at, float(GB * at)) for at in range(POINTS)]) is None


def test_state_of_the_tracker_is_bounded() -> None:
    tracker = GrowthTracker()
    for number in range(20_000):
        tracker.add(10.0 * number, 1e9, 1e12)
    assert sum(len(window) for window in tracker._windows.values()) <= POINTS * len(SCALES)
    assert sum(len(lowest) for lowest in tracker._lowest.values()) < sum(SCALES)
