"""What a file of a data folder must be: its size and hash."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

CHUNK_BYTES = 1 << 22


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
