"""Tensors in files of ``torch.save``, described by their position. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.checkpoint.catalog import ArchiveRecord

# Torch's storage classes -> dtype of their elements.
STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "Float8_e4m3fnStorage": "float8_e4m3fn",
    "Float8_e5m2Storage": "float8_e5m2",
}
STORAGE_OF_DTYPE: Mapping[str, str] = {dtype: name for name, dtype in STORAGES.items()}


@dataclass(frozen=True, slots=True)
class Storage:
    """``numel`` elements of one dtype: at byte ``begin`` of a file (reading), or in record ``key`` of a file
    (writing).

    Attributes:
        key: Name of the record.
        dtype: Torch's name.
        numel: Number of elements.
        file: File that contains it.
        begin: First byte in the file.
        content: The bytes, if they are known when a file is laid out (a step count); otherwise pieces fill
            it.
        record: The archive record that contains it.
    """

    key: str
    dtype: str
    numel: int
    file: str = ""
    begin: int = 0
    content: bytes = b""
    record: ArchiveRecord | None = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that has not been read. ``offset`` and ``strides`` count elements of the storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @staticmethod
    def whole(storage: Storage, shape: tuple[int, ...]) -> StoredTensor:
        """Return a row-major tensor that starts at element 0 of ``storage``."""
        return StoredTensor(storage, 0, shape, row_major(shape))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
