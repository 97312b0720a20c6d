"""Latency and bandwidth of an axis, and their formatting.

pytest tests/monitor/test_comm_benchmark_rows.py
"""

from __future__ import annotations

import pytest

from toolkit.monitor.comm_benchmark_rows import (
    ALL_REDUCE,
    SEND,
    LinkTiming,
    bus_bandwidth,
    format_probe,
    probe_row,
    quantile,
    unprobed_row,
)

TIMED = LinkTiming(
    operation=SEND,
    ranks=2,
    small_seconds=[1e-4] * 99 + [5e-3],
    large_bytes=4_000_000,
    large_seconds=[4.1e-3, 4.1e-3, 9e-3],
)


def test_quantiles_are_measured_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert quantile(values, 0.5) == 50.0
    assert quantile(values, 0.99) == 99.0
    assert quantile(values, 1.0) == 100.0
    assert quantile([3.0], 0.5) == 3.0
    assert quantile(values[:30], 0.99) == 100.0


def test_outlier_changes_only_p99() -> None:
    slower = LinkTiming(
        operation=SEND, ranks=2, small_seconds=[1e-4] * 29 + [5e-3], large_bytes=1, large_seconds=[1.0]
    )
    assert slower.latency_p50 == TIMED.latency_p50 == 1e-4
    assert slower.latency_p99 == 5e-3


def test_bus_bandwidth_follows_nccl_tests() -> None:
    """8 ranks, 1 GB in 10 ms: 100 GB/s of the algorithm is 175 GB/s on each link."""
    assert bus_bandwidth(ALL_REDUCE, 8, 10**9, 0.01) == pytest.approx(175e9)
    assert bus_bandwidth(ALL_REDUCE, 2, 10**9, 0.01) == pytest.approx(100e9)
    assert bus_bandwidth(SEND, 8, 10**9, 0.01) == pytest.approx(100e9)


def test_transfer_time_is_latency_plus_bytes() -> None:
    seconds = TIMED.transfer()
    assert seconds(0) == pytest.approx(1e-4)
    assert seconds(4_000_000) == pytest.approx(4.1e-3)
    assert seconds(2_000_000) == pytest.approx(2.1e-3)
    backwards = LinkTiming(
        operation=SEND, ranks=2, small_seconds=[1e-3], large_bytes=100, large_seconds=[1e-4]
    ).transfer()
    assert backwards(100) == 1e-3


def test_format_names_a_slow_group() -> None:
    row = probe_row(
        "data",
        operation=ALL_REDUCE,
        ranks=2,
        latency_p50=2e-4,
        latency_p99=9e-4,
        large_bytes=4_000_000,
        slowest_large=4e-3,
        fastest_large=4e-3,
        slowest_of=(0, 2),
    )
    assert (
        format_probe(row)
        == "probe of axis data (2 ranks): all_reduce 200 µs (p99 900), bus bandwidth 1.00 GB/s"
    )
    slow = probe_row(
        "data",
        operation=ALL_REDUCE,
        ranks=2,
        latency_p50=2e-4,
        latency_p99=9e-4,
        large_bytes=4_000_000,
        slowest_large=4e-2,
        fastest_large=4e-3,
        slowest_of=(1, 3),
    )
    assert format_probe(slow).endswith(
        "bus bandwidth 0.10 GB/s, fastest group 1.00 GB/s; slowest group: ranks 1, 3"
    )
    assert "skipped, no process group" in format_probe(unprobed_row("tensor", 4))
