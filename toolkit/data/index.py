"""Megatron's indexed token files: ``<name>.bin`` holds tokens, ``<name>.idx`` where sequences and documents lie.

Layout of ``.idx`` (little endian; ``IndexedDataset`` of megatron-core 0.16, ``core/datasets/indexed_dataset.py``):

    9 bytes        magic
    u64            version, 1
    u8             code of the token's dtype
    u64            sequences
    u64            length of the document index: documents + 1
    i32[sequences] tokens in each sequence
    i64[sequences] byte offset of each sequence in .bin
    i64[documents + 1] first sequence of each document, and the end

This toolkit writes one sequence a document and reads any file whose sequences follow one another without gaps.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from toolkit.data.digest import broken, check_bytes, check_size, digest
from toolkit.data.manifest import DataManifest, Shard, read_manifest
from toolkit.errors import InputError, Problem
from toolkit.progress import Progress

if TYPE_CHECKING:
    from toolkit.data.cache import BlockCache

Ints = npt.NDArray[np.int64]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}.items()
}  # fmt: skip
# Up to here opening a split hashes it whole (well under a second); beyond, sizes and headers are checked and `verify` hashes.
HASHED_AT_OPENING_BYTES = 256 << 20


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Megatron's own rule (``DType.optimal_dtype``)."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def index_bytes(dtype: np.dtype[Any], lengths: npt.NDArray[np.int32]) -> bytes:
    """The whole ``.idx`` of documents of ``lengths`` tokens, one sequence each."""
    code = next(code for code, known in CODES.items() if known == dtype)
    pointers = np.zeros(len(lengths), dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    header = HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    return b"".join((header, lengths.astype("<i4").tobytes(), (pointers * dtype.itemsize).tobytes(), documents.tobytes()))


class IndexFile:
    """One ``.idx``, mapped: opening reads its header and its ends, whatever its size.

    Attributes:
        lengths: int32 [sequences], tokens.
        pointers: int64 [sequences], bytes.
        documents: int64 [documents + 1], sequences.
    """

    def __init__(self, path: Path) -> None:
        """Raises InputError where the file is no index, is cut short or contradicts itself."""
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise broken(path, f"{size} bytes, starting with {head[:9]!r}", "an .idx file starts with Megatron's header")
        _, version, code, sequences, ends = HEADER.unpack(head)
        if version != 1 or code not in CODES or ends < 1:
            seen = f"version={version}, dtype code={code}, document index of {ends}"
            raise broken(path, seen, "the header has version 1, a known dtype and a document index")
        expected = HEADER.size + sequences * 12 + ends * 8
        if size != expected:
            raise broken(path, f"{size} bytes", f"with {sequences} sequences and {ends - 1} documents it has {expected} bytes")
        self.dtype = CODES[code]
        content = np.memmap(path, dtype=np.uint8, mode="r")
        places = (HEADER.size, HEADER.size + 4 * sequences, HEADER.size + 12 * sequences)
        self.lengths = np.frombuffer(content, "<i4", sequences, places[0])
        self.pointers = np.frombuffer(content, "<i8", sequences, places[1])
        self.documents = np.frombuffer(content, "<i8", ends, places[2])
        if self.documents[0] != 0 or self.documents[-1] != sequences:
            seen = f"documents from sequence {self.documents[0]} to {self.documents[-1]}"
            raise broken(path, seen, f"they cover sequences 0 to {sequences}")

    @property
    def bin_bytes(self) -> int:
        """The size that ``.bin`` must have."""
        return int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self.lengths) else 0

    def check_contiguous(self) -> None:
        """Every sequence starts where the one before ends: O(sequences). Raises InputError."""
        ends = self.pointers + self.lengths.astype(np.int64) * self.dtype.itemsize
        gaps = np.flatnonzero(ends[:-1] != self.pointers[1:])
        if len(self.lengths) and (self.pointers[0] != 0 or gaps.size):
            seen = f"sequence {int(gaps[0]) + 1 if gaps.size else 0} starts elsewhere"
            raise broken(self.path, seen, "sequences follow one another from byte 0 on")


class TokenSource(Protocol):
    """Tokens of one split as one long row, wherever they are kept. Reading is safe in several threads."""

    @property
    def tokens(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    @property
    def dtype(self) -> np.dtype[Any]:
        """That holds every token."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def data_hash(self) -> str: ...
    @property
    def tokenizer_hash(self) -> str: ...

    def read(self, starts: Ints, out: npt.NDArray[Any]) -> None:
        """Row ``j`` of ``out`` [rows, length] becomes the tokens ``starts[j] .. starts[j] + length``, all of which exist.
        ``out`` is of ``dtype`` or wider integers."""


class MappedTokens:
    """A split in local files, mapped: opening costs nothing that grows with the data, and every rank shares the page cache."""

    def __init__(self, manifest: DataManifest, split: str) -> None:
        """Raises InputError where a file is absent or is not what the manifest says."""
        self.manifest = manifest
        self.split = manifest.split(split)
        self.tokens = self.split.tokens
        self.vocab_size = manifest.tokenizer.size
        self.data_hash = self.split.data_hash
        self.tokenizer_hash = manifest.tokenizer.hash
        self.dtype = np.dtype(manifest.dtype)
        self.token_bytes = self.dtype.itemsize
        self._shards = [_map(manifest, shard) for shard in self.split.shards if shard.tokens]
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)

    def read(self, starts: Ints, out: npt.NDArray[Any]) -> None:
        length = out.shape[1]
        assert len(starts) == len(out), f"{len(starts)} starts for {len(out)} rows"
        if not out.size:
            return
        assert starts.min() >= 0, f"start {starts.min()}"
        assert starts.max() + length <= self.tokens, f"window {starts.max()} + {length} of {self.tokens} tokens"
        if len(self._shards) == 1:
            out[:] = self._windows(0, length)[starts]
            return
        numbers = np.searchsorted(self._ends, starts, side="right")
        inside = starts + length <= self._ends[numbers]
        for number in np.unique(numbers[inside]).tolist():
            rows = np.flatnonzero(inside & (numbers == number))
            first = int(self._ends[number]) - len(self._shards[number])
            out[rows] = self._windows(number, length)[starts[rows] - first]
        for row in np.flatnonzero(~inside).tolist():
            self._read_row(out[row], int(starts[row]), int(numbers[row]))

    def _windows(self, number: int, length: int) -> npt.NDArray[Any]:
        """Every window of ``length`` tokens of a shard, as a view: a row each, gathered by numpy and not by a Python loop."""
        shard = self._shards[number]
        return as_strided(shard, (len(shard) - length + 1, length), (shard.itemsize, shard.itemsize), writeable=False)

    def _read_row(self, row: npt.NDArray[Any], start: int, number: int) -> None:
        """A window that lies in several shards."""
        filled = 0
        while filled < len(row):
            shard = self._shards[number]
            first = start + filled - (int(self._ends[number]) - len(shard))
            part = shard[first : first + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)
            number += 1


def open_split(
    path: str | Path, split: str, *, cache: BlockCache | None = None, repeated: bool = False, surveyed: bool = False
) -> TokenSource:
    """The tokens of ``split`` of the data folder ``path``, which may be a URL.

    Sizes, headers and the tokenizer are checked always, and on this machine all bytes of a split of up to 256 MiB.

    Args:
        cache, repeated: of data in a store, see ``RemoteTokens``.
        surveyed: another process has done ``remote.survey`` for this start: ranks do not ask a store for every shard again.

    Raises:
        InputError: no such folder or split, or a file that is not what the manifest says.
    """
    manifest = read_manifest(path)
    chosen = manifest.split(split)
    _check_tokenizer(manifest)
    if manifest.url is not None:
        from toolkit.data.remote import RemoteTokens, survey  # with it comes what speaks to stores

        if not surveyed:
            survey(manifest, [split])
        return RemoteTokens(manifest, split, cache=cache, repeated=repeated)
    if sum(shard.bin.bytes + shard.idx.bytes for shard in chosen.shards) <= HASHED_AT_OPENING_BYTES:
        _check_bytes(manifest, chosen.shards, Progress.silent())
    return MappedTokens(manifest, split)


def verify(path: str | Path, progress: Progress) -> DataManifest:
    """Read every byte of the data folder and compare. Raises InputError naming the first file that differs."""
    manifest = read_manifest(path)
    _check_tokenizer(manifest)
    check_bytes([(manifest.folder / name, expected) for name, expected in manifest.files.items()], Progress.silent())
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    _check_bytes(manifest, shards, progress)
    for shard in shards:
        _index(manifest, shard).check_contiguous()
    return manifest


def _check_tokenizer(manifest: DataManifest) -> None:
    file = manifest.tokenizer_folder / "tokenizer.json"
    seen = digest(file).xxh3_128 if file.is_file() else "absent"
    if seen != manifest.tokenizer.hash:
        remedy = "put back the tokenizer that made the tokens, or prepare the data again"
        rule = f"the tokenizer beside the tokens made them: xxh3 {manifest.tokenizer.hash}"
        raise InputError(Problem(str(file), f"{file}: {seen}", rule, remedy))


def _check_bytes(manifest: DataManifest, shards: Sequence[Shard], progress: Progress) -> None:
    check_bytes([(manifest.folder / f"{shard.name}{ending}", expected)
                 for shard in shards for ending, expected in ((".bin", shard.bin), (".idx", shard.idx))], progress)


def _index(manifest: DataManifest, shard: Shard) -> IndexFile:
    index = IndexFile(check_size(manifest.folder / f"{shard.name}.idx", shard.idx))
    seen = (index.dtype.name, len(index.documents) - 1, index.bin_bytes // index.dtype.itemsize, index.bin_bytes)
    expected = (manifest.dtype, shard.documents, shard.tokens, shard.bin.bytes)
    if seen != expected:
        words = "dtype {}, {} documents, {} tokens, {} bytes"
        raise broken(index.path, words.format(*seen), f"the manifest says {words.format(*expected)}")
    return index


def _map(manifest: DataManifest, shard: Shard) -> npt.NDArray[Any]:
    """The tokens of one shard. A plain array: slicing a memmap object costs more than reading a short window."""
    dtype = _index(manifest, shard).dtype
    return np.asarray(np.memmap(check_size(manifest.folder / f"{shard.name}.bin", shard.bin), dtype=dtype, mode="r"))
