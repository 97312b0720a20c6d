"""Alerts of nodes: each trouble is named with its place, and 2,000 clean samples with spikes in them give none.

pytest tests/monitor/test_node_detector.py
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health import node_detector
from toolkit.monitor.health.memory import GROWN_SHARE, POINTS, SCALES, GrowthTracker, steady_growth
from toolkit.monitor.health.node_detector import LASTING_SAMPLES, SILENT_SECONDS, NodeDetector

GB = 10**9
GPUS = 8
Change = Callable[[int, dict[str, Any]], None]  # of the row of a number


def sample(number: int, noise: random.Random) -> dict[str, Any]:
    """A healthy node at work: clocks at the power limit, memory that rises and falls with evaluations."""
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
        # 3 GB of caches fill in the first minutes, and every 50 samples an evaluation holds 10 GB for a while.
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
    """Number of the sample, and what was said at it."""
    detector, noise = NodeDetector(1, checkpoint_bytes), random.Random(7)
    said = []
    for number in range(count):
        row = sample(number, noise)
        change(number, row)
        said += [(number, alert) for alert in detector.check(row)]
    return said


def only(said: Sequence[tuple[int, Alert]], name: str) -> list[tuple[int, Alert]]:
    assert {alert.name for _, alert in said} == {name}, said
    assert all(alert.cause and alert.evidence and alert.next_step for _, alert in said)
    return list(said)


def test_clean_samples_with_spikes_give_no_alert() -> None:
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
        if number % 400 == 399:  # a driver that takes its time, and host figures that do not come
            for name in [name for name in row if name.startswith(("gpu/", "host/", "rank/", "disk/"))]:
                del row[name]
            row |= {"gpu/silent_seconds": SILENT_SECONDS / 2, "host/silent_seconds": 1.0}
        if number >= 1000:
            row["gpu/3/ecc_uncorrected_errors"] = 0  # the driver was loaded anew

    assert alerts(2000, spikes) == []


def test_the_same_spikes_are_told_when_they_last() -> None:
    """The control of the test above: one more sample of each."""

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

    said = alerts(200, spikes)
    assert {number for number, _ in said} == {90 + LASTING_SAMPLES - 1}
    assert sorted(alert.name for _, alert in said) == [
        "disk-low",
        "gpu-slow-clock",
        "gpu-throttled",
        "host-memory-low",
    ]


def test_a_throttled_gpu_is_named_with_reason_clock_and_heat() -> None:
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

    said = only(alerts(60, hot), "gpu-throttled")
    number, alert = said[0]
    assert number == 50 + LASTING_SAMPLES - 1
    assert (alert.where, alert.level, alert.step) == ("node 1, GPU 3", Level.WARNING, 3 * number)
    assert alert.cause.endswith("hardware-slowdown and hardware-thermal")
    assert "990 of 1980 MHz (50%)" in alert.evidence
    assert "91 °C" in alert.evidence
    assert "nvidia-smi -i GPU-3" in alert.next_step
    assert "fans" in alert.next_step
    assert [number for number, _ in said] == list(range(52, 60)), (
        "while it lasts: the limiter decides who hears of it"
    )


def test_a_power_brake_is_not_a_matter_of_cooling() -> None:
    def brake(number: int, row: dict[str, Any]) -> None:
        row |= {"gpu/0/throttled": 1, "gpu/0/throttle_reasons": "power-brake", "gpu/0/utilization_percent": 0}

    assert "power supplies" in only(alerts(5, brake), "gpu-throttled")[0][1].next_step


def test_throttling_between_samples_counts() -> None:
    def now_and_then(number: int, row: dict[str, Any]) -> None:
        row["gpu/6/throttled_percent"] = 45.0

    alert = only(alerts(LASTING_SAMPLES, now_and_then), "gpu-throttled")[0][1]
    assert alert.where == "node 1, GPU 6"
    assert "45 % of the time" in alert.evidence


def test_a_gpu_with_a_forgotten_clock_setting_is_found() -> None:
    def slow(number: int, row: dict[str, Any]) -> None:
        row |= {f"gpu/{gpu}/utilization_percent": 98 for gpu in range(GPUS)}
        row |= {
            "gpu/4/sm_clock_mhz": 1000,
            "gpu/4/sm_clock_ratio": 0.505,
            "gpu/4/throttle_reasons": "application-clocks",
        }

    said = only(alerts(10, slow), "gpu-slow-clock")
    assert {alert.where for _, alert in said} == {"node 1, GPU 4"}
    assert "application-clocks" in said[0][1].evidence


def test_an_idle_gpu_is_not_slow() -> None:
    def idle(number: int, row: dict[str, Any]) -> None:
        row |= {f"gpu/{gpu}/utilization_percent": 98 for gpu in range(GPUS)}
        row |= {"gpu/4/sm_clock_ratio": 0.17, "gpu/4/utilization_percent": 0}

    assert alerts(10, idle) == []


def test_errors_of_memory_are_told_when_they_come() -> None:
    def errors(number: int, row: dict[str, Any]) -> None:
        if number == 20:  # the figures of one sample are missing
            del row["gpu/7/ecc_uncorrected_errors"]
        if number > 20:
            row["gpu/7/ecc_uncorrected_errors"] = 5
        if number >= 30:
            row["gpu/7/row_remap_pending"] = 1
        if number >= 40:
            row["gpu/7/row_remap_failed"] = 1

    said = alerts(100, errors)
    assert [(number, alert.name, alert.level) for number, alert in said] == [
        (21, "gpu-memory-error", Level.ERROR),
        (30, "gpu-row-remap-pending", Level.WARNING),
        (40, "gpu-row-remap-failed", Level.ERROR),
    ]
    assert said[0][1].evidence.startswith("3 since the sample before, 5 since the driver was loaded")
    assert all(alert.where == "node 1, GPU 7" for _, alert in said)


def test_a_remapping_that_waits_from_before_the_run_is_told_at_once() -> None:
    def pending(number: int, row: dict[str, Any]) -> None:
        row["gpu/0/row_remap_pending"] = 1

    assert [number for number, _ in only(alerts(50, pending), "gpu-row-remap-pending")] == [0]


def test_a_lost_gpu_is_told_once() -> None:
    def lose(number: int, row: dict[str, Any]) -> None:
        if number >= 10:
            for name in [name for name in row if name.startswith("gpu/2/")]:
                del row[name]
            row["gpu/2/lost"] = 1

    ((number, alert),) = only(alerts(50, lose), "gpu-lost")
    assert (number, alert.where, alert.level) == (10, "node 1, GPU 2", Level.ERROR)
    assert "GPU-2" in alert.evidence


@pytest.mark.parametrize(
    ("number", "words", "level"),
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
def test_an_xid_is_told_in_words(number: int, words: str, level: Level) -> None:
    alert = node_detector.xid_alert(number, 5, 2, 1234)
    assert (alert.name, alert.where, alert.step, alert.level) == ("gpu-xid", "node 2, GPU 5", 1234, level)
    assert f"XID {number} on GPU 5 of node 2" in alert.cause
    assert words in alert.cause
    assert node_detector.xid_alert(number, None, 2, 0).where == "node 2"
    assert "INDEX" not in node_detector.xid_alert(number, 5, 2, 0, "GPU-5").next_step


def test_memory_that_is_nearly_full_is_told_with_the_limit_that_holds() -> None:
    def full(number: int, row: dict[str, Any]) -> None:
        row |= {
            "host/memory_limit_bytes": 400 * GB,
            "host/memory_available_bytes": 5 * GB,
            "rank/9/private_bytes": 99 * GB,
        }

    alert = only(alerts(LASTING_SAMPLES, full), "host-memory-low")[0][1]
    assert "control group" in alert.evidence
    assert "400 GB" in alert.evidence
    assert "rank 9 holds most: 99 GB" in alert.evidence
    assert alert.level is Level.ERROR


def test_a_disk_without_room_for_a_checkpoint_is_full() -> None:
    def at(free: float) -> list[tuple[int, Alert]]:
        return alerts(
            LASTING_SAMPLES,
            lambda number, row: row.update({"disk/free_bytes": free}),
            checkpoint_bytes=840 * GB,
        )

    assert at(850 * GB) == []
    assert "840 GB" in only(at(830 * GB), "disk-low")[0][1].evidence


def test_a_source_that_is_silent_for_long_is_told() -> None:
    def hang(number: int, row: dict[str, Any]) -> None:
        if number >= 5:
            for name in [name for name in row if name.startswith("gpu/")]:
                del row[name]
            row["gpu/silent_seconds"] = 10.0 * (number - 4)

    said = only(alerts(15, hang), "sampling-stalled")
    assert said[0][0] == 10
    assert said[0][1].where == "node 1, gpu"


# ---- creeping memory


def leak(start: int, per_sample: float) -> Change:
    def change(number: int, row: dict[str, Any]) -> None:
        row["rank/11/private_bytes"] += max(0, number - start) * per_sample

    return change


@pytest.mark.parametrize(
    ("per_sample", "within"),
    [(2 * GB, 2 * POINTS), (0.2 * GB, 2 * POINTS * SCALES[1]), (0.02 * GB, 2 * POINTS * SCALES[2])],
)
def test_a_leak_is_found_in_the_window_that_fits_it(per_sample: float, within: int) -> None:
    said = only(alerts(100 + within, leak(100, per_sample)), "host-memory-creep")
    number, alert = said[0]
    assert alert.where == "rank 11"
    assert number <= 100 + within
    assert "an hour" in alert.evidence
    # It is told when it matters, and not at each sample.
    assert (number - 100) * per_sample >= 0.5 * GROWN_SHARE * 700 * GB
    assert len(said) < 1 + within * per_sample / (0.5 * GROWN_SHARE * 700 * GB)


def test_loading_a_model_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(number: int, row: dict[str, Any]) -> None:
        row["step"] = 5000 + number if number >= 60 else 5000 if number >= 55 else 0  # a resumed run
        row["rank/11/private_bytes"] += 5 * GB * min(number, 60)

    assert alerts(120, load) == []
    monkeypatch.setattr(node_detector, "MIN_STEPPED_SAMPLES", 0)
    assert {alert.name for _, alert in alerts(120, load)} == {"host-memory-creep"}, (
        "the control: it would be taken for one"
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
def test_what_is_no_steady_growth_is_none(curve: Callable[[int], float]) -> None:
    points = [(10.0 * at, 20 * GB + curve(at)) for at in range(POINTS)]
    found = steady_growth(points)
    assert found is None, found


def test_growth_is_measured_in_spite_of_odd_points() -> None:
    points = [(10.0 * at, 20 * GB + GB * at + (30 * GB if at in (3, 9, 14) else 0)) for at in range(POINTS)]
    found = steady_growth(points)
    assert found is not None
    assert abs(found.per_second - GB / 10) < 0.05 * GB / 10


def test_a_clock_that_is_set_back_is_survived() -> None:
    assert steady_growth([(10.0, float(GB * at)) for at in range(POINTS)]) is None
    assert steady_growth([(-10.0 * at, float(GB * at)) for at in range(POINTS)]) is None


def test_memory_of_the_detector_is_bounded() -> None:
    creep = GrowthTracker()
    for number in range(20_000):
        creep.add(10.0 * number, 1e9, 1e12)
    assert sum(len(window) for window in creep._windows.values()) <= POINTS * len(SCALES)
    assert sum(len(lowest) for lowest in creep._lowest.values()) < sum(SCALES)
