"""The machine and the versions that a result belongs to."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from toolkit.cluster.machine_info import detect_machine

PACKAGES = ("torch", "deepspeed", "megatron-core", "transformer-engine", "transformers")


def describe_machine() -> dict[str, Any]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpus": [gpu.product for gpu in detect_machine().gpus],
        "python": platform.python_version(),
    }


def package_versions() -> dict[str, str | None]:
    """Return versions; None for a package that is not installed, such as Transformer Engine."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
