"""Check package versions against the tested ranges, and command lines for secrets."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from toolkit.cluster.doctor.types import CheckFinding, DoctorCheck, RunRequirements, fail, ok, warn
from toolkit.cluster.world.machine_info import torch_cuda
from toolkit.config.schema import EngineName
from toolkit.plan.types import Device

PROJECT = "deepspeed-megatron-toolkit"
ENGINES = {
    "deepspeed": EngineName.deepspeed,
    "megatron-core": EngineName.megatron,
}  # each engine is needed only by its own runs
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
# must be equal on all machines, since ranks exchange their data
UNIFORM_PACKAGES = ("torch", "deepspeed", "megatron-core")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledVersions:
    """Installed versions and the project's requirements.

    Attributes:
        python_range, requirements: from the metadata of the installed project, i.e. pyproject.toml.
        installed: version by package; None: not installed.
        cuda: the CUDA version that torch was built with; None: without CUDA.
        nccl: version of NVIDIA's package; None: torch bundles its own, or there is none.
    """

    python: str
    python_range: str
    requirements: tuple[str, ...]
    installed: Mapping[str, str | None] = field(default_factory=dict)
    cuda: str | None = None
    nccl: str | None = None


def measure_versions(requirements: RunRequirements) -> InstalledVersions:
    own = metadata.metadata(PROJECT)
    for_development = ('extra == "dev"', 'extra == "docs"')
    dependencies = tuple(
        text
        for text in metadata.requires(PROJECT) or ()
        if not any(marker in text for marker in for_development)
    )
    names = [Requirement(text).name for text in dependencies]
    return InstalledVersions(
        python=platform.python_version(),
        python_range=own["Requires-Python"] or "",
        requirements=dependencies,
        installed={name: _installed(name) for name in names},
        cuda=torch_cuda(),
        nccl=next(filter(None, map(_installed, NCCL_PACKAGES)), None),
    )


def assess_versions(versions: InstalledVersions, requirements: RunRequirements) -> Iterator[CheckFinding]:
    wrong = list(_find_version_problems(versions, requirements))
    yield from wrong
    shown = ", ".join(
        f"{name} {version}"
        for name, version in versions.installed.items()
        if name in UNIFORM_PACKAGES and version
    )
    built = f"CUDA {versions.cuda}" if versions.cuda else "no CUDA"
    nccl = f", NCCL {versions.nccl}" if versions.nccl else ""
    if requirements.device is Device.CUDA and versions.cuda is None:
        yield fail(
            f"{shown}: a torch built without CUDA",
            "install a CUDA build of torch, or set cluster.gpus_per_node=0",
        )
    elif not wrong:
        yield ok(
            f"Python {versions.python}, {shown} ({built}{nccl}), and {len(versions.requirements)} packages "
            "in their tested ranges"
        )


def _find_version_problems(
    versions: InstalledVersions, requirements: RunRequirements
) -> Iterator[CheckFinding]:
    if versions.python_range and not _within(versions.python, versions.python_range):
        yield fail(
            f"Python {versions.python}", f"install one of the tested versions: {versions.python_range}"
        )
    for text in versions.requirements:
        requirement = Requirement(text)
        name, tested = requirement.name, str(requirement.specifier)
        engine = ENGINES.get(name)
        if engine is not None and engine is not requirements.engine:
            continue
        installed = versions.installed.get(name)
        if installed is None:
            yield fail(f"{name} is not installed", f"pip install '{name}{tested}'")
        elif not _within(installed, tested):
            # The toolkit uses private names of the engines, so another version may train incorrectly; others
            # are only untested.
            make = fail if engine is not None else warn
            yield make(f"{name} {installed}: tested with {tested}", f"pip install '{name}{tested}'")


def _within(version: str, tested: str) -> bool:
    """Compare base versions only: NVIDIA's images have versions like 2.11.0a0+5228986c39.nv25.6."""
    try:
        return Requirement(f"x{tested}").specifier.contains(Version(version).base_version, prereleases=True)
    except InvalidRequirement:
        return True


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# ---- secrets

# Prefixes of tokens: https://huggingface.co/docs/hub/security-tokens, and the AWS IAM guide ("Understanding
# unique ID prefixes"). W&B keys have none, so they are recognised by the name before them.
SECRETS: Mapping[str, re.Pattern[str]] = {
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{20,}"),
    "an AWS access key": re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    "a W&B key": re.compile(r"wandb[^=\s]*=(?:local-)?[0-9a-f]{40}\b|\bwandb_v\d_\w{20,}", re.IGNORECASE),
    "a password in a URL": re.compile(r"[a-z][a-z0-9+.-]*://[^\s/:@]+:[^\s/@]+@", re.IGNORECASE),
}

MAX_ANCESTORS = 16  # length of the chain of parent processes


def measure_arguments(requirements: RunRequirements) -> list[str]:
    """Return which kinds of secrets appear in which command lines, never the secrets themselves."""
    asker = os.getppid()  # checks run in a child process
    return find_secrets(
        {
            "this command" if pid == asker else f"process {pid}": words
            for pid, words in _read_ancestor_command_lines().items()
        }
    )


def find_secrets(lines: Mapping[str, Sequence[str]]) -> list[str]:
    return [
        f"{kind} in the command line of {where}"
        for where, words in lines.items()
        for kind, pattern in SECRETS.items()
        if any(pattern.search(word) for word in words)
    ]


def assess_arguments(secrets: list[str], requirements: RunRequirements) -> Iterator[CheckFinding]:
    for text in secrets:
        yield fail(
            f"{text}: every user of the machine can see command lines, and logs keep them",
            "revoke it; pass it in the environment (HF_TOKEN, WANDB_API_KEY, AWS_*), or use `hf auth "
            "login`, `wandb login`",
        )
    if not secrets:
        yield ok("none found")


def _read_ancestor_command_lines() -> dict[int, list[str]]:
    """Return the readable command lines of the ancestor processes, by PID."""
    command_lines: dict[int, list[str]] = {}
    pid = os.getppid()
    while pid > 0 and len(command_lines) < MAX_ANCESTORS:
        try:
            command_lines[pid] = (
                Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            )
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        except OSError:  # hidden, or the process has ended
            break
        parent = re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)
        pid = int(parent[1]) if parent is not None else 0
    return command_lines


VERSIONS = DoctorCheck(
    name="versions",
    how=(
        "metadata of the installed packages, compared with the ranges of pyproject.toml; torch is not "
        "imported"
    ),
    measure=measure_versions,
    assess=assess_versions,
    hang_remedy="the file system of the Python environment hangs",
    traits=lambda versions: {
        "Python": versions.python,
        "NCCL": str(versions.nccl),
        **{name: str(versions.installed.get(name)) for name in UNIFORM_PACKAGES},
    },
)
ARGUMENTS = DoctorCheck(
    name="secrets",
    how="search for tokens of known formats in the command lines of this process and its ancestors",
    measure=measure_arguments,
    assess=assess_arguments,
)
CHECKS = (VERSIONS, ARGUMENTS)
