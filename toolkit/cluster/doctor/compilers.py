"""Check what DeepSpeed and Megatron-core need beyond Python packages: compilers and Transformer Engine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.cluster.doctor.types import CheckFinding, DoctorCheck, RunRequirements, ok, warn
from toolkit.cluster.world.machine_info import detect_machine
from toolkit.cluster.world.process_environment import add_ninja_to_path
from toolkit.config.schema import EngineName
from toolkit.plan.transformer_engine import COST, TESTED, fits_megatron, install_command
from toolkit.plan.types import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildTools:
    """The tools that compile kernels on first use. Versions are of CUDA; None: none.

    Attributes:
        lacking: what is absent of a C++ compiler, Python's headers and Triton.
        matches: nvcc is of the major version of CUDA that torch was built with.
    """

    lacking: tuple[str, ...] = ()
    ninja: bool = True
    libaio: bool = True
    nvcc: str | None = None
    torch_cuda: str | None = None
    matches: bool = True


def measure_build_tools(requirements: RunRequirements) -> BuildTools:
    machine, environ = detect_machine(), dict(os.environ)
    add_ninja_to_path(environ)
    return BuildTools(
        lacking=tuple(name for name in machine.lacking_for_compile if name != "triton"),
        ninja=shutil.which("ninja", path=environ.get("PATH")) is not None,
        libaio=machine.has_libaio,
        nvcc=machine.nvcc,
        torch_cuda=machine.torch_cuda,
        matches=machine.has_nvcc,
    )


def assess_build_tools(tools: BuildTools, requirements: RunRequirements) -> Iterator[CheckFinding]:
    """Return warnings only: if a run needs one of the tools, the plan refuses the run."""
    if tools.lacking or not tools.ninja:
        absent = ", ".join([*tools.lacking, *([] if tools.ninja else ["ninja"])])
        yield warn(
            f"{absent}: absent. torch.compile and kernels that DeepSpeed compiles (CPU Adam, NVMe) are not "
            "available",
            "apt-get install g++ python3-dev; pip install ninja",
        )
    if requirements.engine is not EngineName.deepspeed:
        if not tools.lacking:
            yield ok("a C++ compiler and Python's headers, which torch.compile needs")
        return
    if requirements.device is Device.CUDA and not tools.matches:
        has = "no nvcc" if tools.nvcc is None else f"nvcc of CUDA {tools.nvcc}"
        yield warn(
            f"{has}, and torch was built with CUDA {tools.torch_cuda}: offload to NVMe and ZeRO++ "
            "quantisation are not available",
            f"install the CUDA toolkit {tools.torch_cuda} and set CUDA_HOME, if the run shall use them",
        )
    elif not tools.lacking and tools.ninja:
        nvcc = f", nvcc of CUDA {tools.nvcc}" if tools.nvcc else ""
        libaio = "libaio" if tools.libaio else "no libaio, which offload to NVMe needs"
        yield ok(f"a C++ compiler, Python's headers, ninja{nvcc}; {libaio}")


def measure_transformer_engine(requirements: RunRequirements) -> tuple[str | None, str | None]:
    """Return the versions of Transformer Engine and of torch's CUDA."""
    machine = detect_machine()
    return machine.transformer_engine, machine.torch_cuda


def assess_transformer_engine(
    versions: tuple[str | None, str | None], requirements: RunRequirements
) -> Iterator[CheckFinding]:
    version, torch_cuda = versions
    installed = f"Transformer Engine {version}" if version else "Transformer Engine is not installed"
    if requirements.engine is not EngineName.megatron or requirements.device is not Device.CUDA:
        yield ok(f"{installed}; not used by this run")
    elif version is not None and fits_megatron(version):
        yield ok(f"{installed}, in Megatron-core's range {TESTED}")
    else:
        yield warn(f"{installed}; Megatron-core 0.16 takes {TESTED}, and {COST}", install_command(torch_cuda))


CHECKS = (
    DoctorCheck(
        name="build tools",
        how="search for a C++ compiler, Python.h, ninja and libaio.h; nvcc --version in CUDA_HOME",
        measure=measure_build_tools,
        assess=assess_build_tools,
        traits=lambda tools: {"nvcc": str(tools.nvcc)},
    ),
    DoctorCheck(
        name="Transformer Engine",
        how="metadata of the installed package, compared with the range of Megatron-core; it is not imported",
        measure=measure_transformer_engine,
        assess=assess_transformer_engine,
        traits=lambda versions: {"Transformer Engine": str(versions[0])},
    ),
)
