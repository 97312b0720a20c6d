"""Files that are whole or absent, and their digests."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Digest:
    """What a file must be: its size and the xxh3-128 of its bytes."""

    bytes: int
    xxh3_128: str


def digest(path: Path) -> Digest:
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return Digest(size, hasher.hexdigest())


def sync_folder(path: Path) -> None:
    """A rename lasts only when the folder's own entry is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, content: bytes) -> None:
    """Temporary file, fsync, rename: readers see the old content or the new one."""
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)
