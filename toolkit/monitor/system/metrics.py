"""System metrics: flat names that end with the unit, rates from counters, and what W&B collects itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SystemMetrics = dict[str, float | int | str]  # ``gpu/0/power_watts``, ``disk/free_bytes``

# Written only when they change: properties of the machine, and counts of rare events.
STEADY_METRICS = frozenset(
    (
        "name",
        "uuid",
        "count",
        "memory_total_bytes",
        "memory_limit_bytes",
        "total_bytes",
        "power_limit_watts",
        "sm_clock_max_mhz",
        "memory_clock_mhz",
        "memory_clock_max_mhz",
        "ecc_corrected_errors",
        "ecc_uncorrected_errors",
        "remapped_rows_corrected",
        "remapped_rows_uncorrected",
        "row_remap_pending",
        "row_remap_failed",
        "nvlink_crc_errors",
        "nvlink_replay_errors",
        "nvlink_recovery_errors",
        "xid",
        "xid_events",
        "swap_used_bytes",
    )
)
# Collected by W&B (0.31) itself on every node that writes to a run, and therefore not sent again.
COLLECTED_BY_WANDB = frozenset(
    (
        "gpu/utilization_percent",
        "gpu/memory_used_bytes",
        "gpu/memory_total_bytes",
        "gpu/power_watts",
        "gpu/power_limit_watts",
        "gpu/temperature_celsius",
        "gpu/sm_clock_mhz",
        "gpu/memory_clock_mhz",
        "gpu/ecc_corrected_errors",
        "gpu/ecc_uncorrected_errors",
        "gpu/pcie_tx_bytes_per_second",
        "gpu/pcie_rx_bytes_per_second",
        "host/cpu_percent",
        "host/memory_total_bytes",
        "host/memory_used_bytes",
        "host/memory_limit_bytes",
        "host/memory_limited_used_bytes",
        "disk/total_bytes",
        "disk/free_bytes",
        "disk/read_bytes_per_second",
        "disk/write_bytes_per_second",
        "network/receive_bytes_per_second",
        "network/send_bytes_per_second",
    )
)


def without_wandb_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a row that W&B does not collect itself."""
    return {
        name: value
        for name, value in row.items()
        if _without_index(name) not in COLLECTED_BY_WANDB and name not in ("node", "time")
    }


def _without_index(name: str) -> str:
    """Map ``gpu/3/power_watts`` to ``gpu/power_watts``."""
    parts = name.split("/")
    return f"gpu/{parts[-1]}" if parts[0] == "gpu" else name


class SteadyMetricFilter:
    """Drops metrics of ``STEADY_METRICS`` that are unchanged since the previous row. Readers carry the last
    value forward.
    """

    def __init__(self) -> None:
        self._last: SystemMetrics = {}

    def __call__(self, row: SystemMetrics) -> SystemMetrics:
        steady = {name: value for name, value in row.items() if name.rsplit("/", 1)[-1] in STEADY_METRICS}
        changed = {
            name: value for name, value in row.items() if name not in steady or self._last.get(name) != value
        }
        self._last |= steady
        return changed


class CounterRates:
    """Converts counters to rates: the increase per second since the counter was last read."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    def per_second(self, name: str, value: float, now: float) -> float | None:
        """Args:
            now: seconds of a monotonic clock.

        Returns:
            None for the first value of a counter, and if it went back because the driver was reloaded or it
            wrapped.
        """
        before = self._last.get(name)
        self._last[name] = (value, now)
        if before is None or now <= before[1] or value < before[0]:
            return None
        return (value - before[0]) / (now - before[1])
