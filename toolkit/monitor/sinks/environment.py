"""Collect the environment of a run: the git state of the code and the versions of packages.

Environment variables and diffs of the working tree are not recorded, because they may contain secrets.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import toolkit

PACKAGES = (
    "torch",
    "deepspeed",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "flash-attn",
    "numpy",
    "wandb",
)
PROJECT = Path(toolkit.__file__).resolve().parent
DRIVER_VERSION_FILE = Path("/sys/module/nvidia/version")  # of the loaded kernel module
GIT_TIMEOUT_SECONDS = 5.0


def collect_environment(launcher: str | None) -> dict[str, Any]:
    """Return versions and the host.

    Args:
        launcher: the program that started the ranks, if known.

    Returns:
        ``packages``: versions, None if not installed. ``cuda``: the version that torch was built for,
            ``driver``: the loaded one; None if there is none.
    """
    # imported already in a process that trains; importing it here would take seconds
    torch = sys.modules.get("torch")
    return {
        "toolkit": toolkit.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "launcher": launcher,
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda if torch is not None else None,
        "driver": DRIVER_VERSION_FILE.read_text(encoding="utf-8").strip()
        if DRIVER_VERSION_FILE.exists()
        else None,
    }


def read_git_state(folder: Path = PROJECT, seconds: float = GIT_TIMEOUT_SECONDS) -> dict[str, Any] | None:
    """Return commit, branch (None if detached) and whether tracked files of the working tree of ``folder``
    changed.

    Returns None if git does not track the folder, is not installed, or does not answer in ``seconds``. Output
    format: https://git-scm.com/docs/git-status#_porcelain_format_version_2.
    """
    # an installed package's folder may lie inside an unrelated working tree
    if not _git(folder, seconds, "ls-files", "."):
        return None
    answer = _git(folder, seconds, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if answer is None:
        return None
    lines = answer.splitlines()
    found = dict(
        line.removeprefix("# branch.").split(" ", 1) for line in lines if line.startswith("# branch.")
    )
    branch = found.get("head")
    return {
        "commit": found.get("oid"),
        "branch": None if branch == "(detached)" else branch,
        "dirty": any(not line.startswith("#") for line in lines),
    }


def _git(folder: Path, seconds: float, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
