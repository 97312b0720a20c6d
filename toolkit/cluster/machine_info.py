"""Detect this machine's hardware without torch, whose import takes seconds and would initialize the
device.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GpuInfo:
    product: str  # product name from the driver: "NVIDIA H100 80GB HBM3"
    memory_bytes: int | None  # None: unknown
    uuid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineInfo:
    cores: int  # usable by this process
    gpus: tuple[GpuInfo, ...] = ()  # visible to this process
    host_memory_bytes: int | None = None
    has_libaio: bool = False
    has_compiler: bool = False
    torch_has_cuda: bool = True


def detect_machine(environ: Mapping[str, str] = os.environ) -> MachineInfo:
    return MachineInfo(
        cores=_cores(),
        gpus=select_visible_gpus(_gpus(), environ.get("CUDA_VISIBLE_DEVICES")),
        host_memory_bytes=_host_memory_bytes(),
        has_libaio=_has_header("libaio.h", environ),
        has_compiler=shutil.which(environ.get("CXX", "c++")) is not None or shutil.which("g++") is not None,
        torch_has_cuda=_torch_has_cuda(),
    )


def select_visible_gpus(gpus: Sequence[GpuInfo], selection: str | None) -> tuple[GpuInfo, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES=selection`` leaves visible.

    The selection lists indices or prefixes of UUIDs and ends at the first unknown entry, as in the CUDA
    driver. None selects all GPUs.
    """
    if selection is None:
        return tuple(gpus)
    chosen: list[GpuInfo] = []
    for entry in filter(None, (entry.strip() for entry in selection.split(","))):
        if entry.isdigit():
            found = list(gpus[int(entry) : int(entry) + 1])
        elif entry.startswith("MIG-"):  # a GPU partition with its own memory and speed
            found = [GpuInfo("MIG", None, entry)]
        else:
            found = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        if len(found) != 1:
            break
        chosen += found
    return tuple(chosen)


def _gpus() -> list[GpuInfo]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, so no GPU
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            GpuInfo(
                pynvml.nvmlDeviceGetName(handle),
                pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                pynvml.nvmlDeviceGetUUID(handle),
            )
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _host_memory_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # memory limit of the container
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        memory = min(memory, int(text))
    return memory


def _has_header(name: str, environ: Mapping[str, str]) -> bool:
    folders = [*environ.get("CPATH", "").split(os.pathsep), "/usr/include", "/usr/local/include"]
    if conda := environ.get("CONDA_PREFIX"):
        folders.append(f"{conda}/include")
    return any((Path(folder) / name).exists() for folder in folders if folder)


def _torch_has_cuda() -> bool:
    """Read whether torch has CUDA from ``torch/version.py``."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "torch is a dependency of this package"
    assert spec.submodule_search_locations
    version = Path(spec.submodule_search_locations[0]) / "version.py"
    return re.search(r"^cuda\b[^=]*= None", version.read_text(encoding="utf-8"), re.MULTILINE) is None
