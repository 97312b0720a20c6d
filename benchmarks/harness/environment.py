"""The machine and the versions that a result belongs to."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit.cluster.world.machine_info import detect_machine

PACKAGES = ("torch", "deepspeed", "megatron-core", "transformer-engine", "transformers")
CPU_INFO = Path("/proc/cpuinfo")  # of Linux


def describe_machine() -> dict[str, Any]:
    """Return what decides the speed of this machine; ``load`` is that of the last minute."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, platform.processor() or platform.machine()),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [gpu.product for gpu in detect_machine().gpus],
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def package_versions(*names: str) -> dict[str, str | None]:
    """Return versions, of ``PACKAGES`` without names; None for a package that is not installed."""
    versions: dict[str, str | None] = {}
    for name in names or PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
