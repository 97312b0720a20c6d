"""Read files block by block, verify their hashes and view bytes as arrays. Imports no torch.

Memory is one block (``BLOCK_BYTES``) per reading thread, for tensors of any size.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from toolkit.paths import Location, Url

READER_THREADS = min(4, os.cpu_count() or 1)  # reading, hashing and copying release the GIL
CRC_CHUNK_BYTES = 4 * 2**20  # read at once while a record's CRC-32 is computed
INTACT_RULE = "bytes are read as they were written"
# Errors that are properties of the files, which the user must repair. Others may be transient, such as those
# of a restarting file server, and say nothing about the files.
DAMAGE_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM)
# Size in bytes and modification time in ns: equal while a file does not change.
FileStamp = tuple[int, int]
# suffix of the hidden folder that a conversion writes to; it is not part of the folder that contains it
UNFINISHED_SUFFIX = ".resharding"


def read_stamps(folder: Location) -> dict[str, FileStamp]:
    """Return the stamp of every file below ``folder``, by its relative path; none of a URL, whose files are
    compared while they are read. Links to folders are not followed.
    """
    if isinstance(folder, Url):
        return {}
    stamps = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.endswith(UNFINISHED_SUFFIX)]
        for path in (Path(parent, name) for name in names):
            with suppress(FileNotFoundError):
                stamps[path.relative_to(folder).as_posix()] = _stamp(path.stat())
    return dict(sorted(stamps.items()))


def _stamp(status: os.stat_result) -> FileStamp:
    return status.st_size, status.st_mtime_ns


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's dtype for torch's name. 16- and 8-bit floats that numpy lacks come from ml_dtypes,
    which rounds as torch does.
    """
    if name.startswith(("bfloat16", "float8")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def box_slices(box: Box) -> tuple[slice, ...]:
    """Return the index that selects ``box`` in a tensor with the same coordinates."""
    return tuple(slice(offset, offset + size) for offset, size in zip(box.offset, box.shape, strict=True))


def view_box(data: Any, box: Box) -> Any:
    """Return a view of ``box`` in ``data`` (a torch tensor or a numpy array), whose coordinates the box
    has."""
    return data[box_slices(box)]


class VerifiedRecords:
    """Archive records whose CRC-32 has been verified; shared by threads."""

    def __init__(self) -> None:
        self._verified: set[ArchiveRecord] = set()
        self._locks: dict[ArchiveRecord, threading.Lock] = {}
        self._lock = threading.Lock()

    def verify_once(self, record: ArchiveRecord, check: Callable[[ArchiveRecord], None]) -> None:
        """Call ``check`` for a record unless it has passed before. Raises what ``check`` raises."""
        if record in self._verified:
            return
        with self._lock:
            record_lock = self._locks.setdefault(record, threading.Lock())
        with record_lock:
            if record not in self._verified:
                check(record)
                self._verified.add(record)


class CheckpointFiles:
    """Open files of one folder, shared by threads (``pread`` has no file position).

    Args:
        folder: The folder of the checkpoint.
        checked: Records that are already verified, if files are opened repeatedly.
    """

    folder: Location
    threads = READER_THREADS  # that should read at once

    def __init__(self, folder: Path, checked: VerifiedRecords | None = None) -> None:
        self.folder = folder
        self._local = folder
        self._checked = checked or VerifiedRecords()
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read_into(self, file: str, begin: int, buffer: memoryview) -> None:
        """Read ``len(buffer)`` bytes from ``begin``.

        Raises:
            DamagedFile: The file is missing, too short, not a file, or may not be read.
            OSError: Any other error of the file system, which may be transient.
        """
        done = 0
        try:
            descriptor = self._descriptor(file)
            while done < len(buffer):
                count = os.preadv(descriptor, [buffer[done:]], begin + done)
                if count == 0:
                    raise DamagedFile(
                        file,
                        f"{self.folder / file} ends at byte {begin + done}, before its tensors do",
                        INTACT_RULE,
                    )
                done += count
        except FileNotFoundError as error:
            raise DamagedFile(
                file, f"{self.folder / file} is missing", "every file that the manifest names exists"
            ) from error
        except OSError as error:
            if error.errno not in DAMAGE_ERRORS:
                raise OSError(error.errno, error.strerror, str(self.folder / file)) from error
            raise DamagedFile(
                file, f"{self.folder / file} cannot be read ({error.strerror})", INTACT_RULE
            ) from error

    def verify_record_of(self, piece: TensorPiece) -> None:
        """Verify the archive record that contains ``piece``, unless that was done before.

        Raises:
            DamagedFile: As ``read_into``, or the CRC-32 does not match.
        """
        if piece.record is not None:
            self._checked.verify_once(piece.record, self.verify_record)

    def verify_record(self, record: ArchiveRecord) -> None:
        """Read the whole record and compare its CRC-32. Raises DamagedFile."""
        buffer, crc = memoryview(bytearray(min(CRC_CHUNK_BYTES, record.end - record.begin))), 0
        for begin in range(record.begin, record.end, CRC_CHUNK_BYTES):
            chunk = buffer[: min(CRC_CHUNK_BYTES, record.end - begin)]
            self.read_into(record.file, begin, chunk)
            crc = isal_zlib.crc32(chunk, crc)
        if crc != record.crc:
            seen = (
                f"{self.folder / record.file} has CRC-32 {crc:08x} in bytes "
                f"{record.begin}..{record.end}, its directory {record.crc:08x}"
            )
            raise DamagedFile(record.file, seen, INTACT_RULE)

    def changed(self, since: Mapping[str, FileStamp]) -> list[str]:
        """Return the opened files whose stamps differ from ``since``."""
        now = {file: _stamp(os.fstat(descriptor)) for file, descriptor in self._open.items()}
        return [file for file, stamp in now.items() if since.get(file, stamp) != stamp]

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = os.open(resolve_file(self._local, file), os.O_RDONLY)
            return self._open[file]


def open_files(folder: Location, checked: VerifiedRecords | None = None) -> CheckpointFiles:
    """Return the files of a folder, or of a URL in a store. Opens nothing."""
    if isinstance(folder, Url):
        from toolkit.checkpoint.remote.files import StoredFiles

        return StoredFiles(folder)
    return CheckpointFiles(folder, checked)


class BlockBuffer:
    """One thread's memory for one block. It caches the last block, so reading a tensor in order verifies
    each block once.
    """

    def __init__(self) -> None:
        # np.empty commits memory pages only when they are used
        self.buffer: Any = np.empty(BLOCK_BYTES, np.uint8)
        self._cached_block: tuple[Location, str, int, int] | None = None

    def load(self, files: CheckpointFiles, piece: TensorPiece, start: int, stop: int) -> None:
        """Read elements ``start .. stop`` of ``piece`` as stored. If the piece has hashes, they must be a
        whole block, which is verified.

        Raises:
            DamagedFile: As ``CheckpointFiles.read_into``, or the hash does not match.
        """
        begin, numbytes = piece.begin + start * piece.itemsize, (stop - start) * piece.itemsize
        block = (files.folder, piece.file, begin, numbytes)
        if self._cached_block == block:
            return
        self._cached_block = None
        view = memoryview(self.buffer)[:numbytes]
        files.verify_record_of(piece)
        files.read_into(piece.file, begin, view)
        if piece.hashes:
            verify_block(files, piece, (begin - piece.begin) // BLOCK_BYTES, xxhash.xxh3_128_hexdigest(view))
        self._cached_block = block

    def allocate(self, numbytes: int) -> memoryview:
        """Return memory for the caller to fill, and drop the cached block."""
        self._cached_block = None
        return memoryview(self.buffer)[:numbytes]


class SequentialVerifier:
    """Verify pieces that one thread reads from front to back in steps of any length, so that no block must be
    read whole.

    Args:
        by_columns: Tiles come in the order of the tensor with its last two dims swapped, as transposed pieces
            are stored.
    """

    def __init__(self, *, by_columns: bool) -> None:
        self._by_columns = by_columns
        self._hashing: dict[
            tuple[str, int], tuple[int, xxhash.xxh3_128]
        ] = {}  # bytes read so far, and the hash of the current block's bytes

    def can_verify(self, piece: TensorPiece) -> bool:
        """Return whether tiles of this order follow each other in the piece's file."""
        return piece.transposed == self._by_columns

    def read_into(self, files: CheckpointFiles, piece: TensorPiece, start: int, buffer: memoryview) -> None:
        """Read the elements from ``start``, which must be the next of ``piece``.

        Raises:
            DamagedFile: As ``CheckpointFiles.read_into``, or the hash of a block that ends here differs.
        """
        key, begin = (piece.file, piece.begin), start * piece.itemsize
        files.verify_record_of(piece)
        files.read_into(piece.file, piece.begin + begin, buffer)
        if not piece.hashes:
            return
        at, digest = self._hashing.pop(key, (0, xxhash.xxh3_128()))
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
            self._hashing[key] = at, digest

    def finish(self) -> None:
        """Assert that every piece was read to its end."""
        assert not self._hashing, f"not read to their ends: {list(self._hashing)}"


def verify_block(files: CheckpointFiles, piece: TensorPiece, number: int, digest: str) -> None:
    """Raise DamagedFile if ``digest``, the hash of block ``number``, is not the recorded one."""
    if digest != piece.hashes[number]:
        begin = piece.begin + number * BLOCK_BYTES
        where = f"{piece.key} in bytes {begin}..{min(begin + BLOCK_BYTES, piece.end)}"
        raise DamagedFile(
            piece.file, f"{files.folder / piece.file} differs from what was written: {where}", INTACT_RULE
        )


def verify_piece(files: CheckpointFiles, piece: TensorPiece, buffer: bytearray) -> Iterator[memoryview]:
    """Read and verify every block of a piece in ``buffer``, and yield it. Raises DamagedFile at the first
    mismatch.
    """
    files.verify_record_of(piece)
    for number in range(block_count(piece.end - piece.begin)):
        begin = piece.begin + number * BLOCK_BYTES
        block = memoryview(buffer)[: min(BLOCK_BYTES, piece.end - begin)]
        files.read_into(piece.file, begin, block)
        if piece.hashes:
            verify_block(files, piece, number, xxhash.xxh3_128_hexdigest(block))
        yield block


def verify_pieces(folder: Path, pieces: Iterable[TensorPiece]) -> None:
    """Read every block of the pieces, whose files are in ``folder``. Raises DamagedFile at the first
    mismatch.
    """
    buffer = bytearray(BLOCK_BYTES)
    with CheckpointFiles(folder) as files:
        for piece in pieces:
            deque(verify_piece(files, piece, buffer), maxlen=0)
