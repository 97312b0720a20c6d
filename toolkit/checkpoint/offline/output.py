"""Write the files of a target, hashing pieces and computing checksums. Imports no torch."""

from __future__ import annotations

import os
import struct
import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash
from isal import isal_zlib

from toolkit.checkpoint.catalog import BLOCK_BYTES, TensorPiece
from toolkit.checkpoint.target import TargetFile
from toolkit.files import sync_folder
from toolkit.paths import inside

# (first byte, length, CRC-32) of a written range
Segment = tuple[int, int, int]
_ZEROS = bytes(2**20)


class TargetOutput:
    """The files of one target, created with their full length; shared by threads (``pwrite`` has no file
    position).
    """

    def __init__(self, folder: Path, files: Sequence[TargetFile]) -> None:
        self.folder = folder
        self._files = {file.name: file for file in files}
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def exists(self) -> bool:
        """Return whether every file exists with its length."""
        paths = ((self.folder / name, file) for name, file in self._files.items())
        return all(path.is_file() and path.stat().st_size == file.numbytes for path, file in paths)

    def prepare(self) -> None:
        """Create every file with its length and fixed bytes, durably. Pieces that an earlier attempt wrote
        are preserved.
        """
        for name, file in self._files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            descriptor = self._descriptor(name)
            os.ftruncate(descriptor, file.numbytes)
            for offset, content in file.fixed.items():
                _write(descriptor, memoryview(content), offset)
        for folder in {folder for name in self._files for folder in PurePosixPath(name).parents}:
            sync_folder(self.folder / folder)

    def checked(self, name: str) -> bool:
        """Return whether the file has checksums."""
        return bool(self._files[name].checksums)

    def write(self, name: str, begin: int, data: memoryview) -> None:
        _write(self._descriptor(name), data, begin)

    def sync(self, names: Iterable[str]) -> None:
        """Make the content and lengths of these files durable."""
        for name in names:
            os.fsync(self._descriptor(name))

    def seal(self, name: str, segments: Sequence[Segment]) -> dict[int, bytes]:
        """Write the checksums of a file, given its written ``segments`` in any order; bytes between them are
        zero.

        Returns:
            The bytes of each checksum, by offset in the file.
        """
        ordered, sealed = sorted(segments), {}
        for check in self._files[name].checksums:
            inside = ordered[bisect_left(ordered, (check.begin,)) : bisect_left(ordered, (check.end,))]
            crc = struct.pack("<I", combine_checksums(check.begin, check.end, inside))
            for offset in check.offsets:
                _write(self._descriptor(name), memoryview(crc), offset)
                sealed[offset] = crc
        return sealed

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _descriptor(self, name: str) -> int:
        with self._lock:
            if name not in self._open:
                self._open[name] = os.open(inside(self.folder, name), os.O_RDWR | os.O_CREAT, 0o644)
            return self._open[name]


def _write(descriptor: int, data: memoryview, begin: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], begin + done)


def combine_checksums(begin: int, end: int, segments: Sequence[Segment]) -> int:
    """Return the CRC-32 of bytes ``begin .. end`` from the ordered, disjoint ``segments``; bytes between
    them are zero.
    """
    crc, at = 0, begin
    for first, length, of_segment in (*segments, (end, 0, 0)):
        assert first >= at, f"two pieces share bytes {first}..{at}"
        crc = isal_zlib.crc32_combine(crc, _zeros(first - at), first - at)
        crc = isal_zlib.crc32_combine(crc, of_segment, length)
        at = first + length
    return crc


def _zeros(count: int) -> int:
    crc = 0
    for start in range(0, count, len(_ZEROS)):
        crc = isal_zlib.crc32(memoryview(_ZEROS)[: min(len(_ZEROS), count - start)], crc)
    return crc


class PieceWriter:
    """Write one piece from front to back, and hash it."""

    def __init__(self, piece: TensorPiece, output: TargetOutput) -> None:
        self.piece = piece
        self._output, self._checked = output, output.checked(piece.file)
        self._at = piece.begin
        self._hash, self._hashed = xxhash.xxh3_128(), 0
        self.hashes: list[str] = []
        self.segments: list[Segment] = []

    def write(self, begin: int, data: memoryview) -> None:
        """Write ``data`` at offset ``begin``, which must be the next byte of this piece."""
        assert begin == self._at, f"{self.piece.key}: byte {begin} comes after {self._at}"
        self._output.write(self.piece.file, begin, data)
        if self._checked:
            crc = isal_zlib.crc32(data)
            if self.segments:
                first, length, before = self.segments[0]
                self.segments[0] = (
                    first,
                    length + len(data),
                    isal_zlib.crc32_combine(before, crc, len(data)),
                )
            else:
                self.segments.append((begin, len(data), crc))
        self._at += len(data)
        while len(data):
            room = BLOCK_BYTES - self._hashed
            self._hash.update(data[:room])
            self._hashed += min(room, len(data))
            data = data[room:]
            if self._hashed == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> None:
        """Assert that the piece is complete, and finish its last block."""
        assert self._at == self.piece.end, f"{self.piece.key}: {self._at} of {self.piece.end} written"
        if self._hashed:
            self._end_block()

    def _end_block(self) -> None:
        self.hashes.append(self._hash.hexdigest())
        self._hash, self._hashed = xxhash.xxh3_128(), 0


def as_bytes(values: Any) -> memoryview:
    """Return the bytes of a contiguous array."""
    return memoryview(values.reshape(-1).view("u1")) if values.size else memoryview(b"")
