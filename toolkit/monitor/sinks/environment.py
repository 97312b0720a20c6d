"""What a run ran with, beside its configuration: the code's git state and the installed packages.

No environment variable is looked at, and no difference of a working tree is kept: both may hold secrets.
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
DRIVER = Path("/sys/module/nvidia/version")  # of the loaded kernel module
GIT_SECONDS = 5.0


def collect_environment(launcher: str | None) -> dict[str, Any]:
    """Versions, and where they ran.

    Args:
        launcher: who started the ranks, if that is known.

    Returns:
        ``packages`` that are not installed are None. ``cuda`` is what torch was built for, ``driver`` what the machine has loaded; None
        where there is none.
    """
    torch = sys.modules.get("torch")  # who trains has imported it; nobody else waits for it here
    return {
        "toolkit": toolkit.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "launcher": launcher,
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda if torch is not None else None,
        "driver": DRIVER.read_text(encoding="utf-8").strip() if DRIVER.exists() else None,
    }


def read_git_state(folder: Path = PROJECT, seconds: float = GIT_SECONDS) -> dict[str, Any] | None:
    """Commit and branch (None: not on one) of the working tree that ``folder`` is part of, and whether tracked files differ from it.

    None where git does not know the folder (it is installed, or there is no git), or does not answer in ``seconds``. The form of git's
    answer: https://git-scm.com/docs/git-status#_porcelain_format_version_2.
    """
    if not _git(
        folder, seconds, "ls-files", "."
    ):  # the folder of an environment may lie in somebody's working tree
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
