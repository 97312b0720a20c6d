"""Size and hash of the files of a data folder, and checks that files still match them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from toolkit.errors import InputError, Problem
from toolkit.progress import Progress

CHUNK_BYTES = 1 << 22
# Opening a split hashes it whole up to this size (well under a second). Blocks of larger splits are checked
# when read.
HASHED_AT_OPENING_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size of a file and the hash of all its bytes in hexadecimal."""

    bytes: int
    xxh3_128: str


def hash_file(path: Path) -> FileDigest:
    hasher, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    return FileDigest(size, hasher.hexdigest())


def check_file_size(file: Path, expected: FileDigest) -> Path:
    """Return ``file``. Raises InputError if it is absent or its size differs from the manifest's."""
    size = file.stat().st_size if file.is_file() else None
    if size != expected.bytes:
        raise damaged_file(
            file, "absent" if size is None else f"{size} bytes", f"the manifest has {expected.bytes} bytes"
        )
    return file


def check_file_hashes(files: Sequence[tuple[Path, FileDigest]], progress: Progress) -> None:
    """Read every byte of ``files`` and compare hashes.

    Raises InputError naming the first file that differs.
    """
    with progress.task(
        "verifying data", total=sum(expected.bytes for _, expected in files), unit="B"
    ) as task:
        for file, expected in files:
            found = hash_file(check_file_size(file, expected))
            if found != expected:
                raise damaged_file(
                    file, f"xxh3 {found.xxh3_128}", f"the manifest has xxh3 {expected.xxh3_128}"
                )
            task.advance(expected.bytes, note=file.name)


def damaged_file(path: Path, seen: str, rule: str) -> InputError:
    return InputError(
        Problem(str(path), f"{path}: {seen}", rule, "restore the file, or prepare the data again")
    )
