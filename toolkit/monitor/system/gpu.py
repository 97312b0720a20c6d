"""The GPUs of one node that the run uses, by NVIDIA's management library (NVML). AMD's GPUs are not sampled.

What a GPU or its driver lacks is left out of the figures, and told once, at debug level. Beside ``cluster/`` this is the only place that
imports NVML's module (pynvml of nvidia-ml-py); everything else takes it as an argument, so tests bring one of their own.
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
    """The GPUs that CUDA shows to a process with ``CUDA_VISIBLE_DEVICES=selection``, in its order; None: all of them.

    As the CUDA driver reads it: indices or (beginnings of) UUIDs of GPUs and MIG devices, up to the first unknown one. Of a GPU in MIG
    mode that is named as a whole CUDA uses the first slice. Indices count by PCI bus, as NVML does, and as CUDA does on machines whose
    GPUs are alike or with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
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
                found = _slice_by_uuid(nvml, entry)
            else:
                chosen = (
                    boards[int(entry) : int(entry) + 1]
                    if entry.isdigit()
                    else [board for board, uuid in zip(boards, uuids, strict=True) if uuid.startswith(entry)]
                )
                found = [(board, _first_slice(nvml, board)) for board in chosen]
            if len(found) != 1:
                break
            pairs += found
    return [
        VisibleGpu(place, nvml.nvmlDeviceGetUUID(part or board), nvml.nvmlDeviceGetName(board), board, part)
        for place, (board, part) in enumerate(pairs)
    ]


def _board(nvml: Any, index: int) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:  # lost before the run began: CUDA does not count it either
        log.debug("GPU %d of the node is left out: %s", index, error)
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
    """The run's GPUs of one node. Belongs to one thread, since any call may take long."""

    def __init__(
        self, nvml: Any, cards: Sequence[VisibleGpu], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cards = tuple(cards)
        self._nvml, self._clock = nvml, clock

    def read(self) -> SystemMetrics:
        """``gpu/0/power_watts`` and so on for each, and what :func:`summary` makes of all. A GPU that is lost has ``gpu/0/lost`` only."""
        figures: SystemMetrics = {"gpu/count": len(self.cards)}
        for card in self.cards:
            figures |= {f"gpu/{card.place}/{name}": value for name, value in self._read(card).items()}
        return {**figures, **summarize(figures)}

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):  # a driver that is gone has nothing to give back
            for card in self.cards:
                for sample in card.samples:
                    self._nvml.nvmlGpmSampleFree(sample)
            self._nvml.nvmlShutdown()

    def _read(self, card: VisibleGpu) -> SystemMetrics:
        nvml, now = self._nvml, self._clock()
        figures: SystemMetrics = {"name": card.name, "uuid": card.uuid}
        for measure in MEASUREMENTS:
            if card.lost:
                return {"lost": 1}
            if measure.__name__ in card.lacking:
                continue
            try:
                figures |= measure(nvml, card, now)
            except nvml.NVMLError as error:
                card.lost = error.value == nvml.NVML_ERROR_GPU_IS_LOST
                if error.value in (
                    nvml.NVML_ERROR_NOT_SUPPORTED,
                    nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                    nvml.NVML_ERROR_NO_PERMISSION,
                    nvml.NVML_ERROR_INVALID_ARGUMENT,
                    nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
                ):
                    card.lacking.add(measure.__name__)
                log.debug("GPU %d has no %s: %s", card.place, measure.__name__.strip("_"), error)
            except Exception as error:  # noqa: BLE001  a driver that answers otherwise than thought costs one figure, not all
                card.lacking.add(measure.__name__)
                log.warning(
                    "GPU %d: no %s: %s: %s",
                    card.place,
                    measure.__name__.strip("_"),
                    type(error).__name__,
                    error,
                )
        return {"lost": 1} if card.lost else figures


def open_gpus(nvml: Any, count: int, selection: str | None) -> NodeGpus | None:
    """The first ``count`` GPUs of :func:`find_cards`, one for each rank of the node. None where there is no driver or no GPU."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.debug("NVML does not start: %s", error)
        return None
    cards = find_gpus(nvml, selection)[:count]
    if not cards:
        nvml.nvmlShutdown()
        return None
    return NodeGpus(nvml, cards)


# What stands for a node: name of the figure, how it is made of the GPUs' ones.
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
    """``gpu/utilization_percent_mean``, ``gpu/sm_clock_ratio_min`` ...: one curve a node, where a hundred nodes are looked at."""
    made: SystemMetrics = {}
    for name, how, make in SUMMARY:
        values = [
            float(value)
            for key, value in figures.items()
            if key.startswith("gpu/") and key.endswith(f"/{name}")
        ]
        if values:
            made[f"gpu/{name}_{how}"] = round(make(values), 3)
    return made


# ---- events


class XidEvents:
    """XID events of the GPUs, as the driver reports them. Belongs to a thread of its own, which may wait."""

    def __init__(self, nvml: Any, cards: Sequence[VisibleGpu]) -> None:
        self._nvml, self._cards = nvml, tuple(cards)
        nvml.nvmlInit()  # NVML counts: this thread's part ends with its own nvmlShutdown
        self._events = nvml.nvmlEventSetCreate()
        self.watched = 0
        for card in self._cards:
            try:
                nvml.nvmlDeviceRegisterEvents(card.board, nvml.nvmlEventTypeXidCriticalError, self._events)
                self.watched += 1
            except nvml.NVMLError as error:
                log.debug("GPU %d has no events: %s", card.place, error)

    def wait(self, milliseconds: int) -> tuple[VisibleGpu | None, int] | None:
        """The next event: the GPU (None: one that is not the run's) and the XID. None: there was none for so long.

        Raises:
            NVMLError: another one than a timeout.
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
        # By address: a GPU that fell off the bus does not tell its UUID any more.
        address = ctypes.cast(device, ctypes.c_void_p).value
        return next((card for card in self._cards if card.address == address), None)
