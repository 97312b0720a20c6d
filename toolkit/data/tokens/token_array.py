"""The tokens of a split as one long row: mapped from files here, or read from a store (remote.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from toolkit.data.digest import HASHED_AT_OPENING_BYTES, broken, check_bytes, check_size, digest
from toolkit.data.manifest import TOKENIZER, DataManifest, Shard, Split, read_manifest
from toolkit.data.sums import FirstRead, MappedFile, mapped_sums
from toolkit.data.tokens.index import IndexFile
from toolkit.errors import InputError, Problem
from toolkit.progress import Progress

if TYPE_CHECKING:
    from toolkit.data.remote.cache import BlockCache

Ints = npt.NDArray[np.int64]
Buffer = bytes | memoryview


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

    def windows(self, starts: Ints, length: int) -> list[Buffer]:
        """The bytes of the windows of ``length`` tokens from ``starts`` [n] on, all of which exist, in the order of ``starts``."""


class MappedTokens:
    """A split in local files, mapped: opening costs nothing that grows with the data, and every rank shares the page cache."""

    def __init__(self, manifest: DataManifest, split: str, *, checked: bool = False) -> None:
        """
        Args:
            checked: all bytes of the split were compared with their hashes already; else each block is when it is first read.

        Raises:
            InputError: a file is absent or is not what the manifest says. Reading raises it for a damaged block.
        """
        self.manifest = manifest
        self.split = manifest.split(split)
        self.tokens = self.split.tokens
        self.vocab_size = manifest.tokenizer.size
        self.data_hash = self.split.data_hash
        self.tokenizer_hash = manifest.tokenizer.hash
        self.dtype = np.dtype(manifest.dtype)
        self.token_bytes = self.dtype.itemsize
        shards = [shard for shard in self.split.shards if shard.tokens]
        self._bytes = [_map(manifest, shard).data.cast("B") for shard in shards]
        self._ends = np.cumsum([shard.tokens for shard in shards], dtype=np.int64)
        self._firsts = np.concatenate([np.zeros(1, dtype=np.int64), self._ends[:-1]])
        self._first_read = (
            None
            if checked
            else FirstRead(
                [
                    MappedFile(
                        manifest.file(f"{shard.name}.bin"),
                        content,
                        mapped_sums(manifest.file(f"{shard.name}.sums"), shard.sums),
                    )
                    for shard, content in zip(shards, self._bytes, strict=True)
                ]
            )
        )

    def read(self, starts: Ints, out: npt.NDArray[Any]) -> None:
        assert len(starts) == len(out), f"{len(starts)} starts for {len(out)} rows"
        for row, window in zip(out, self.windows(starts, out.shape[1]), strict=True):
            row[:] = np.frombuffer(window, self.dtype)

    def windows(self, starts: Ints, length: int) -> list[Buffer]:
        """Views of the maps. Joining such views copies a batch as fast as one gather by numpy does from a single file, and costs the
        same for any number of files."""
        if not len(starts):
            return []
        assert starts.min() >= 0, f"start {starts.min()}"
        assert starts.max() + length <= self.tokens, (
            f"window {starts.max()} + {length} of {self.tokens} tokens"
        )
        numbers = np.searchsorted(self._ends, starts, side="right")
        places = (starts - self._firsts[numbers]) * self.token_bytes
        if self._first_read is not None:
            last = starts + length - 1
            lasts = np.searchsorted(self._ends, last, side="right")
            self._first_read.check(
                self._first_read.units(numbers, places),
                self._first_read.units(lasts, (last - self._firsts[lasts]) * self.token_bytes),
            )
        firsts, size, files = places.tolist(), length * self.token_bytes, self._bytes
        found: list[Buffer] = [
            files[number][first : first + size]
            for number, first in zip(numbers.tolist(), firsts, strict=True)
        ]
        for row in np.flatnonzero(starts + length > self._ends[numbers]).tolist():
            found[row] = self._across(int(numbers[row]), firsts[row], size)
        return found

    def _across(self, number: int, first: int, size: int) -> bytes:
        """``size`` bytes from byte ``first`` of file ``number`` on, which end in a later file."""
        parts = [self._bytes[number][first:]]
        size -= len(parts[0])
        while size > 0:
            number += 1
            parts.append(self._bytes[number][:size])
            size -= len(parts[-1])
        return b"".join(parts)


def open_split(
    path: str | Path,
    split: str,
    *,
    cache: BlockCache | None = None,
    repeated: bool = False,
    surveyed: bool = False,
) -> TokenSource:
    """The tokens of ``split`` of the data folder ``path``, which may be a URL.

    Sizes, headers and the tokenizer are checked always, and on this machine all bytes of a split of up to 256 MiB. Of a larger split and
    of data in a store each block is checked when it is read, if the folder has sums (format 3 of the manifest).

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
        from toolkit.data.remote.tokens import RemoteTokens, survey  # with it comes what speaks to stores

        if not surveyed:
            survey(manifest, [split])
        return RemoteTokens(manifest, split, cache=cache, repeated=repeated)
    whole = sum(expected.bytes for expected in chosen.files.values()) <= HASHED_AT_OPENING_BYTES
    if whole:
        _check_bytes(manifest, chosen, Progress.silent())
    return MappedTokens(manifest, split, checked=whole)


def verify(path: str | Path, progress: Progress) -> DataManifest:
    """Read every byte of the data folder and compare. Raises InputError naming the first file that differs."""
    manifest = read_manifest(path)
    _check_tokenizer(manifest)
    check_bytes(
        [(manifest.file(name), expected) for name, expected in manifest.files.items()], Progress.silent()
    )
    whole = Split(tuple(shard for split in manifest.splits.values() for shard in split.shards))
    _check_bytes(manifest, whole, progress)
    for shard in whole.shards:
        _index(manifest, shard).check_contiguous()
    return manifest


def _check_tokenizer(manifest: DataManifest) -> None:
    file = manifest.file(f"{manifest.tokenizer.folder}/{TOKENIZER}")
    seen = digest(file).xxh3_128 if file.is_file() else "absent"
    if seen != manifest.tokenizer.hash:
        remedy = "put back the tokenizer that made the tokens, or prepare the data again"
        rule = f"the tokenizer beside the tokens made them: xxh3 {manifest.tokenizer.hash}"
        raise InputError(Problem(str(file), f"{file}: {seen}", rule, remedy))


def _check_bytes(manifest: DataManifest, split: Split, progress: Progress) -> None:
    check_bytes([(manifest.file(name), expected) for name, expected in split.files.items()], progress)


def _index(manifest: DataManifest, shard: Shard) -> IndexFile:
    index = IndexFile(check_size(manifest.file(f"{shard.name}.idx"), shard.idx))
    seen = (
        index.dtype.name,
        len(index.documents) - 1,
        index.bin_bytes // index.dtype.itemsize,
        index.bin_bytes,
    )
    expected = (manifest.dtype, shard.documents, shard.tokens, shard.bin.bytes)
    if seen != expected:
        words = "dtype {}, {} documents, {} tokens, {} bytes"
        raise broken(index.path, words.format(*seen), f"the manifest says {words.format(*expected)}")
    return index


def _map(manifest: DataManifest, shard: Shard) -> npt.NDArray[Any]:
    """The tokens of one shard. A plain array: slicing a memmap object costs more than reading a short window."""
    dtype = _index(manifest, shard).dtype
    return np.asarray(
        np.memmap(check_size(manifest.file(f"{shard.name}.bin"), shard.bin), dtype=dtype, mode="r")
    )
