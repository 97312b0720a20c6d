"""Locate the tensors in a file of ``torch.save``, and lay out such a file. Imports no torch.

The file is a zip of uncompressed records in one folder: ``data.pkl``, ``byteorder``, ``data/N`` for each
storage, ``version``, ``.data/serialization_id``. Storages start at multiples of 64 bytes: an extra field
``FB`` pads each record's local header. Sources: ``torch/serialization.py``,
``caffe2/serialize/inline_container.cc``, and PKWARE's APPNOTE 6.3 for zip, with zip64 records if a size or an
offset needs more than 32 bits.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.checkpoint.catalog import DTYPES, ArchiveRecord, DamagedFile, TensorPiece, swap_last_dims
from toolkit.checkpoint.file_reader import CheckpointFiles, numpy_dtype
from toolkit.checkpoint.formats import unpickle
from toolkit.checkpoint.formats.pickle_writer import dumps
from toolkit.checkpoint.formats.stored_tensor import Storage, StoredTensor, row_major
from toolkit.checkpoint.shard import Box, TensorKey
from toolkit.checkpoint.target import FileChecksum, TargetFile

ALIGNMENT = 64
ROOT = "archive"  # folder of the records if torch.save was not given a path
RULE = "a file of torch.save is a complete zip of uncompressed records"
_MAX_UINT16, _MAX_UINT32 = 0xFFFF, 0xFFFFFFFF
_LOCAL, _CENTRAL, _END, _END64, _LOCATOR64 = 0x04034B50, 0x02014B50, 0x06054B50, 0x06064B50, 0x07064B50


# ---- reading


def load(folder: Path, file: str, begin: int = 0, end: int | None = None, *, named: bool = False) -> Any:
    """Return the object saved in ``folder / file`` (or in its bytes ``begin .. end``), with tensors as
    ``StoredTensor``.

    Reads the zip directory and the pickle, but no tensor. ``Storage.begin`` counts from the start of the
    file.

    Args:
        folder: Folder of the checkpoint.
        file: Path in the folder.
        begin, end: Byte range, if the file contains several archives.
        named: The file has kept the name under which it was saved, which its records repeat if torch.save was
            given a path.

    Raises:
        DamagedFile: The file is missing, incomplete or not of torch.save.
    """
    path = folder / file
    try:
        with path.open("rb") as stream:
            window = (
                stream
                if begin == 0 and end is None
                else _Window(stream, begin, path.stat().st_size if end is None else end)
            )
            with zipfile.ZipFile(window) as archive:
                records = {info.filename: info for info in archive.infolist()}
                packed = [
                    info.filename
                    for info in archive.infolist()
                    if info.compress_size != info.file_size or info.compress_type
                ]
                if packed or len(records) != len(archive.infolist()):
                    seen = f"{packed[0][:200]} is compressed" if packed else "two records have one name"
                    raise DamagedFile(file, f"{path}: {seen}", RULE)
                root = next(name for name in records if name.endswith("/data.pkl")).removesuffix("data.pkl")
                if named and root not in (f"{ROOT}/", f"{Path(file).stem}/"):
                    raise DamagedFile(
                        file,
                        f"{path} was saved as {root[:-1][:200]}.pt",
                        "files keep the names under which they were saved",
                    )
                if records.get(f"{root}byteorder") and archive.read(f"{root}byteorder") != b"little":
                    raise DamagedFile(file, f"{path} is big endian", "checkpoints are little endian")
                text = archive.read(f"{root}data.pkl")

            def storage(dtype: str, key: str, numel: int) -> Storage:
                info = records[f"{root}data/{key}"]
                if info.file_size < numel * DTYPES[dtype].itemsize:
                    raise DamagedFile(
                        file,
                        f"{path}: record {info.filename} has {info.file_size} bytes for {numel} of {dtype}",
                        RULE,
                    )
                stream.seek(begin + info.header_offset)
                header = stream.read(30)
                names, extra = struct.unpack("<HH", header[26:30])
                start = begin + info.header_offset + 30 + names + extra
                if header[:4] != struct.pack("<I", _LOCAL) or start + info.file_size > path.stat().st_size:
                    raise DamagedFile(
                        file, f"{path}: record {info.filename} is not at the directory's offset", RULE
                    )
                return Storage(
                    key,
                    dtype,
                    numel,
                    file,
                    start,
                    record=ArchiveRecord(file, start, start + info.file_size, info.CRC),
                )

            return unpickle.loads(text, storage)
    except FileNotFoundError as error:
        raise DamagedFile(file, f"{path} is missing", "a checkpoint has all files of its layout") from error
    except (
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        struct.error,
        EOFError,
        KeyError,
        OSError,
        OverflowError,
        RuntimeError,
        StopIteration,
        ValueError,
    ) as error:
        raise DamagedFile(
            file, f"{path} cannot be read as a file of torch.save ({type(error).__name__}: {error})", RULE
        ) from error


def read_number(folder: Path, value: Any, file: str = "") -> float:
    """Return a number that was saved as such or as a tensor of one element, which is read from ``folder``.

    Args:
        folder: Folder of the checkpoint.
        value: The number or tensor.
        file: The file that contains a plain number, for the error.

    Raises:
        DamagedFile: It is not a finite number, or its bytes are damaged.
    """
    found, file = value, value.storage.file if isinstance(value, StoredTensor) else file
    if isinstance(value, StoredTensor) and value.numel == 1:
        itemsize = DTYPES[value.dtype].itemsize
        content = memoryview(bytearray(itemsize))
        with CheckpointFiles(folder) as files:
            if value.storage.record is not None:
                files.verify_record(value.storage.record)
            files.read_into(file, value.storage.begin + value.offset * itemsize, content)
        found = float(np.frombuffer(content, numpy_dtype(value.dtype))[0])
    if not isinstance(found, (int, float)) or not math.isfinite(found):
        seen = (
            f"a tensor of shape {value.shape}"
            if found is value and isinstance(value, StoredTensor)
            else repr(found)[:200]
        )
        raise DamagedFile(
            file, f"{folder / file} has {seen} for a number", "counts in a checkpoint are finite numbers"
        )
    return float(found)


class _Window(io.RawIOBase):
    """Bytes ``begin .. end`` of a file, as a file object."""

    def __init__(self, stream: Any, begin: int, end: int) -> None:
        self._stream, self._begin, self._length, self._at = stream, begin, end - begin, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._stream.seek(self._begin + self._at)
        data = self._stream.read(count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def tensor_pieces(
    tensor: StoredTensor, key: TensorKey, global_shape: tuple[int, ...], box: Box
) -> list[TensorPiece]:
    """Return ``tensor``, which has the shape of ``box``, as pieces of a canonical tensor.

    It is one piece if it is row-major or transposed, otherwise one per row (or per box of fewer dims).
    """
    assert tensor.shape == box.shape, f"{key}: stored {tensor.shape}, box {box.shape}"
    return list(_split_strided(tensor.storage, key, global_shape, box, tensor.strides, tensor.offset, 0))


def _split_strided(
    storage: Storage,
    key: TensorKey,
    global_shape: tuple[int, ...],
    box: Box,
    strides: tuple[int, ...],
    at: int,
    dim: int,
) -> Iterator[TensorPiece]:
    """Split along dims from ``dim`` until the rest is row-major or transposed."""
    if box.numel == 0:
        return
    itemsize = DTYPES[storage.dtype].itemsize
    for transposed in (False, True):
        if transposed and len(box.shape) < 2:
            continue
        shape, ordered = (
            (swap_last_dims(box.shape), swap_last_dims(strides)) if transposed else (box.shape, strides)
        )
        if all(
            size == 1 or have == want
            for size, have, want in zip(shape, ordered, row_major(shape), strict=True)
        ):
            begin = storage.begin + at * itemsize
            yield TensorPiece(
                key,
                storage.dtype,
                global_shape,
                box,
                storage.file,
                begin,
                begin + box.numel * itemsize,
                transposed=transposed,
                record=storage.record,
            )
            return
    while box.shape[dim] == 1:
        dim += 1
    for index in range(box.shape[dim]):
        inner = Box(
            (*box.offset[:dim], box.offset[dim] + index, *box.offset[dim + 1 :]),
            (*box.shape[:dim], 1, *box.shape[dim + 1 :]),
        )
        yield from _split_strided(
            storage, key, global_shape, inner, strides, at + index * strides[dim], dim + 1
        )


# ---- writing


@dataclass(frozen=True, slots=True)
class ArchiveLayout:
    """A file of torch.save whose storages are still to be filled.

    Attributes:
        file: The file with its fixed bytes.
        storages: First byte of each storage, by its key.
    """

    file: TargetFile
    storages: dict[str, int]


def lay_out(
    name: str, value: Any, storages: Sequence[Storage], root: str = ROOT, begin: int = 0
) -> ArchiveLayout:
    """Lay out the file ``name`` of ``torch.save(value)``. ``value`` is accepted by ``pickle_writer.dumps``;
    ``storages`` are those of its tensors.

    Args:
        name: Path of the file.
        value: The object to save.
        storages: The storages, in order.
        root: Folder of the records.
        begin: First byte, if a file contains several archives. Returned offsets count from the file's start,
            and ``file.numbytes`` is where the archive ends.
    """
    fixed: dict[int, bytes] = {}
    # name, CRC (0: not known yet), bytes, offset from ``begin``
    entries: list[tuple[bytes, int, int, int]] = []
    starts: dict[str, int] = {}
    checks: list[tuple[str, int, int, int]] = []  # storage, begin, end, offset of the CRC in the local header
    at = 0

    def add(record: str, numbytes: int, content: bytes | None) -> int:
        nonlocal at
        path = f"{root}/{record}".encode()
        crc = zlib.crc32(content) if content is not None else 0
        header_at = at
        wide = struct.pack("<HHQQ", 1, 16, numbytes, numbytes) if numbytes >= _MAX_UINT32 else b""
        unpadded = at + 30 + len(path) + len(wide) + 4
        padding = -(begin + unpadded) % ALIGNMENT
        extra = wide + struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        size = _MAX_UINT32 if wide else numbytes
        header = struct.pack(
            "<IHHHHHIIIHH",
            _LOCAL,
            45 if wide else 20,
            0x800,
            0,
            0,
            0x21,
            crc,
            size,
            size,
            len(path),
            len(extra),
        )
        fixed[begin + at] = header + path + extra + (content or b"")
        data_at = at + len(header) + len(path) + len(extra)
        entries.append((path, crc, numbytes, header_at))
        at = data_at + numbytes
        return data_at

    pickled = dumps(value)
    add("data.pkl", len(pickled), pickled)
    add("byteorder", 6, b"little")
    for storage in storages:
        numbytes = storage.numel * DTYPES[storage.dtype].itemsize
        assert len(storage.content) in (0, numbytes), (
            f"{len(storage.content)} bytes for {storage.numel} of {storage.dtype}"
        )
        header_at = at
        data_at = add(f"data/{storage.key}", numbytes, storage.content or None)
        starts[storage.key] = begin + data_at
        if not storage.content:
            checks.append((storage.key, begin + data_at, begin + data_at + numbytes, begin + header_at + 14))
    add("version", 2, b"3\n")

    directory = bytearray()
    central_at = at
    crc_places: list[int] = []
    for path, crc, numbytes, offset in entries:
        wide = b""
        if numbytes >= _MAX_UINT32:
            wide += struct.pack("<QQ", numbytes, numbytes)
        if offset >= _MAX_UINT32:
            wide += struct.pack("<Q", offset)
        if wide:
            wide = struct.pack("<HH", 1, len(wide)) + wide
        size = min(numbytes, _MAX_UINT32)
        crc_places.append(begin + central_at + len(directory) + 16)
        directory += (
            struct.pack(
                "<IHHHHHHIIIHHHHHII",
                _CENTRAL,
                45,
                45 if wide else 20,
                0x800,
                0,
                0,
                0x21,
                crc,
                size,
                size,
                len(path),
                len(wide),
                0,
                0,
                0,
                0,
                min(offset, _MAX_UINT32),
            )
            + path
            + wide
        )
    length = len(directory)
    if central_at >= _MAX_UINT32 or length >= _MAX_UINT32 or len(entries) >= _MAX_UINT16:
        directory += struct.pack(
            "<IQHHIIQQQQ", _END64, 44, 45, 45, 0, 0, len(entries), len(entries), length, central_at
        )
        directory += struct.pack("<IIQI", _LOCATOR64, 0, central_at + length, 1)
    directory += struct.pack(
        "<IHHHHIIH",
        _END,
        0,
        0,
        min(len(entries), _MAX_UINT16),
        min(len(entries), _MAX_UINT16),
        min(length, _MAX_UINT32),
        min(central_at, _MAX_UINT32),
        0,
    )
    fixed[begin + central_at] = bytes(directory)
    places = dict(zip((path for path, *_ in entries), crc_places, strict=True))
    checksums = tuple(
        FileChecksum(first, last, (local, places[f"{root}/data/{key}".encode()]))
        for key, first, last, local in checks
        if last > first
    )
    return ArchiveLayout(TargetFile(name, begin + central_at + len(directory), fixed, checksums), starts)
