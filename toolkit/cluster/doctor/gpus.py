"""The driver and the GPUs that this process may use, by NVIDIA's management library (NVML API reference,
https://docs.nvidia.com/deploy/nvml-api/). AMD's GPUs are not looked at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.cluster.doctor.software import torch_cuda
from toolkit.cluster.doctor.types import DoctorCheck, CheckFinding, RunRequirements, fail, format_size, ok, unknown, warn
from toolkit.cluster.machine_info import GpuInfo, select_visible_gpus
from toolkit.plan.types import Device

# Reasons for low clocks that mean that something is wrong; NVML's names: nvmlClocksThrottleReason...
HARMFUL_THROTTLING = {
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "heat (driver)",
    "HwThermalSlowdown": "heat (hardware)",
    "HwPowerBrakeSlowdown": "power brake",
}
IDLE_BYTES = 1 << 30  # on a GPU before a run: contexts and idle servers take less


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU. None: it does not say."""

    index: int
    name: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    persistent: bool | None = None
    ecc: bool | None = None
    uncorrected: int | None = None  # memory errors since the driver was loaded
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    slowed: tuple[str, ...] = ()  # harmful reasons why its clocks are low just now


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverInfo:
    """
    Attributes:
        version: None: NVML says that there is no driver.
        cuda: the newest CUDA that the driver knows: (12, 8).
        built: what torch was built with: (12, 8); None: without CUDA.
    """

    version: str | None
    cuda: tuple[int, int] | None = None
    built: tuple[int, int] | None = None


def measure_driver(need: RunRequirements, nvml: Any = None) -> DriverInfo:
    nvml = nvml or load_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return DriverInfo(version=None)
    number = nvml.nvmlSystemGetCudaDriverVersion_v2()  # 12080 of 12.8
    built = torch_cuda()
    major, minor = (*(built or "0.0").split("."), "0")[:2]
    return DriverInfo(
        version=_text(nvml.nvmlSystemGetDriverVersion()),
        cuda=(number // 1000, number % 1000 // 10),
        built=(int(major), int(minor)) if built else None,
    )


def judge_driver(driver: DriverInfo, need: RunRequirements) -> Iterator[CheckFinding]:
    if driver.version is None or driver.cuda is None:
        if need.device is Device.CPU:
            yield ok("none, and the run is planned for CPU ranks")
        else:
            yield fail(
                "NVML finds no driver",
                "install NVIDIA's driver, or start the container with --gpus all; cluster.gpus_per_node=0 "
                "trains on the CPU",
            )
        return
    seen = f"{driver.version}, up to CUDA {_format_version(driver.cuda)}"
    if driver.built is None or need.device is Device.CPU:
        yield ok(seen)
    elif driver.built[0] > driver.cuda[0]:
        yield fail(
            f"{seen}; torch was built with CUDA {_format_version(driver.built)}",
            f"install a driver for CUDA {driver.built[0]}, or a torch built with CUDA {driver.cuda[0]}",
        )
    elif driver.built > driver.cuda:
        # CUDA's compatibility guide: minor versions of one major version run on its older drivers, with less of what is compiled late.
        yield warn(
            f"{seen}; torch was built with CUDA {_format_version(driver.built)}",
            "install a newer driver: what is compiled on the machine "
            "(torch.compile, JIT kernels) may not load",
        )
    else:
        yield ok(f"{seen}; torch was built with CUDA {_format_version(driver.built)}")


def measure_gpus(need: RunRequirements, nvml: Any = None, selection: str | None = None) -> list[GpuState]:
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
    # A slice of a GPU (MIG) has no entry of its own: it is counted, and nothing more is said of it.
    return [own.get(gpu.uuid) or GpuState(index=index, name=gpu.product) for index, gpu in enumerate(chosen)]


def _read_gpu(nvml: Any, handle: Any, index: int, name: str) -> GpuState:
    def said(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except nvml.NVMLError:  # not of this GPU, driver or user
            return None

    memory = said(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    ecc = said(lambda: nvml.nvmlDeviceGetEccMode(handle)[0])
    persistent = said(lambda: nvml.nvmlDeviceGetPersistenceMode(handle))
    remapped = said(lambda: nvml.nvmlDeviceGetRemappedRows(handle))  # corrected, uncorrected, pending, failed
    bits = said(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    return GpuState(
        index=index,
        name=name,
        total_bytes=memory and memory.total,
        used_bytes=memory and memory.used,
        persistent=None if persistent is None else bool(persistent),
        ecc=None if ecc is None else bool(ecc),
        uncorrected=said(
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


def judge_gpus(cards: Sequence[GpuState], need: RunRequirements) -> Iterator[CheckFinding]:
    kinds = sorted({card.name for card in cards})
    seen = f"{len(cards)} x {' and '.join(kinds)}" if cards else "none"
    if need.device is Device.CPU:
        yield ok(f"{seen}; the run is planned for CPU ranks")
        return
    if len(cards) < need.ranks_per_node:
        yield fail(
            f"{seen} for {need.ranks_per_node} ranks",
            "look for one that was lost (nvidia-smi, dmesg) and at CUDA_VISIBLE_DEVICES, "
            "or start fewer ranks",
        )
    used = cards[: need.ranks_per_node]
    problems = [problem for card in used for problem in _find_gpu_problems(card, need)]
    if len({card.name for card in used}) > 1:
        problems.append(
            warn(
                f"{seen}: in each step the slowest one is waited for",
                "choose GPUs of one kind: CUDA_VISIBLE_DEVICES",
            )
        )
    yield from problems
    quiet = [
        name
        for name in ("ecc", "persistent", "uncorrected")
        if used and all(getattr(card, name) is None for card in used)
    ]
    if quiet:
        yield unknown(f"the driver says nothing of {', '.join(quiet)}")
    if not problems and len(cards) >= need.ranks_per_node:
        ecc = "ECC on" if all(card.ecc for card in used) else "ECC off or not there"
        yield ok(f"{seen}; {ecc}, no memory errors, no harmful throttling now")


def _find_gpu_problems(card: GpuState, need: RunRequirements) -> Iterator[CheckFinding]:
    name = f"GPU {card.index}"
    if card.uncorrected:
        yield fail(
            f"{name}: {card.uncorrected} uncorrected memory errors since the driver was loaded",
            f"leave it out (CUDA_VISIBLE_DEVICES, or drain the machine); nvidia-smi -r -i {card.index}; have it replaced if they "
            "return",
        )
    if card.remap_failed:
        yield fail(f"{name}: remapping a row of its memory failed", "leave it out, and have it replaced")
    if card.remap_pending:
        yield warn(
            f"{name}: the remapping of a row of its memory waits for a reset",
            f"nvidia-smi -r -i {card.index} while it is idle",
        )
    if card.slowed:
        yield warn(
            f"{name}: its clocks are lowered now by {', '.join(card.slowed)}",
            "look at its cooling and power; every rank waits for it",
        )
    if card.persistent is False:
        yield warn(
            f"{name}: persistence mode is off, so that each start waits for the driver to load",
            "nvidia-smi -pm 1, as root",
        )
    if card.used_bytes is not None and card.total_bytes is not None:
        free = card.total_bytes - card.used_bytes
        if need.device_bytes is not None and free < need.device_bytes:
            yield fail(
                f"{name}: {format_size(free)} free of {format_size(card.total_bytes)}; the run needs {format_size(need.device_bytes)}",
                "end the processes that nvidia-smi shows on it, or plan for fewer bytes a rank (launch/plan.py)",
            )
        elif card.used_bytes > IDLE_BYTES:
            yield warn(
                f"{name}: {format_size(card.used_bytes)} are in use already",
                "end the processes that nvidia-smi shows on it",
            )


def load_nvml() -> Any:
    import pynvml

    return pynvml


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _format_version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


DRIVER_HANGS_REMEDY = (
    "the GPU driver hangs: look at dmesg for Xid; the machine has to be restarted, so leave it out of the run"
)
CHECKS = (
    DoctorCheck(
        name="driver",
        how="NVML, against the CUDA of torch/version.py",
        measure=measure_driver,
        judge=judge_driver,
        stuck=DRIVER_HANGS_REMEDY,
        traits=lambda driver: {"driver": str(driver.version)},
    ),
    DoctorCheck(
        name="GPUs",
        how="NVML: number, kind, memory in use, ECC, row remapping, persistence mode, throttling at this moment",
        measure=measure_gpus,
        judge=judge_gpus,
        stuck=DRIVER_HANGS_REMEDY,
        traits=lambda cards: {"GPUs": ", ".join(sorted({card.name for card in cards})) or "none"},
    ),
)
