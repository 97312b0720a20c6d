"""The tokens of a split as one long row: mapped from files here, or read from a store (remote.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from toolkit.data.digest import HASHED_AT_OPENING_BYTES, broken, check_bytes, check_size, digest
from toolkit.data.index import IndexFile
from toolkit.data.manifest import TOKENIZER, DataManifest, Shard, read_manifest
from toolkit.errors import InputError, Problem
from toolkit.progress import Progress

if TYPE_CHECKING:
    from toolkit.data.cache import BlockCache

Ints = npt.NDArray[np.int64]


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
    check_bytes([(manifest.file(name), expected) for name, expected in manifest.files.items()], Progress.silent())
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    _check_bytes(manifest, shards, progress)
    for shard in shards:
        _index(manifest, shard).check_contiguous()
    return manifest


def _check_tokenizer(manifest: DataManifest) -> None:
    file = manifest.file(f"{manifest.tokenizer.folder}/{TOKENIZER}")
    seen = digest(file).xxh3_128 if file.is_file() else "absent"
    if seen != manifest.tokenizer.hash:
        remedy = "put back the tokenizer that made the tokens, or prepare the data again"
        rule = f"the tokenizer beside the tokens made them: xxh3 {manifest.tokenizer.hash}"
        raise InputError(Problem(str(file), f"{file}: {seen}", rule, remedy))


def _check_bytes(manifest: DataManifest, shards: Sequence[Shard], progress: Progress) -> None:
    check_bytes([(manifest.file(f"{shard.name}{ending}"), expected)
                 for shard in shards for ending, expected in ((".bin", shard.bin), (".idx", shard.idx))], progress)


def _index(manifest: DataManifest, shard: Shard) -> IndexFile:
    index = IndexFile(check_size(manifest.file(f"{shard.name}.idx"), shard.idx))
    seen = (index.dtype.name, len(index.documents) - 1, index.bin_bytes // index.dtype.itemsize, index.bin_bytes)
    expected = (manifest.dtype, shard.documents, shard.tokens, shard.bin.bytes)
    if seen != expected:
        words = "dtype {}, {} documents, {} tokens, {} bytes"
        raise broken(index.path, words.format(*seen), f"the manifest says {words.format(*expected)}")
    return index


def _map(manifest: DataManifest, shard: Shard) -> npt.NDArray[Any]:
    """The tokens of one shard. A plain array: slicing a memmap object costs more than reading a short window."""
    dtype = _index(manifest, shard).dtype
    return np.asarray(np.memmap(check_size(manifest.file(f"{shard.name}.bin"), shard.bin), dtype=dtype, mode="r"))
