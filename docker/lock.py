"""What is installed into a base image: the versions of constraints.txt, but for what the base keeps.

    python docker/lock.py write FOLDER             writes FOLDER/{requirements,constraints}.txt and FOLDER/before.json
    python docker/lock.py write FOLDER --keep      the base's own torch stays, and what was built against it
    python docker/lock.py check FOLDER             after the installation: what was kept is unchanged, all else as locked

Runs in the base's own Python, before anything is installed: standard library only.
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
# Built against each other: with one of them replaced, the others would no longer load, or would lose what they were built for.
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
    print("\n".join(problems) or "everything is as locked")
    return 1 if problems else 0


def normal(name: str) -> str:
    """Of a distribution, as PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, Distribution]:
    """By name. The first of a name is the one that is imported."""
    found: dict[str, Distribution] = {}
    for distribution in distributions():
        if distribution.metadata["Name"]:  # what an interrupted installation left has none
            found.setdefault(normal(distribution.metadata["Name"]), distribution)
    return found


def requirements(project: Mapping[str, object]) -> list[str]:
    """Of the table ``project`` of pyproject.toml, with the extras of the image."""
    dependencies, optional = project["dependencies"], project["optional-dependencies"]
    assert isinstance(dependencies, list)
    assert isinstance(optional, dict)
    return [*dependencies, *(line for extra in EXTRAS for line in optional[extra])]


def locked(text: str) -> dict[str, str]:
    """The versions of constraints.txt, by name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def kept(present: Mapping[str, Distribution]) -> dict[str, str]:
    """Versions of what the base has and keeps: torch's family, and what pip could not replace, as the distribution's own tools
    installed it."""
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
        raise SystemExit("KEEP_TORCH is for a base that has its own torch, and this one has none")
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
    """
    Args:
        now: what is installed.
        versions: what should be, where it is installed at all.
        kept: of it, what was there before and should be the same build.
        present: names of all that was there before.
    """
    found = [
        f"{name} {version} was to be kept, and is {now.get(name, 'gone')} now"
        for name, version in kept.items()
        if now.get(name) != version
    ]
    for name, version in now.items():
        if name in kept:
            continue
        if (
            name in versions and version.partition("+")[0] != versions[name].partition("+")[0]
        ):  # torch 2.13.0+cpu is 2.13.0
            found.append(f"{name} is {version}, and {versions[name]} in constraints.txt")
        if name not in versions and name not in present:
            found.append(f"{name} {version} was installed, and is not in constraints.txt")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
