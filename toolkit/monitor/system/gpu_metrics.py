"""Metrics of one GPU. Each function makes one kind of NVML query, which some GPUs and drivers do not support.

Every function takes NVML's module (pynvml of nvidia-ml-py), the GPU and the time in seconds, and raises the
module's ``NVMLError`` if the query is not supported. Meanings and units: NVML API reference,
https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.monitor.system.gpu_codes import is_harmful, throttle_reasons
from toolkit.monitor.system.metrics import CounterRates, SystemMetrics

ALL_LINKS = 0xFFFFFFFF  # for the NVLink counters: the sum over a GPU's links
MIB, KIB = 2**20, 2**10
# members of nvmlValue_t, by nvmlValueType_t
VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


@dataclass(slots=True)
class VisibleGpu:
    """A GPU of the run, or a slice of one (MIG).

    Attributes:
        index: among the GPUs that the run uses on this node; equals the local rank.
        board: NVML's handle of the whole GPU, which reports power, clocks, links and errors.
        slice: NVML's handle of the MIG device, which has its own memory; None if the whole GPU is used.
        unsupported: names of the metrics that this GPU or driver does not have.
        samples: NVML's two buffers of performance counters, the older first; empty before the first reading.
    """

    index: int
    uuid: str
    name: str
    board: Any
    slice: Any = None
    lost: bool = False
    unsupported: set[str] = field(default_factory=set)
    rates: CounterRates = field(default_factory=CounterRates)
    samples: list[Any] = field(default_factory=list)

    @property
    def address(self) -> int | None:
        return ctypes.cast(self.board, ctypes.c_void_p).value


def _utilization(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    """Return the share of the last second or less in which any kernel ran. A GPU that waits in a collective
    is utilized.
    """
    return {"utilization_percent": nvml.nvmlDeviceGetUtilizationRates(gpu.board).gpu}


def _memory(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    handle = gpu.slice or gpu.board
    # Like nvidia-smi, the second version excludes memory reserved by the driver.
    memory = _newest(
        nvml,
        lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2),
        lambda: nvml.nvmlDeviceGetMemoryInfo(handle),
    )
    return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}


def _power(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    return {"power_watts": nvml.nvmlDeviceGetPowerUsage(gpu.board) / 1000}


def _power_limit(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    return {"power_limit_watts": nvml.nvmlDeviceGetEnforcedPowerLimit(gpu.board) / 1000}


def _temperature(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    sensor = nvml.NVML_TEMPERATURE_GPU
    celsius = _newest(
        nvml,
        lambda: nvml.nvmlDeviceGetTemperatureV(gpu.board, sensor),
        lambda: nvml.nvmlDeviceGetTemperature(gpu.board, sensor),
    )
    return {"temperature_celsius": celsius}


def _memory_temperature(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    return _present({"memory_temperature_celsius": _fields(nvml, gpu, [nvml.NVML_FI_DEV_MEMORY_TEMP])[0]})


def _sm_clock(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    clock, most = (
        ask(gpu.board, nvml.NVML_CLOCK_SM)
        for ask in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
    )
    return {
        "sm_clock_mhz": clock,
        "sm_clock_max_mhz": most,
        **({"sm_clock_ratio": round(clock / most, 3)} if most else {}),
    }


def _memory_clock(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    return {
        "memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(gpu.board, nvml.NVML_CLOCK_MEM),
        "memory_clock_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(gpu.board, nvml.NVML_CLOCK_MEM),
    }


def _throttling(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    """Return the current reasons for lowered clocks."""
    bits = _newest(
        nvml,
        lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu.board),
        lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu.board),
    )
    reasons = throttle_reasons(bits)
    return {"throttle_reasons": "+".join(reasons) or "none", "throttled": int(is_harmful(reasons))}


def _throttled_time(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    """Return the share of the time since the previous sample in which the worst harmful reason held,
    including short spells.
    """
    nanoseconds = _fields(
        nvml,
        gpu,
        [
            nvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN,
            nvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN,
            nvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN,
        ],
    )
    shares = [
        gpu.rates.per_second(f"throttled {number}", count, now)
        for number, count in enumerate(nanoseconds)
        if count is not None
    ]
    known = [share for share in shares if share is not None]
    return {"throttled_percent": round(min(100.0, max(known) / 1e9 * 100), 2)} if known else {}


def _ecc(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    """Error counts since the driver was loaded."""

    def count(kind: int) -> int:
        return int(nvml.nvmlDeviceGetTotalEccErrors(gpu.board, kind, nvml.NVML_VOLATILE_ECC))

    return {
        "ecc_corrected_errors": count(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        "ecc_uncorrected_errors": count(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    }


def _remapped_rows(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    """Counts during the GPU's life, and whether a remapping is pending or failed (Ampere and later)."""
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(gpu.board)
    return {
        "remapped_rows_corrected": corrected,
        "remapped_rows_uncorrected": uncorrected,
        "row_remap_pending": pending,
        "row_remap_failed": failed,
    }


def _performance(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    """Return the mean activity between two samples by the GPU performance monitor (GPM) of Hopper and
    later.
    """
    names = {
        nvml.NVML_GPM_METRIC_SM_UTIL: ("sm_active_percent", 1),
        nvml.NVML_GPM_METRIC_SM_OCCUPANCY: ("sm_occupancy_percent", 1),
        nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: ("tensor_active_percent", 1),
        nvml.NVML_GPM_METRIC_DRAM_BW_UTIL: ("dram_active_percent", 1),
        nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: ("pcie_tx_bytes_per_second", MIB),
        nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: ("pcie_rx_bytes_per_second", MIB),
        nvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC: ("nvlink_tx_bytes_per_second", MIB),
        nvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: ("nvlink_rx_bytes_per_second", MIB),
    }
    if not gpu.samples:
        if not nvml.nvmlGpmQueryDeviceSupport(gpu.board).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        fresh = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        _take_sample(nvml, gpu, fresh[0])
        gpu.samples = fresh
        return {}
    before, after = gpu.samples
    _take_sample(nvml, gpu, after)
    query = nvml.c_nvmlGpmMetricsGet_t()
    query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(names)
    query.sample1, query.sample2 = before, after
    for slot, metric in enumerate(names):
        query.metrics[slot].metricId = metric
    gpu.samples = [after, before]
    nvml.nvmlGpmMetricsGet(query)
    figures: SystemMetrics = {}
    for slot, (name, unit) in enumerate(names.values()):
        result = query.metrics[slot]
        if result.nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(result.value):
            figures[name] = round(result.value, 2) if unit == 1 else round(result.value * unit)
    return figures


def _take_sample(nvml: Any, gpu: VisibleGpu, sample: Any) -> None:
    if gpu.slice is None:
        nvml.nvmlGpmSampleGet(gpu.board, sample)
    else:
        nvml.nvmlGpmMigSampleGet(gpu.board, nvml.nvmlDeviceGetGpuInstanceId(gpu.slice), sample)


def _pcie(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    """Traffic over the last 20 ms, for GPUs without GPM."""
    if gpu.samples:
        return {}
    ways = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
    sent, received = (nvml.nvmlDeviceGetPcieThroughput(gpu.board, way) for way in ways)
    # NVML: KB/s
    return {"pcie_tx_bytes_per_second": sent * 1000, "pcie_rx_bytes_per_second": received * 1000}


def _nvlink(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    """Payload over all links since the previous sample, for GPUs without GPM."""
    if gpu.samples:
        return {}
    counters = _fields(
        nvml,
        gpu,
        [
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS),
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS),
        ],
    )
    rates = {
        name: gpu.rates.per_second(name, count * KIB, now)
        for name, count in zip(
            ("nvlink_tx_bytes_per_second", "nvlink_rx_bytes_per_second"), counters, strict=True
        )
        if count is not None
    }
    return {name: round(rate) for name, rate in rates.items() if rate is not None}


def _nvlink_errors(nvml: Any, gpu: VisibleGpu, now: float) -> SystemMetrics:
    """Error counts over all links since the driver was loaded, up to NVLink 4."""
    names = ("nvlink_crc_errors", "nvlink_replay_errors", "nvlink_recovery_errors")
    totals = _fields(
        nvml,
        gpu,
        [
            nvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
            nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
            nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
        ],
    )
    if all(total is None for total in totals):  # Hopper counts by link
        links = int(_fields(nvml, gpu, [nvml.NVML_FI_DEV_NVLINK_LINK_COUNT])[0] or 0)
        kinds = (
            nvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
            nvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
            nvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
        )
        each = _fields(nvml, gpu, [(kind, link) for kind in kinds for link in range(links)]) if links else []
        totals = [_sum(each[first : first + links]) for first in range(0, len(each), links or 1)]
    return _present(dict(zip(names, totals, strict=False)))


def _sum(counts: Sequence[float | None]) -> float | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


MEASUREMENTS: tuple[Callable[[Any, VisibleGpu, float], SystemMetrics], ...] = (
    _utilization,
    _memory,
    _power,
    _power_limit,
    _temperature,
    _memory_temperature,
    _sm_clock,
    _memory_clock,
    _throttling,
    _throttled_time,
    _ecc,
    _remapped_rows,
    _performance,
    _pcie,
    _nvlink,
    _nvlink_errors,
)


def _newest(nvml: Any, call: Callable[[], Any], older: Callable[[], Any]) -> Any:
    """Return the result of ``call``, or of ``older`` if the driver does not support it."""
    try:
        return call()
    except nvml.NVMLError as error:
        if error.value not in (nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
            raise
        return older()


def _fields(nvml: Any, gpu: VisibleGpu, ids: Sequence[int | tuple[int, int]]) -> list[float | None]:
    """Return the values of NVML fields (or field and link); None for those that the GPU lacks."""
    values = nvml.nvmlDeviceGetFieldValues(gpu.board, ids)
    return [
        getattr(one.value, VALUES[one.valueType]) if one.nvmlReturn == nvml.NVML_SUCCESS else None
        for one in values
    ]


def _present(figures: dict[str, float | None]) -> SystemMetrics:
    return {name: value for name, value in figures.items() if value is not None}
