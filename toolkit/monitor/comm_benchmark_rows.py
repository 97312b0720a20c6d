"""Latency and bandwidth of an axis' links, from timings that ``observe/comm_benchmark.py`` takes.

Bandwidth is the bus bandwidth of NCCL-tests (doc/PERFORMANCE.md), which is comparable with the hardware's: an
all-reduce of S bytes over n ranks in t seconds has 2 (n - 1) / n S / t, a send S / t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ALL_REDUCE, SEND = "all_reduce", "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTiming:
    """The timings of one rank along one axis.

    Attributes:
        ranks: number of ranks along the axis.
        small_seconds: seconds of each of many operations of a few bytes.
        large_bytes, large_seconds: bytes of a large operation, and seconds of each of several.
    """

    operation: str
    ranks: int
    small_seconds: Sequence[float]
    large_bytes: int
    large_seconds: Sequence[float]

    @property
    def latency_p50(self) -> float:
        return quantile(self.small_seconds, 0.5)

    @property
    def latency_p99(self) -> float:
        return quantile(self.small_seconds, 0.99)

    @property
    def large_median(self) -> float:
        return quantile(self.large_seconds, 0.5)

    def transfer(self) -> Callable[[int], float]:
        """Return a function from bytes to seconds, linear through the small and the large operation."""
        latency = self.latency_p50
        a_byte = max(0.0, self.large_median - latency) / self.large_bytes
        return lambda size: latency + size * a_byte


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def bus_bandwidth(operation: str, ranks: int, size: int, seconds: float) -> float:
    """Return the bus bandwidth in bytes per second; see the module's docstring."""
    crossing = 2 * (ranks - 1) / ranks if operation == ALL_REDUCE else 1.0
    return crossing * size / seconds


def probe_row(
    axis: str,
    *,
    operation: str,
    ranks: int,
    latency_p50: float,
    latency_p99: float,
    large_bytes: int,
    slowest_large: float,
    fastest_large: float,
    slowest_of: Sequence[int],
) -> dict[str, Any]:
    """Build the row of one axis in ``probe.json``. Latencies are those of the slowest group.

    Args:
        slowest_large, fastest_large: seconds of the large operation in the slowest and the fastest group
            along the axis.
        slowest_of: the ranks of the slowest group.
    """
    return {
        "axis": axis,
        "operation": operation,
        "ranks": ranks,
        "latency_p50_seconds": latency_p50,
        "latency_p99_seconds": latency_p99,
        "large_bytes": large_bytes,
        "bandwidth_bytes_per_second": bus_bandwidth(operation, ranks, large_bytes, slowest_large),
        "best_bandwidth_bytes_per_second": bus_bandwidth(operation, ranks, large_bytes, fastest_large),
        "slowest_ranks": list(slowest_of),
    }


def unprobed_row(axis: str, ranks: int) -> dict[str, Any]:
    """Build the row of an axis that cannot be probed without communicators that training does not have."""
    return {"axis": axis, "ranks": ranks, "missing": "no process group of just the ranks along this axis"}


def format_probe(row: Mapping[str, Any]) -> str:
    if "missing" in row:
        return f"probe of axis {row['axis']} ({row['ranks']} ranks): skipped, {row['missing']}"
    slow, fast = row["bandwidth_bytes_per_second"], row["best_bandwidth_bytes_per_second"]
    spread = (
        f", fastest group {_speed(fast)}; slowest group: {_ranks(row['slowest_ranks'])}"
        if fast > 1.5 * slow
        else ""
    )
    return (
        f"probe of axis {row['axis']} ({row['ranks']} ranks): {row['operation']} "
        f"{row['latency_p50_seconds'] * 1e6:,.0f} µs "
        f"(p99 {row['latency_p99_seconds'] * 1e6:,.0f}), bus bandwidth {_speed(slow)}{spread}"
    )


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{' ...' if len(ranks) > 8 else ''}"
