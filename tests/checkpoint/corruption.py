"""Seeded random damage to checkpoints, as by disks, users and attackers.

A damage is a function of (folder, random) that changes one thing below the folder and returns a description.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from toolkit.checkpoint import manifest

PAGE = 4096
DEEP = json.loads("[" * 200 + "]" * 200)
VALUES = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    0.5,
    1e308,
    float("nan"),
    "",
    "x",
    "../x",
    "/x",
    "x" * 300,
    "\0",
    [],
    {},
    [0],
    [-1],
    DEEP,
)

Damage = Callable[[Path, Random], str]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def flip(folder: Path, random: Random) -> str:
    file = random.choice(files_of(folder))
    content = bytearray(file.read_bytes())
    at, bit = random.randrange(len(content)), random.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {at} of {file.relative_to(folder)} flipped"


def truncate(folder: Path, random: Random) -> str:
    file = random.choice(files_of(folder))
    content = file.read_bytes()
    length = random.randrange(len(content))
    file.write_bytes(content[:length])
    return f"{file.relative_to(folder)} cut to {length} of {len(content)} bytes"


def zero(folder: Path, random: Random) -> str:
    """A page that was never written, as after a power failure."""
    file = random.choice(files_of(folder))
    content = bytearray(file.read_bytes())
    begin = random.randrange(len(content)) // PAGE * PAGE
    end = min(begin + PAGE, len(content))
    content[begin:end] = bytes(end - begin)
    file.write_bytes(content)
    return f"bytes {begin}..{end} of {file.relative_to(folder)} zeroed"


def delete(folder: Path, random: Random) -> str:
    file = random.choice(files_of(folder))
    file.unlink()
    return f"{file.relative_to(folder)} deleted"


def delete_folder(folder: Path, random: Random) -> str:
    found = random.choice(sorted({file.parent for file in files_of(folder)} - {folder}) or [folder])
    shutil.rmtree(found)
    return f"folder {found.relative_to(folder)} deleted"


def swap(folder: Path, random: Random) -> str:
    """Swap two files, of the same kind if possible."""
    file = random.choice(files_of(folder))
    alike = [other for other in files_of(folder) if other != file and other.suffix == file.suffix]
    if not alike:
        return delete(folder, random)
    other = random.choice(alike)
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)
    return f"{file.relative_to(folder)} and {other.relative_to(folder)} swapped"


def forge(folder: Path, random: Random) -> str:
    """Change one value of a JSON file; a manifest gets a matching hash."""
    files = [file for file in files_of(folder) if file.suffix == ".json"]
    if not files:
        return flip(folder, random)
    file = random.choice(files)
    content = json.loads(file.read_bytes())
    holder, key = random.choice(list(_places(content)))
    before = holder[key]
    numbers = (before + 1, before - 1, before * 2) if isinstance(before, int) else ()
    holder[key] = random.choice((*VALUES, *numbers))
    if "content_hash" in content and key != "content_hash":
        del content["content_hash"]
        content["content_hash"] = manifest._content_hash(content)
    file.write_text(json.dumps(content))
    return f"{key}={str(before)[:40]} is {str(holder[key])[:40]} in {file.relative_to(folder)}"


def _places(content: Any) -> Any:
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield content, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def point(folder: Path, random: Random) -> str:
    """Change the name in a pointer or tracker."""
    files = [file for file in files_of(folder) if file.name.startswith("latest")]
    if not files:
        return delete_folder(folder, random)
    names = [
        "",
        "step-00000001",
        "step-00000009",
        "global_step1",
        "0",
        "-1",
        "release",
        "..",
        "/",
        "\0",
        "x" * 5000,
        "\udcff",
    ]
    text = random.choice(names)
    file = random.choice(files)
    file.write_bytes(text.encode(errors="surrogateescape"))
    return f"{file.relative_to(folder)} names {text[:20]!r}"


DAMAGES: Mapping[str, Damage] = {
    "flip": flip,
    "truncate": truncate,
    "zero": zero,
    "delete": delete,
    "delete_folder": delete_folder,
    "swap": swap,
    "forge": forge,
    "point": point,
}
