"""Check the driver and the visible GPUs through NVML (NVML API reference,
https://docs.nvidia.com/deploy/nvml-api/).

AMD GPUs are not checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.cluster.doctor.types import (
    CheckFinding,
    DoctorCheck,
    RunRequirements,
    fail,
    format_size,
    ok,
    unknown,
    warn,
)
from toolkit.cluster.world.machine_info import GpuInfo, select_visible_gpus, torch_cuda
from toolkit.commands import command_line
from toolkit.plan.types import Device

# Throttle reasons that indicate a fault, named as in NVML: nvmlClocksThrottleReason...
HARMFUL_THROTTLING = {
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "heat (driver)",
    "HwThermalSlowdown": "heat (hardware)",
    "HwPowerBrakeSlowdown": "power brake",
}
IDLE_BYTES = 1 << 30  # memory in use before the run; contexts and idle servers take less


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """State of one GPU. None: not reported by the driver."""

    index: int
    name: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    persistent: bool | None = None
    ecc: bool | None = None
    uncorrected: int | None = None  # uncorrected memory errors since the driver was loaded
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    slowed: tuple[str, ...] = ()  # harmful throttle reasons that are active


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverInfo:
    """The installed driver.

    Attributes:
        version: None: no driver was found.
        cuda: the newest CUDA version that the driver supports: (12, 8).
        built: the CUDA version that torch was built with: (12, 8); None: without CUDA.
    """

    version: str | None
    cuda: tuple[int, int] | None = None
    built: tuple[int, int] | None = None


def measure_driver(requirements: RunRequirements, nvml: Any = None) -> DriverInfo:
    nvml = nvml or load_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return DriverInfo(version=None)
    number = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 12080 for 12.8
    built = torch_cuda()
    major, minor = (*(built or "0.0").split("."), "0")[:2]
    return DriverInfo(
        version=_text(nvml.nvmlSystemGetDriverVersion()),
        cuda=(number // 1000, number % 1000 // 10),
        built=(int(major), int(minor)) if built else None,
    )


def assess_driver(driver: DriverInfo, requirements: RunRequirements) -> Iterator[CheckFinding]:
    if driver.version is None or driver.cuda is None:
        if requirements.device is Device.CPU:
            yield ok("none, and the run is planned for CPU ranks")
        else:
            yield fail(
                "NVML finds no driver",
                "install NVIDIA's driver, or start the container with --gpus all; cluster.gpus_per_node=0 "
                "trains on the CPU",
            )
        return
    seen = f"{driver.version}, up to CUDA {_format_version(driver.cuda)}"
    if driver.built is None or requirements.device is Device.CPU:
        yield ok(seen)
    elif driver.built[0] > driver.cuda[0]:
        yield fail(
            f"{seen}; torch was built with CUDA {_format_version(driver.built)}",
            f"install a driver for CUDA {driver.built[0]}, or a torch built with CUDA {driver.cuda[0]}",
        )
    elif driver.built > driver.cuda:
        # CUDA's compatibility guide: drivers support later minor versions of their major version, except for
        # code compiled at run time.
        yield warn(
            f"{seen}; torch was built with CUDA {_format_version(driver.built)}",
            "install a newer driver: code that is compiled on the machine (torch.compile, JIT kernels) "
            "may not load",
        )
    else:
        yield ok(f"{seen}; torch was built with CUDA {_format_version(driver.built)}")


def measure_gpus(
    requirements: RunRequirements, nvml: Any = None, selection: str | None = None
) -> list[GpuState]:
    nvml = nvml or load_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    cards: list[tuple[GpuInfo, GpuState]] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = _text(nvml.nvmlDeviceGetName(handle))
        cards.append(
            (GpuInfo(name, None, _text(nvml.nvmlDeviceGetUUID(handle))), _read_gpu(nvml, handle, index, name))
        )
    chosen = select_visible_gpus(
        [gpu for gpu, _ in cards],
        selection if selection is not None else os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    own = {gpu.uuid: card for gpu, card in cards}
    # A GPU partition (MIG) has no entry of its own, so it is only counted.
    return [own.get(gpu.uuid) or GpuState(index=index, name=gpu.product) for index, gpu in enumerate(chosen)]


def _read_gpu(nvml: Any, handle: Any, index: int, name: str) -> GpuState:
    def query(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except nvml.NVMLError:  # not supported by this GPU or driver, or not permitted
            return None

    memory = query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    ecc = query(lambda: nvml.nvmlDeviceGetEccMode(handle)[0])
    persistent = query(lambda: nvml.nvmlDeviceGetPersistenceMode(handle))
    # corrected, uncorrected, pending, failed
    remapped = query(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    bits = query(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    return GpuState(
        index=index,
        name=name,
        total_bytes=memory and memory.total,
        used_bytes=memory and memory.used,
        persistent=None if persistent is None else bool(persistent),
        ecc=None if ecc is None else bool(ecc),
        uncorrected=query(
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        ),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        slowed=tuple(
            words
            for name, words in HARMFUL_THROTTLING.items()
            if bits & getattr(nvml, f"nvmlClocksThrottleReason{name}")
        ),
    )


def assess_gpus(cards: Sequence[GpuState], requirements: RunRequirements) -> Iterator[CheckFinding]:
    kinds = sorted({card.name for card in cards})
    seen = f"{len(cards)} x {' and '.join(kinds)}" if cards else "none"
    if requirements.device is Device.CPU:
        yield ok(f"{seen}; the run is planned for CPU ranks")
        return
    if len(cards) < requirements.ranks_per_node:
        yield fail(
            f"{seen} for {requirements.ranks_per_node} ranks",
            "check for lost GPUs (nvidia-smi, dmesg) and CUDA_VISIBLE_DEVICES, or start fewer ranks",
        )
    used = cards[: requirements.ranks_per_node]
    problems = [problem for card in used for problem in _find_gpu_problems(card, requirements)]
    if len({card.name for card in used}) > 1:
        problems.append(
            warn(
                f"{seen}: every step waits for the slowest GPU",
                "select GPUs of one model: CUDA_VISIBLE_DEVICES",
            )
        )
    yield from problems
    quiet = [
        name
        for name in ("ecc", "persistent", "uncorrected")
        if used and all(getattr(card, name) is None for card in used)
    ]
    if quiet:
        yield unknown(f"the driver does not report {', '.join(quiet)}")
    if not problems and len(cards) >= requirements.ranks_per_node:
        ecc = "ECC on" if all(card.ecc for card in used) else "ECC off or not available"
        yield ok(f"{seen}; {ecc}, no memory errors, no harmful throttling")


def _find_gpu_problems(card: GpuState, requirements: RunRequirements) -> Iterator[CheckFinding]:
    name = f"GPU {card.index}"
    if card.uncorrected:
        yield fail(
            f"{name}: {card.uncorrected} uncorrected memory errors since the driver was loaded",
            f"leave it out (CUDA_VISIBLE_DEVICES, or drain the machine); nvidia-smi -r -i {card.index}; "
            "replace it if the errors return",
        )
    if card.remap_failed:
        yield fail(f"{name}: remapping a memory row failed", "leave it out, and have it replaced")
    if card.remap_pending:
        yield warn(
            f"{name}: a memory row will be remapped at the next reset",
            f"nvidia-smi -r -i {card.index} while it is idle",
        )
    if card.slowed:
        yield warn(
            f"{name}: clocks are reduced by {', '.join(card.slowed)}",
            "check its cooling and power; every rank waits for it",
        )
    if card.persistent is False:
        yield warn(
            f"{name}: persistence mode is off, so every start waits for the driver to load",
            "nvidia-smi -pm 1, as root",
        )
    if card.used_bytes is not None and card.total_bytes is not None:
        free = card.total_bytes - card.used_bytes
        if requirements.device_bytes is not None and free < requirements.device_bytes:
            yield fail(
                f"{name}: {format_size(free)} free of {format_size(card.total_bytes)}; the run needs "
                f"{format_size(requirements.device_bytes)}",
                "end the processes that nvidia-smi shows, or plan for less memory per rank "
                f"({command_line('plan')})",
            )
        elif card.used_bytes > IDLE_BYTES:
            yield warn(
                f"{name}: {format_size(card.used_bytes)} are already in use",
                "end the processes that nvidia-smi shows",
            )


def load_nvml() -> Any:
    import pynvml

    return pynvml


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _format_version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


DRIVER_HANGS_REMEDY = (
    "the GPU driver hangs: check dmesg for Xid errors; restart the machine and leave it out of the run"
)
CHECKS = (
    DoctorCheck(
        name="driver",
        how="NVML, compared with the CUDA version of torch/version.py",
        measure=measure_driver,
        assess=assess_driver,
        hang_remedy=DRIVER_HANGS_REMEDY,
        traits=lambda driver: {"driver": str(driver.version)},
    ),
    DoctorCheck(
        name="GPUs",
        how="NVML: count, model, memory in use, ECC, row remapping, persistence mode, current throttling",
        measure=measure_gpus,
        assess=assess_gpus,
        hang_remedy=DRIVER_HANGS_REMEDY,
        traits=lambda cards: {"GPUs": ", ".join(sorted({card.name for card in cards})) or "none"},
    ),
)
