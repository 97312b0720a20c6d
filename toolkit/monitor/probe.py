"""What an axis' links were measured to do: latency and bandwidth. Pure; who measures is ``observe/comm_benchmark.py``.

Bandwidth is what NCCL-tests call bus bandwidth (its doc/PERFORMANCE.md): an all-reduce of S bytes over n ranks in t seconds moves
2 (n - 1) / n S bytes over each rank's link, so 2 (n - 1) / n S / t; of a send it is S / t. It can be compared with what the hardware has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ALL_REDUCE, SEND = "all_reduce", "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What one rank measured along one axis.

    Attributes:
        ranks: along the axis.
        small_seconds: of each of many operations of a few bytes.
        large_bytes, large_seconds: of one large operation, and each of some.
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
        """Bytes -> seconds, on the line through a few bytes and many."""
        latency = self.latency_p50
        a_byte = max(0.0, self.large_median - latency) / self.large_bytes
        return lambda size: latency + size * a_byte


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def bus_bandwidth(operation: str, ranks: int, size: int, seconds: float) -> float:
    """Bytes a second over one rank's link: see the top."""
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
    """One axis, as ``probe.json`` has it. Latencies are those of the slowest group.

    Args:
        slowest_large, fastest_large: seconds of the large operation in the slowest and the fastest group along this axis.
        slowest_of: the ranks of the slowest one.
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


def missing_row(axis: str, ranks: int) -> dict[str, Any]:
    """An axis that could not be probed without making communicators that training does not have."""
    return {"axis": axis, "ranks": ranks, "missing": "no process group of just the ranks along this axis"}


def words(row: Mapping[str, Any]) -> str:
    if "missing" in row:
        return f"probe of axis {row['axis']} ({row['ranks']} ranks): not made, {row['missing']}"
    slow, fast = row["bandwidth_bytes_per_second"], row["best_bandwidth_bytes_per_second"]
    spread = (
        f", the fastest group {_speed(fast)}; the slowest: {_ranks(row['slowest_ranks'])}"
        if fast > 1.5 * slow
        else ""
    )
    return (
        f"probe of axis {row['axis']} ({row['ranks']} ranks): {row['operation']} {row['latency_p50_seconds'] * 1e6:,.0f} µs "
        f"(p99 {row['latency_p99_seconds'] * 1e6:,.0f}), bus bandwidth {_speed(slow)}{spread}"
    )


def _speed(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{' ...' if len(ranks) > 8 else ''}"
