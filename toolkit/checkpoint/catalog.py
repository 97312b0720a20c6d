"""The catalog of a checkpoint: which box of which tensor is stored in which bytes of which file. Imports no
torch.

Every format is read into a ``Catalog``; one planner (``planner.py``) decides which bytes are read, and
``piece_reader.py`` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.checkpoint.shard import Box, TensorInfo, TensorKey
from toolkit.paths import Location, UnsafePath, inside

# Bytes covered by one hash. Reading one byte of a block reads and verifies the whole block.
BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class DTypeInfo:
    code: str  # in a safetensors header
    itemsize: int  # bytes
    is_float: bool


DTYPES: Mapping[str, DTypeInfo] = {
    "float64": DTypeInfo("F64", 8, True),
    "float32": DTypeInfo("F32", 4, True),
    "bfloat16": DTypeInfo("BF16", 2, True),
    "float16": DTypeInfo("F16", 2, True),
    "float8_e4m3fn": DTypeInfo("F8_E4M3", 1, True),
    "float8_e5m2": DTypeInfo("F8_E5M2", 1, True),
    "int64": DTypeInfo("I64", 8, False),
    "int32": DTypeInfo("I32", 4, False),
    "int16": DTypeInfo("I16", 2, False),
    "int8": DTypeInfo("I8", 1, False),
    "uint8": DTypeInfo("U8", 1, False),
    "bool": DTypeInfo("BOOL", 1, False),
}
DTYPE_OF_CODE: Mapping[str, str] = {dtype.code: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    """Bytes ``begin .. end`` of ``file``, whose CRC-32 the archive's directory records."""

    file: str
    begin: int
    end: int
    crc: int


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A box of a tensor, stored row-major in bytes ``begin .. end`` of ``file``.

    Attributes:
        file: Path relative to the catalog's folder.
        hashes: xxh3-128 in hex of each ``BLOCK_BYTES`` from ``begin``; empty if the source has no hashes.
        transposed: The file stores the box with its last two dims swapped: ``[m, n]`` as ``[n, m]``.
        record: The archive record that contains the piece. Its CRC-32 is verified before the piece is read.
    """

    key: TensorKey
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    file: str
    begin: int
    end: int
    hashes: tuple[str, ...] = ()
    transposed: bool = False
    record: ArchiveRecord | None = None

    def __post_init__(self) -> None:
        assert not self.transposed or len(self.box.shape) > 1, (
            f"{self.key}: {self.box.shape} has no two dims to swap"
        )

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def shape_in_file(self) -> tuple[int, ...]:
        return swap_last_dims(self.box.shape) if self.transposed else self.box.shape


def swap_last_dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``shape`` with its last two dims swapped."""
    return (*shape[:-2], shape[-1], shape[-2])


@dataclass(frozen=True, slots=True)
class Catalog:
    """The pieces of each tensor. Every element of every tensor is in exactly one piece.

    Attributes:
        folder: The folder, or the URL in a store, that file names are relative to.
        tensors: Dtype and shape of each tensor.
        pieces: May create the pieces on access, because those of a large run would fill memory.
        scalars: What is not a tensor of parameter shape, as plain JSON types.
        copies: Further copies (tied or replicated) of elements in ``pieces``. Their values are only compared,
            never used.
    """

    folder: Location
    tensors: Mapping[TensorKey, TensorInfo]
    pieces: Mapping[TensorKey, tuple[TensorPiece, ...]]
    scalars: Mapping[str, object] = field(default_factory=dict)
    copies: Mapping[TensorKey, tuple[TensorPiece, ...]] = field(default_factory=dict)


class LazyPieces(Mapping[TensorKey, tuple[TensorPiece, ...]]):
    """Pieces of ``tensors`` that are created on each access and not stored, because those of a large
    layout would fill memory.
    """

    def __init__(
        self, tensors: Mapping[TensorKey, TensorInfo], make: Callable[[TensorKey], tuple[TensorPiece, ...]]
    ) -> None:
        self._tensors, self._make = tensors, make

    def __getitem__(self, key: TensorKey) -> tuple[TensorPiece, ...]:
        if key not in self._tensors:
            raise KeyError(key)
        return self._make(key)

    def __iter__(self) -> Iterator[TensorKey]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class DamagedFile(Exception):
    """A file that is missing or has unexpected content. Callers that know the remedy convert it to a
    CheckpointError.
    """

    def __init__(self, file: str, seen: str, rule: str) -> None:
        super().__init__(f"{file}: {seen} ({rule})")
        self.file, self.seen, self.rule = file, seen, rule


def resolve_file(folder: Path, name: object) -> Path:
    """Return the path of a file that a manifest, an index or a pickle names. Raises DamagedFile if it
    leads out of ``folder``.
    """
    try:
        return inside(folder, name)
    except UnsafePath as error:
        raise DamagedFile(
            "", f"{folder}: {error}", "the files of a checkpoint must be in its folder"
        ) from error


def block_count(numbytes: int) -> int:
    return -(-numbytes // BLOCK_BYTES)


def flat_span(shape: tuple[int, ...], box: Box) -> tuple[int, int]:
    """Return the smallest flat range of a row-major tensor of ``shape`` that contains the non-empty
    ``box``."""
    first = last = 0
    for size, offset, extent in zip(shape, box.offset, box.shape, strict=True):
        first = first * size + offset
        last = last * size + offset + extent - 1
    return first, last + 1


def byte_length(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize
