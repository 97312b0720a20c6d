"""Read the GPUs that a run uses on one node through NVIDIA's management library (NVML). AMD GPUs are not
supported.

Metrics that a GPU or driver lacks are omitted and logged once at debug level. Except for ``cluster/``, only
this module imports NVML's Python module (pynvml of nvidia-ml-py); all functions take it as an argument, so
that tests can pass a fake.
"""

from __future__ import annotations

import ctypes
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from toolkit.monitor.system.gpu_metrics import MEASUREMENTS, VisibleGpu
from toolkit.monitor.system.metrics import SystemMetrics

log = logging.getLogger(__name__)


def load() -> Any:
    import pynvml

    return pynvml


# ---- which GPUs


def find_gpus(nvml: Any, selection: str | None) -> list[VisibleGpu]:
    """Return the GPUs that CUDA shows to a process with ``CUDA_VISIBLE_DEVICES=selection``, in its order;
    None: all.

    The selection is parsed like the CUDA driver does: indices or UUIDs (or prefixes) of GPUs and MIG devices,
    up to the first unknown one. For a GPU in MIG mode that is named as a whole, CUDA uses the first slice.
    Indices count by PCI bus, as NVML does, and as CUDA does on machines with equal GPUs or with
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """
    boards = [
        board for index in range(nvml.nvmlDeviceGetCount()) if (board := _board(nvml, index)) is not None
    ]
    pairs: list[tuple[Any, Any]] = []
    if selection is None:
        pairs = [(board, _first_slice(nvml, board)) for board in boards]
    else:
        uuids = [nvml.nvmlDeviceGetUUID(board) for board in boards]
        for entry in filter(None, (entry.strip() for entry in selection.split(","))):
            if entry.startswith("MIG-"):
                matches = _slice_by_uuid(nvml, entry)
            else:
                chosen = (
                    boards[int(entry) : int(entry) + 1]
                    if entry.isdigit()
                    else [board for board, uuid in zip(boards, uuids, strict=True) if uuid.startswith(entry)]
                )
                matches = [(board, _first_slice(nvml, board)) for board in chosen]
            if len(matches) != 1:
                break
            pairs += matches
    return [
        VisibleGpu(index, nvml.nvmlDeviceGetUUID(part or board), nvml.nvmlDeviceGetName(board), board, part)
        for index, (board, part) in enumerate(pairs)
    ]


def _board(nvml: Any, index: int) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:  # lost before the run started; CUDA does not count it either
        log.debug("GPU %d of the node is skipped: %s", index, error)
        return None


def _first_slice(nvml: Any, board: Any) -> Any:
    try:
        if nvml.nvmlDeviceGetMigMode(board)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(board)
    except nvml.NVMLError:  # a GPU without MIG
        return None
    for slot in range(slots):
        with suppress(nvml.NVMLError):  # an empty slot
            return nvml.nvmlDeviceGetMigDeviceHandleByIndex(board, slot)
    return None


def _slice_by_uuid(nvml: Any, uuid: str) -> list[tuple[Any, Any]]:
    try:
        part = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return [(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part), part)]
    except nvml.NVMLError:
        return []


# ---- all of a node


class NodeGpus:
    """The run's GPUs of one node. Use it from one thread, because any call may take long."""

    def __init__(
        self, nvml: Any, gpus: Sequence[VisibleGpu], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.gpus = tuple(gpus)
        self._nvml, self._clock = nvml, clock

    def read(self) -> SystemMetrics:
        """Return ``gpu/0/power_watts`` and so on for each GPU, and the summary over all. A lost GPU has only
        ``gpu/0/lost``.
        """
        figures: SystemMetrics = {"gpu/count": len(self.gpus)}
        for gpu in self.gpus:
            figures |= {f"gpu/{gpu.index}/{name}": value for name, value in self._read(gpu).items()}
        return {**figures, **summarize(figures)}

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):  # the driver may be gone
            for gpu in self.gpus:
                for sample in gpu.samples:
                    self._nvml.nvmlGpmSampleFree(sample)
            self._nvml.nvmlShutdown()

    def _read(self, gpu: VisibleGpu) -> SystemMetrics:
        nvml, now = self._nvml, self._clock()
        figures: SystemMetrics = {"name": gpu.name, "uuid": gpu.uuid}
        for measure in MEASUREMENTS:
            if gpu.lost:
                return {"lost": 1}
            if measure.__name__ in gpu.unsupported:
                continue
            try:
                figures |= measure(nvml, gpu, now)
            except nvml.NVMLError as error:
                gpu.lost = error.value == nvml.NVML_ERROR_GPU_IS_LOST
                if error.value in (
                    nvml.NVML_ERROR_NOT_SUPPORTED,
                    nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                    nvml.NVML_ERROR_NO_PERMISSION,
                    nvml.NVML_ERROR_INVALID_ARGUMENT,
                    nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
                ):
                    gpu.unsupported.add(measure.__name__)
                log.debug("GPU %d has no %s: %s", gpu.index, measure.__name__.strip("_"), error)
            except Exception as error:  # noqa: BLE001  a driver that answers otherwise than thought costs one figure, not all
                gpu.unsupported.add(measure.__name__)
                log.warning(
                    "GPU %d: no %s: %s: %s",
                    gpu.index,
                    measure.__name__.strip("_"),
                    type(error).__name__,
                    error,
                )
        return {"lost": 1} if gpu.lost else figures


def open_gpus(nvml: Any, count: int, selection: str | None) -> NodeGpus | None:
    """Open the first ``count`` GPUs of :func:`find_gpus`, one per rank of the node. None if there is no
    driver or GPU.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.debug("NVML does not start: %s", error)
        return None
    gpus = find_gpus(nvml, selection)[:count]
    if not gpus:
        nvml.nvmlShutdown()
        return None
    return NodeGpus(nvml, gpus)


# Metrics of a node: the metric, the name of the aggregation, and its function.
SUMMARY: tuple[tuple[str, str, Callable[[list[float]], float]], ...] = (
    ("utilization_percent", "mean", statistics.fmean),
    ("tensor_active_percent", "mean", statistics.fmean),
    ("sm_clock_ratio", "min", min),
    ("temperature_celsius", "max", max),
    ("power_watts", "sum", sum),
    ("memory_used_bytes", "max", max),
    ("throttled", "sum", sum),
)


def summarize(figures: SystemMetrics) -> SystemMetrics:
    """Aggregate over GPUs to ``gpu/utilization_percent_mean``, ``gpu/sm_clock_ratio_min`` and so on, one
    curve per node.
    """
    summary: SystemMetrics = {}
    for name, how, make in SUMMARY:
        values = [
            float(value)
            for key, value in figures.items()
            if key.startswith("gpu/") and key.endswith(f"/{name}")
        ]
        if values:
            summary[f"gpu/{name}_{how}"] = round(make(values), 3)
    return summary


# ---- events


class XidEvents:
    """XID events of the GPUs. ``wait`` blocks, so it needs a thread of its own."""

    def __init__(self, nvml: Any, gpus: Sequence[VisibleGpu]) -> None:
        self._nvml, self._cards = nvml, tuple(gpus)
        nvml.nvmlInit()  # NVML counts initializations: this one ends with its own nvmlShutdown
        self._events = nvml.nvmlEventSetCreate()
        self.watched = 0
        for gpu in self._cards:
            try:
                nvml.nvmlDeviceRegisterEvents(gpu.board, nvml.nvmlEventTypeXidCriticalError, self._events)
                self.watched += 1
            except nvml.NVMLError as error:
                log.debug("GPU %d has no events: %s", gpu.index, error)

    def wait(self, milliseconds: int) -> tuple[VisibleGpu | None, int] | None:
        """Wait for the next event; return its GPU (None if the run does not use it) and XID, or None after
        the timeout.

        Raises:
            NVMLError: an error other than a timeout.
        """
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, milliseconds)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        return self._card(event.device), int(event.eventData)

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlEventSetFree(self._events)
            self._nvml.nvmlShutdown()

    def _card(self, device: Any) -> VisibleGpu | None:
        # Compare addresses: a GPU that fell off the bus no longer returns its UUID.
        address = ctypes.cast(device, ctypes.c_void_p).value
        return next((gpu for gpu in self._cards if gpu.address == address), None)
