"""A fake NVML: pynvml's constants, structures and errors, and its functions on GPUs in memory.

    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    nvml.gpus[1].throttle = pynvml.nvmlClocksEventReasonHwThermalSlowdown
    nvml.happens(1, xid=79)

A function that is not implemented here raises AttributeError, like one that pynvml lacks.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pynvml

BOARDS, SLICES, SAMPLES = 0x10000, 0x20000, 0x30000  # fake addresses
GIB = 2**30


@dataclass(slots=True)
class FakeGpu:
    """A busy H100. ``lacks``: error codes raised, by NVML function; ``fields``: values of NVML fields."""

    uuid: str = ""
    name: str = "NVIDIA H100 80GB HBM3"
    utilization: int = 97
    used: int = 60 * GIB
    total: int = 80 * GIB
    milliwatts: int = 612_500
    limit_milliwatts: int = 700_000
    celsius: int = 64
    sm_clock: int = 1755
    sm_clock_max: int = 1980
    throttle: int = pynvml.nvmlClocksEventReasonSwPowerCap
    ecc: dict[int, int] = field(default_factory=lambda: {0: 2, 1: 0})  # corrected, uncorrected
    remapped: tuple[int, int, int, int] = (1, 0, 0, 0)
    gpm: dict[int, float] = field(
        default_factory=lambda: {
            pynvml.NVML_GPM_METRIC_SM_UTIL: 88.25,
            pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: 30.0,
            pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 41.5,
            pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 35.0,
            pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: 100.0,
            pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: 200.0,
            pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC: 5000.0,
            pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: 5001.0,
        }
    )
    pcie_kilobytes: tuple[int, int] = (1500, 2500)
    fields: dict[int | tuple[int, int], float] = field(
        default_factory=lambda: {
            pynvml.NVML_FI_DEV_MEMORY_TEMP: 71,
            pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN: 0,
            pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN: 0,
            pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN: 0,
            pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL: 0,
            pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL: 3,
            pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL: 0,
        }
    )
    lacks: dict[str, int] = field(default_factory=dict)
    lost: bool = False
    slices: list[tuple[str, int]] = field(default_factory=list)  # MIG: uuid and bytes of memory


class FakeNvml(ModuleType):
    def __init__(self, gpus: Sequence[FakeGpu], *, driver: bool = True) -> None:
        super().__init__("pynvml")
        for name, value in vars(pynvml).items():
            if not name.startswith("__") and not (name.startswith("nvml") and callable(value)):
                setattr(self, name, value)
        self.gpus = list(gpus)
        for number, gpu in enumerate(self.gpus):
            gpu.uuid = gpu.uuid or f"GPU-{number:08x}-0000-0000-0000-000000000000"
        self.started = 0  # nvmlInit without nvmlShutdown
        self.calls: list[str] = []
        self._hanging: dict[str, threading.Event] = {}
        self._driver = driver
        self._xids: queue.Queue[tuple[int, int]] = queue.Queue()
        self._registered: set[int] = set()
        self._samples: dict[int, int | None] = {}  # address of a buffer -> the GPU that was sampled

    # ---- for tests

    def happens(self, number: int, *, xid: int) -> None:
        self._xids.put((number, xid))

    def hangs(self, function: str) -> threading.Event:
        """Calls of ``function`` do not return until the event is set."""
        self._hanging[function] = threading.Event()
        return self._hanging[function]

    def _gpu(self, handle: Any, function: str) -> FakeGpu:
        self._enter(function)
        gpu = self.gpus[self._number(handle)]
        if gpu.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if function in gpu.lacks:
            raise pynvml.NVMLError(gpu.lacks[function])
        return gpu

    def _enter(self, function: str) -> None:
        self.calls.append(function)
        if function in self._hanging:
            self._hanging[function].wait()
        if not self.started:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _number(self, handle: Any) -> int:
        address = ctypes.cast(handle, ctypes.c_void_p).value
        assert address is not None
        return (address - SLICES) // 16 % 256 if address >= SLICES else (address - BOARDS) // 16

    def _slot(self, handle: Any) -> int | None:
        address = ctypes.cast(handle, ctypes.c_void_p).value
        assert address is not None
        return (address - SLICES) // 4096 if address >= SLICES else None

    # ---- NVML

    def nvmlInit(self) -> None:
        if not self._driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.started += 1

    def nvmlShutdown(self) -> None:
        self._enter("nvmlShutdown")
        self.started -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._enter("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        handle = ctypes.cast(BOARDS + 16 * index, pynvml.c_nvmlDevice_t)
        self._gpu(handle, "nvmlDeviceGetHandleByIndex")
        return handle

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        self._enter("nvmlDeviceGetHandleByUUID")
        for number, gpu in enumerate(self.gpus):
            for slot, (own, _) in enumerate(gpu.slices):
                if own == uuid:
                    return ctypes.cast(SLICES + 4096 * slot + 16 * number, pynvml.c_nvmlDevice_t)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        gpu, slot = self._gpu(handle, "nvmlDeviceGetUUID"), self._slot(handle)
        return gpu.uuid if slot is None else gpu.slices[slot][0]

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return self._gpu(handle, "nvmlDeviceGetName").name

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        gpu = self._gpu(device, "nvmlDeviceGetMigMode")
        return [int(bool(gpu.slices))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        self._gpu(device, "nvmlDeviceGetMaxMigDeviceCount")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any:
        gpu = self._gpu(device, "nvmlDeviceGetMigDeviceHandleByIndex")
        if index == 0 or index > len(gpu.slices):  # the first slot is empty
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return ctypes.cast(SLICES + 4096 * (index - 1) + 16 * self._number(device), pynvml.c_nvmlDevice_t)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: Any) -> Any:
        self._gpu(migDevice, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
        return ctypes.cast(BOARDS + 16 * self._number(migDevice), pynvml.c_nvmlDevice_t)

    def nvmlDeviceGetGpuInstanceId(self, device: Any) -> int:
        self._gpu(device, "nvmlDeviceGetGpuInstanceId")
        slot = self._slot(device)
        assert slot is not None, "a whole GPU has no instance"
        return slot

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        gpu = self._gpu(handle, "nvmlDeviceGetUtilizationRates")
        if gpu.slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return pynvml.c_nvmlUtilization_t(gpu=gpu.utilization, memory=20)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        gpu, slot = self._gpu(handle, "nvmlDeviceGetMemoryInfo"), self._slot(handle)
        total = gpu.total if slot is None else gpu.slices[slot][1]
        if version is None:
            return pynvml.c_nvmlMemory_t(total=total, used=min(gpu.used, total) + GIB, free=0)
        return pynvml.c_nvmlMemory_v2_t(
            version=version, total=total, reserved=GIB, used=min(gpu.used, total), free=0
        )

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._gpu(handle, "nvmlDeviceGetPowerUsage").milliwatts

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        return self._gpu(handle, "nvmlDeviceGetEnforcedPowerLimit").limit_milliwatts

    def nvmlDeviceGetTemperatureV(
        self, handle: Any, sensor: int, version: int = pynvml.nvmlTemperature_v1
    ) -> int:
        return self._gpu(handle, "nvmlDeviceGetTemperatureV").celsius

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return self._gpu(handle, "nvmlDeviceGetTemperature").celsius

    def nvmlDeviceGetClockInfo(self, handle: Any, type: int) -> int:
        gpu = self._gpu(handle, "nvmlDeviceGetClockInfo")
        return gpu.sm_clock if type == pynvml.NVML_CLOCK_SM else 2619

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, type: int) -> int:
        gpu = self._gpu(handle, "nvmlDeviceGetMaxClockInfo")
        return gpu.sm_clock_max if type == pynvml.NVML_CLOCK_SM else 2619

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return self._gpu(handle, "nvmlDeviceGetCurrentClocksEventReasons").throttle

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return self._gpu(handle, "nvmlDeviceGetCurrentClocksThrottleReasons").throttle

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, errorType: int, counterType: int) -> int:
        assert counterType == pynvml.NVML_VOLATILE_ECC
        return self._gpu(handle, "nvmlDeviceGetTotalEccErrors").ecc[errorType]

    def nvmlDeviceGetRemappedRows(self, device: Any) -> tuple[int, int, int, int]:
        return self._gpu(device, "nvmlDeviceGetRemappedRows").remapped

    def nvmlDeviceGetPcieThroughput(self, device: Any, counter: int) -> int:
        return self._gpu(device, "nvmlDeviceGetPcieThroughput").pcie_kilobytes[counter]

    def nvmlDeviceGetFieldValues(self, handle: Any, fieldIds: Sequence[int | tuple[int, int]]) -> Any:
        gpu = self._gpu(handle, "nvmlDeviceGetFieldValues")
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for value, wanted in zip(values, fieldIds, strict=True):
            value.nvmlReturn = (
                pynvml.NVML_SUCCESS if wanted in gpu.fields else pynvml.NVML_ERROR_NOT_SUPPORTED
            )
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            value.value.ullVal = int(gpu.fields.get(wanted, 0))
        return values

    def nvmlGpmQueryDeviceSupport(self, device: Any) -> Any:
        gpu = self._gpu(device, "nvmlGpmQueryDeviceSupport")
        return pynvml.c_nvmlGpmSupport_t(
            version=pynvml.NVML_GPM_SUPPORT_VERSION, isSupportedDevice=int(bool(gpu.gpm))
        )

    def nvmlGpmSampleAlloc(self) -> Any:
        self._enter("nvmlGpmSampleAlloc")
        address = SAMPLES + 16 * len(self._samples)
        self._samples[address] = None
        return ctypes.cast(address, pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleFree(self, gpmSample: Any) -> None:
        del self._samples[ctypes.cast(gpmSample, ctypes.c_void_p).value or 0]

    def nvmlGpmSampleGet(self, device: Any, gpmSample: Any) -> Any:
        self._gpu(device, "nvmlGpmSampleGet")
        self._samples[ctypes.cast(gpmSample, ctypes.c_void_p).value or 0] = self._number(device)
        return gpmSample

    def nvmlGpmMigSampleGet(self, device: Any, gpuInstanceId: int, gpmSample: Any) -> Any:
        return self.nvmlGpmSampleGet(device, gpmSample)

    def nvmlGpmMetricsGet(self, metricsGet: Any) -> Any:
        self._enter("nvmlGpmMetricsGet")
        first, second = (
            self._samples[ctypes.cast(one, ctypes.c_void_p).value or 0]
            for one in (metricsGet.sample1, metricsGet.sample2)
        )
        assert first == second is not None, "two samples of one GPU"
        assert metricsGet.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        for slot in range(metricsGet.numMetrics):
            metric = metricsGet.metrics[slot]
            known = self.gpus[second].gpm
            metric.nvmlReturn = (
                pynvml.NVML_SUCCESS if metric.metricId in known else pynvml.NVML_ERROR_NOT_SUPPORTED
            )
            metric.value = known.get(metric.metricId, float("nan"))
        return metricsGet

    def nvmlEventSetCreate(self) -> Any:
        self._enter("nvmlEventSetCreate")
        return object()

    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None:
        self._gpu(handle, "nvmlDeviceRegisterEvents")
        assert eventTypes == pynvml.nvmlEventTypeXidCriticalError
        self._registered.add(self._number(handle))

    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any:
        self._enter("nvmlEventSetWait_v2")
        try:
            number, xid = self._xids.get(timeout=timeoutms / 1000)
        except queue.Empty:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT) from None
        return pynvml.c_nvmlEventData_t(
            device=ctypes.cast(BOARDS + 16 * number, pynvml.c_nvmlDevice_t),
            eventType=pynvml.nvmlEventTypeXidCriticalError,
            eventData=xid,
        )

    def nvmlEventSetFree(self, eventSet: Any) -> None:
        self._enter("nvmlEventSetFree")
