"""Compute and check the packages of a base image: constraints.txt, except for what the base keeps.

    python docker/lock.py write FOLDER             write FOLDER/*.txt and FOLDER/before.json
    python docker/lock.py write FOLDER --keep      keep the base's torch and packages built against it
    python docker/lock.py check FOLDER             after the installation: compare with the lock

It runs in the base's Python before anything is installed, so it uses only the standard library.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
EXTRAS = ("megatron",)
# Packages built against each other: replacing one would break the others.
FAMILY = (
    "torch",
    "torchvision",
    "torchaudio",
    "triton",
    "pytorch-triton",
    "numpy",
    "transformer-engine",
    "transformer-engine-torch",
    "flash-attn",
    "apex",
)


def main(arguments: Sequence[str]) -> int:
    action, folder = arguments[0], Path(arguments[1])
    if action == "write":
        write(folder, keep="--keep" in arguments)
        return 0
    problems = check(folder)
    print("\n".join(problems) or "all packages match the lock")
    return 1 if problems else 0


def normal(name: str) -> str:
    """Normalize a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, Distribution]:
    """Return the installed distributions by name; the first one of a name is the one that is imported."""
    found: dict[str, Distribution] = {}
    for distribution in distributions():
        if distribution.metadata["Name"]:  # leftovers of an interrupted installation have no name
            found.setdefault(normal(distribution.metadata["Name"]), distribution)
    return found


def requirements(project: Mapping[str, object]) -> list[str]:
    """Return the requirements of the table ``project`` of pyproject.toml, with the image's extras."""
    dependencies, optional = project["dependencies"], project["optional-dependencies"]
    assert isinstance(dependencies, list)
    assert isinstance(optional, dict)
    return [*dependencies, *(line for extra in EXTRAS for line in optional[extra])]


def locked(text: str) -> dict[str, str]:
    """Return the versions of constraints.txt by name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def kept(present: Mapping[str, Distribution]) -> dict[str, str]:
    """Return versions that the base keeps: torch's family, and packages that pip cannot replace."""
    return {
        name: distribution.version
        for name, distribution in present.items()
        if name in FAMILY or distribution.read_text("RECORD") is None
    }


def write(folder: Path, *, keep: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    present = installed()
    stays = kept(present) if keep else {}
    if keep and "torch" not in stays:
        raise SystemExit("KEEP_TORCH needs a base image with torch")
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = locked((PROJECT / "constraints.txt").read_text(encoding="utf-8")) | stays
    (folder / "requirements.txt").write_text(
        "".join(f"{line}\n" for line in requirements(project)), encoding="utf-8"
    )
    (folder / "constraints.txt").write_text(
        "".join(f"{name}=={version}\n" for name, version in sorted(versions.items())), encoding="utf-8"
    )
    (folder / "before.json").write_text(
        json.dumps({"kept": stays, "present": sorted(present)}), encoding="utf-8"
    )


def check(folder: Path) -> list[str]:
    before = json.loads((folder / "before.json").read_text(encoding="utf-8"))
    now = {name: distribution.version for name, distribution in installed().items()}
    versions = locked((folder / "constraints.txt").read_text(encoding="utf-8"))
    return differences(now, versions, before["kept"], before["present"])


def differences(
    now: Mapping[str, str], versions: Mapping[str, str], kept: Mapping[str, str], present: Sequence[str]
) -> list[str]:
    """Return the differences between the installed packages and the lock.

    Args:
        now: installed versions.
        versions: required versions of packages that are installed.
        kept: versions of the base that must be unchanged.
        present: names of all packages of the base.
    """
    found = [
        f"{name} {version} must be kept, but is now {now.get(name, 'missing')}"
        for name, version in kept.items()
        if now.get(name) != version
    ]
    for name, version in now.items():
        if name in kept:
            continue
        if (
            name in versions and version.partition("+")[0] != versions[name].partition("+")[0]
        ):  # torch 2.13.0+cpu is 2.13.0
            found.append(f"{name} is {version}, but {versions[name]} in constraints.txt")
        if name not in versions and name not in present:
            found.append(f"{name} {version} was installed, but is not in constraints.txt")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
