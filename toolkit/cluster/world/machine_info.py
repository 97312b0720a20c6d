"""Detect this machine's hardware without torch, whose import takes seconds and would initialize the
device.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.config.vendors.installed import TRANSFORMER_ENGINE


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
    lacking_for_compile: tuple[str, ...] = ()
    torch_has_cuda: bool = True
    torch_cuda: str | None = None  # the version of CUDA that torch was built with
    nvcc: str | None = None  # the version of CUDA of the compiler that torch uses; None: there is none
    transformer_engine: str | None = None  # the installed version

    @property
    def has_nvcc(self) -> bool:
        """Whether there is a compiler for torch's CUDA. Within a major version they are compatible."""
        return self.nvcc is not None and (
            self.torch_cuda is None or self.nvcc.partition(".")[0] == self.torch_cuda.partition(".")[0]
        )


def detect_machine(environ: Mapping[str, str] = os.environ) -> MachineInfo:
    has_compiler = shutil.which(environ.get("CXX", "c++")) is not None or shutil.which("g++") is not None
    gpus = select_visible_gpus(_gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    cuda = torch_cuda()
    return MachineInfo(
        cores=_cores(),
        gpus=gpus,
        host_memory_bytes=_host_memory_bytes(),
        has_libaio=_has_header("libaio.h", environ),
        has_compiler=has_compiler,
        lacking_for_compile=tuple(_lacking_for_compile(has_compiler)),
        torch_has_cuda=cuda is not None,
        torch_cuda=cuda,
        nvcc=nvcc_version(environ) if gpus and cuda is not None else None,
        transformer_engine=TRANSFORMER_ENGINE.installed_version or None,
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
            matches = list(gpus[int(entry) : int(entry) + 1])
        elif entry.startswith("MIG-"):  # a GPU partition with its own memory and speed
            matches = [GpuInfo("MIG", None, entry)]
        else:
            matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        if len(matches) != 1:
            break
        chosen += matches
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


def _lacking_for_compile(has_compiler: bool) -> Iterator[str]:
    """Return what torch.compile lacks: Inductor compiles C++, and Triton its launchers, against Python's
    headers.
    """
    if not has_compiler:
        yield "a C++ compiler"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        yield "Python.h"
    if importlib.util.find_spec("triton") is None:
        yield "triton"


def torch_cuda() -> str | None:
    """Read the version of CUDA that torch was built with from ``torch/version.py``; None: without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.MULTILINE)
    return match[1] if match else None


def nvcc_version(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the version of CUDA ("12.8") of the compiler that torch uses for extensions; None: no compiler.

    The folder is searched as in ``torch/utils/cpp_extension.py``.
    """
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=environ.get("PATH"))
    if home is None and found is not None:
        home = str(Path(found).parents[1])
    nvcc = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+\.\d+)", text)
    return match[1] if match else None
