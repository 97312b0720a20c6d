"""What a file of a data folder must be: its size and hash; and the check that it still is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from toolkit.errors import InputError, Problem
from toolkit.progress import Progress

CHUNK_BYTES = 1 << 22
# Up to here opening a split hashes it whole (well under a second); beyond, blocks are checked when they are read.
HASHED_AT_OPENING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Digest:
    """``xxh3_128`` is of all the file's bytes, in hex."""

    bytes: int
    xxh3_128: str


def digest(path: Path) -> Digest:
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return Digest(size, hasher.hexdigest())


def check_size(file: Path, expected: Digest) -> Path:
    """``file``, which is there and as long as the manifest says. Raises InputError."""
    size = file.stat().st_size if file.is_file() else None
    if size != expected.bytes:
        raise broken(
            file, "absent" if size is None else f"{size} bytes", f"the manifest says {expected.bytes} bytes"
        )
    return file


def check_bytes(files: Sequence[tuple[Path, Digest]], progress: Progress) -> None:
    """Read every byte of ``files`` and compare. Raises InputError naming the first that differs."""
    with progress.task(
        "verifying data", total=sum(expected.bytes for _, expected in files), unit="B"
    ) as task:
        for file, expected in files:
            seen = digest(check_size(file, expected))
            if seen != expected:
                raise broken(file, f"xxh3 {seen.xxh3_128}", f"the manifest says xxh3 {expected.xxh3_128}")
            task.advance(expected.bytes, note=file.name)


def broken(path: Path, seen: str, rule: str) -> InputError:
    return InputError(
        Problem(str(path), f"{path}: {seen}", rule, "restore the file, or prepare the data again")
    )
