"""Read and write the header of a safetensors file, so that data can be streamed and hashed. Imports no torch.

A file is 8 bytes with the header's length (little endian), a JSON header padded with spaces, and the tensors'
bytes without gaps: https://huggingface.co/docs/safetensors/index#format.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.catalog import DTYPE_OF_CODE, DTYPES, DamagedFile, byte_length

ALIGNMENT = 64  # of the first tensor, so that tensors of a memory-mapped file are aligned
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
RULE = "a safetensors file is a header and the bytes that the header describes"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in bytes ``begin .. end`` of a file."""

    name: str
    dtype: str  # torch's name
    shape: tuple[int, ...]
    begin: int
    end: int


def encode_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[TensorEntry]]:
    """Return the header for tensors of (name, dtype, shape), and the position of each.

    Wide dtypes come first, so that every tensor is aligned to its itemsize; otherwise the order is kept.
    """
    ordered = sorted(tensors, key=lambda tensor: -DTYPES[tensor[1]].itemsize)
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    at, relative = 0, []
    for name, dtype, shape in ordered:
        end = at + byte_length(dtype, shape)
        assert name not in fields, f"{name} twice in one file"
        fields[name] = {"dtype": DTYPES[dtype].code, "shape": list(shape), "data_offsets": [at, end]}
        relative.append(TensorEntry(name, dtype, shape, at, end))
        at = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    header = struct.pack("<Q", length - 8) + text.ljust(length - 8)
    assert length <= MAX_HEADER_BYTES, f"a header of {length} bytes"
    return header, [
        TensorEntry(entry.name, entry.dtype, entry.shape, entry.begin + length, entry.end + length)
        for entry in relative
    ]


def read_header(path: Path) -> tuple[list[TensorEntry], dict[str, str]]:
    """Return the tensors of a file and its metadata, checked against each other and the file's size.
    Raises DamagedFile.
    """
    if not path.is_file():
        raise DamagedFile(path.name, f"{path} is missing", RULE)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size or length > MAX_HEADER_BYTES:
            raise DamagedFile(path.name, f"{path} has {size} bytes, fewer than its header asks for", RULE)
        text = file.read(length)
    try:
        fields = json.loads(text)
        metadata = fields.pop("__metadata__", {})
        entries = [_slot(name, entry, 8 + length) for name, entry in fields.items()]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedFile(path.name, f"{path} has an unreadable header ({error})", RULE) from error
    at = 8 + length
    for tensor in sorted(entries, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != at:
            raise DamagedFile(
                path.name,
                f"{tensor.name} in {path} begins at byte {tensor.begin}, the tensor before it ends at {at}",
                RULE,
            )
        at = tensor.end
        if tensor.end - tensor.begin != byte_length(tensor.dtype, tensor.shape):
            raise DamagedFile(
                path.name,
                f"{tensor.name} in {path} has {tensor.end - tensor.begin} bytes for {tensor.dtype} "
                f"{tensor.shape}",
                RULE,
            )
    if size != at:
        raise DamagedFile(path.name, f"{path} has {size} bytes, but its header describes {at}", RULE)
    return entries, metadata


def _slot(name: str, entry: Mapping[str, Any], base: int) -> TensorEntry:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(count) is not int or count < 0 for count in (begin, end, *shape)):
        raise ValueError(f"{name} has shape {str(shape)[:100]} in bytes {begin}..{end}")
    return TensorEntry(name, DTYPE_OF_CODE[entry["dtype"]], shape, base + begin, base + end)
