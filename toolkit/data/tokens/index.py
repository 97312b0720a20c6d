"""Megatron's indexed token files: ``<name>.bin`` (tokens) and ``<name>.idx`` (sequences, documents).

Layout of ``.idx`` (little endian; ``IndexedDataset`` of megatron-core 0.16,
``core/datasets/indexed_dataset.py``):

    9 bytes        magic
    u64            version, 1
    u8             code of the token's dtype
    u64            sequences
    u64            length of the document index: documents + 1
    i32[sequences] tokens in each sequence
    i64[sequences] byte offset of each sequence in .bin
    i64[documents + 1] first sequence of each document, and the end

This toolkit writes one sequence per document and reads any file whose sequences follow one another without
gaps.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.digest import damaged_file

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}.items()
}  # fmt: skip


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the token dtype by Megatron's rule (``DType.optimal_dtype``)."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def encode_index(dtype: np.dtype[Any], lengths: npt.NDArray[np.int32]) -> bytes:
    """Encode the ``.idx`` file of documents of ``lengths`` tokens, one sequence each."""
    code = next(code for code, candidate in DTYPE_CODES.items() if candidate == dtype)
    pointers = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    header = HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    return b"".join(
        (header, lengths.astype("<i4").tobytes(), (pointers * dtype.itemsize).tobytes(), documents.tobytes())
    )


class IndexFile:
    """A mapped ``.idx`` file. Opening reads only its header and its ends.

    Attributes:
        lengths: tokens of each sequence, int32 [sequences].
        pointers: byte offset of each sequence, int64 [sequences].
        documents: first sequence of each document and the end, int64 [documents + 1].
    """

    def __init__(self, path: Path) -> None:
        """Raise InputError if the file is not an index, is truncated or contradicts itself."""
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise damaged_file(
                path,
                f"{size} bytes, starting with {head[:9]!r}",
                "an .idx file starts with Megatron's header",
            )
        _, version, code, sequences, ends = HEADER.unpack(head)
        if version != 1 or code not in DTYPE_CODES or ends < 1:
            seen = f"version={version}, dtype code={code}, document index of {ends}"
            raise damaged_file(path, seen, "the header has version 1, a known dtype and a document index")
        expected = HEADER.size + sequences * 12 + ends * 8
        if size != expected:
            raise damaged_file(
                path,
                f"{size} bytes",
                f"with {sequences} sequences and {ends - 1} documents it has {expected} bytes",
            )
        self.dtype = DTYPE_CODES[code]
        content = np.memmap(path, dtype=np.uint8, mode="r")
        offsets = (HEADER.size, HEADER.size + 4 * sequences, HEADER.size + 12 * sequences)
        self.lengths = np.frombuffer(content, "<i4", sequences, offsets[0])
        self.pointers = np.frombuffer(content, "<i8", sequences, offsets[1])
        self.documents = np.frombuffer(content, "<i8", ends, offsets[2])
        if self.documents[0] != 0 or self.documents[-1] != sequences:
            seen = f"documents from sequence {self.documents[0]} to {self.documents[-1]}"
            raise damaged_file(path, seen, f"they cover sequences 0 to {sequences}")

    @property
    def bin_bytes(self) -> int:
        """Size that ``.bin`` must have."""
        return (
            int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self.lengths) else 0
        )

    def check_contiguous(self) -> None:
        """Raise InputError unless every sequence starts where the one before ends.

        Takes O(sequences) time.
        """
        ends = self.pointers + self.lengths.astype(np.int64) * self.dtype.itemsize
        gaps = np.flatnonzero(ends[:-1] != self.pointers[1:])
        if len(self.lengths) and (self.pointers[0] != 0 or gaps.size):
            seen = f"sequence {int(gaps[0]) + 1 if gaps.size else 0} starts elsewhere"
            raise damaged_file(self.path, seen, "sequences follow one another from byte 0 on")
