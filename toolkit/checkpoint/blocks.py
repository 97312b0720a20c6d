"""Bytes of files, a block at a time: read, checked against their hashes, seen as numbers. Imports no torch.

Whatever the sizes of tensors, memory is one block (``BLOCK_BYTES``) a reading thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from isal import isal_zlib

from toolkit.checkpoint.catalog import (
    BLOCK_BYTES,
    ArchiveRecord,
    DamagedFile,
    TensorPiece,
    block_count,
    resolve_file,
)
from toolkit.checkpoint.shard import Box

CHECK_BYTES = 4 * 2**20  # of a record at a time
INTACT = "bytes are read as they were written"
# What a file is known by: its bytes, and when they were last changed (ns).
FileStamp = tuple[int, int]
UNFINISHED = ".resharding"  # ends the name of a hidden folder that a conversion fills: no part of the folder that it stands in


def read_stamps(folder: Path) -> dict[str, FileStamp]:
    """Of every file in ``folder`` and below, by its path there. Links to folders are not followed: they may go round."""
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.endswith(UNFINISHED)]
        for path in (Path(place, name) for name in names):
            with suppress(FileNotFoundError):  # removed meanwhile
                found[path.relative_to(folder).as_posix()] = _stamp(path.stat())
    return dict(sorted(found.items()))


def _stamp(status: os.stat_result) -> FileStamp:
    return status.st_size, status.st_mtime_ns


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of torch's name; 16- and 8-bit floats that numpy lacks come from ml_dtypes, and round to even as torch's do."""
    if name.startswith(("bfloat16", "float8")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def box_slices(box: Box) -> tuple[slice, ...]:
    """The index of ``box`` in what has its coordinates."""
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offset, box.shape, strict=True))


def view_box(data: Any, box: Box) -> Any:
    """A view of ``box``, in the coordinates of ``data`` (torch's or numpy's)."""
    return data[box_slices(box)]


class VerifiedRecords:
    """Records whose CRC-32 was found to be right; shared by threads."""

    def __init__(self) -> None:
        self._right: set[ArchiveRecord] = set()
        self._checking: dict[ArchiveRecord, threading.Lock] = {}
        self._lock = threading.Lock()

    def once(self, record: ArchiveRecord, check: Callable[[ArchiveRecord], None]) -> None:
        """``check`` each record the first time that it is asked for. Raises what ``check`` raises, each time until it passes."""
        if record in self._right:
            return
        with self._lock:
            checking = self._checking.setdefault(record, threading.Lock())
        with checking:
            if record not in self._right:
                check(record)
                self._right.add(record)


class CheckpointFiles:
    """Open files of one folder, shared by threads (``pread`` has no position).

    Args:
        checked: records that need no second look, where files are opened again and again.
    """

    def __init__(self, folder: Path, checked: VerifiedRecords | None = None) -> None:
        self.folder = folder
        self._checked = checked or VerifiedRecords()
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def fill(self, file: str, begin: int, buffer: memoryview) -> None:
        """Read ``len(buffer)`` bytes from ``begin`` on. Raises Damage for a file that is missing, too short or unreadable."""
        done = 0
        try:
            descriptor = self._descriptor(file)
            while done < len(buffer):
                count = os.preadv(descriptor, [buffer[done:]], begin + done)
                if count == 0:
                    raise DamagedFile(
                        file,
                        f"{self.folder / file} ends at byte {begin + done}, before its tensors do",
                        INTACT,
                    )
                done += count
        except FileNotFoundError as error:
            raise DamagedFile(
                file, f"{self.folder / file} is missing", "every file that the manifest names is there"
            ) from error
        except OSError as error:
            raise DamagedFile(
                file, f"{self.folder / file} cannot be read ({error.strerror})", INTACT
            ) from error

    def check(self, piece: TensorPiece) -> None:
        """The record that ``piece`` lies in is as it was written. It is read whole, the first time that a piece of it is asked for.

        Raises:
            Damage: as ``fill``; or its CRC-32 is another one.
        """
        if piece.record is not None:
            self._checked.once(piece.record, self.check_record)

    def check_record(self, record: ArchiveRecord) -> None:
        """Raises Damage: as ``check``."""
        room, crc = memoryview(bytearray(min(CHECK_BYTES, record.end - record.begin))), 0
        for at in range(record.begin, record.end, CHECK_BYTES):
            part_of = room[: min(CHECK_BYTES, record.end - at)]
            self.fill(record.file, at, part_of)
            crc = isal_zlib.crc32(part_of, crc)
        if crc != record.crc:
            seen = f"{self.folder / record.file} has CRC-32 {crc:08x} in bytes {record.begin}..{record.end}, its directory {record.crc:08x}"
            raise DamagedFile(record.file, seen, INTACT)

    def changed(self, since: Mapping[str, FileStamp]) -> list[str]:
        """Which of the files that were read are not what they were."""
        now = {file: _stamp(os.fstat(descriptor)) for file, descriptor in self._open.items()}
        return [file for file, stamp in now.items() if since.get(file, stamp) != stamp]

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = os.open(resolve_file(self.folder, file), os.O_RDONLY)
            return self._open[file]


class BlockBuffer:
    """One thread's room for one block. It keeps the last one: whoever reads a tensor in order reads and checks each block once."""

    def __init__(self) -> None:
        self.buffer: Any = np.empty(BLOCK_BYTES, np.uint8)  # whose pages are there when they are used
        self._holds: tuple[Path, str, int, int] | None = None

    def fill(self, files: CheckpointFiles, piece: TensorPiece, start: int, stop: int) -> None:
        """Elements ``start .. stop`` of ``piece``, as it lies in its file; a whole block where the piece has hashes, and then checked.

        Raises:
            Damage: as ``Files.fill``; or they are not what was written.
        """
        begin, numbytes = piece.begin + start * piece.itemsize, (stop - start) * piece.itemsize
        place = (files.folder, piece.file, begin, numbytes)
        if self._holds == place:
            return
        self._holds = None
        view = memoryview(self.buffer)[:numbytes]
        files.check(piece)
        files.fill(piece.file, begin, view)
        if piece.hashes:
            verify_block(files, piece, (begin - piece.begin) // BLOCK_BYTES, xxhash.xxh3_128_hexdigest(view))
        self._holds = place

    def room(self, numbytes: int) -> memoryview:
        """For bytes that the caller reads; what was held is gone."""
        self._holds = None
        return memoryview(self.buffer)[:numbytes]


class SequentialVerifier:
    """Checks pieces that are read front to back, in steps of any length, so that no block has to be read whole: in one thread.

    Args:
        by_columns: tiles are taken in the order of the tensor with its last two dims changed over: the order of transposed pieces.
    """

    def __init__(self, *, by_columns: bool) -> None:
        self._by_columns = by_columns
        self._hashing: dict[
            tuple[str, int], tuple[int, xxhash.xxh3_128]
        ] = {}  # bytes read, and the hash of those since the block began

    def takes(self, piece: TensorPiece) -> bool:
        """Whether such tiles are what follows in the piece's file."""
        return piece.transposed == self._by_columns

    def fill(self, files: CheckpointFiles, piece: TensorPiece, start: int, buffer: memoryview) -> None:
        """Elements from ``start`` on, which must be the next of ``piece``.

        Raises:
            Damage: as ``Files.fill``; or a block that ends here is not what was written.
        """
        place, begin = (piece.file, piece.begin), start * piece.itemsize
        files.check(piece)
        files.fill(piece.file, piece.begin + begin, buffer)
        if not piece.hashes:
            return
        at, digest = self._hashing.pop(place, (0, xxhash.xxh3_128()))
        assert at == begin, f"{piece.key}: byte {begin} of {piece.file} comes after {at}"
        while len(buffer):
            end = min((at // BLOCK_BYTES + 1) * BLOCK_BYTES, piece.end - piece.begin)
            step, buffer = buffer[: end - at], buffer[end - at :]
            digest.update(step)
            at += len(step)
            if at == end:
                verify_block(files, piece, (at - 1) // BLOCK_BYTES, digest.hexdigest())
                digest = xxhash.xxh3_128()
        if at < piece.end - piece.begin:
            self._hashing[place] = at, digest

    def finish(self) -> None:
        """Every piece was read to its end."""
        assert not self._hashing, f"not read to their ends: {list(self._hashing)}"


def verify_block(files: CheckpointFiles, piece: TensorPiece, number: int, found: str) -> None:
    """Raises Damage where a block, of which ``found`` is the hash, is not what was written."""
    if found != piece.hashes[number]:
        begin = piece.begin + number * BLOCK_BYTES
        where = f"{piece.key} in bytes {begin}..{min(begin + BLOCK_BYTES, piece.end)}"
        raise DamagedFile(
            piece.file, f"{files.folder / piece.file} differs from what was written: {where}", INTACT
        )


def verify_piece(files: CheckpointFiles, piece: TensorPiece, buffer: bytearray) -> Iterator[memoryview]:
    """Every block of a piece, read into ``buffer`` and checked where it has hashes. Raises Damage at the first that is not what was
    written."""
    files.check(piece)
    for number in range(block_count(piece.end - piece.begin)):
        begin = piece.begin + number * BLOCK_BYTES
        block = memoryview(buffer)[: min(BLOCK_BYTES, piece.end - begin)]
        files.fill(piece.file, begin, block)
        if piece.hashes:
            verify_block(files, piece, number, xxhash.xxh3_128_hexdigest(block))
        yield block
