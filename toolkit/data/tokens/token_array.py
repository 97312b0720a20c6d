"""The tokens of a split as one long row, mapped from local files or read from a store (remote/tokens.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from toolkit.data.checksums import FirstReadVerifier, MappedFile, map_checksums
from toolkit.data.digest import (
    HASHED_AT_OPENING_BYTES,
    check_file_hashes,
    check_file_size,
    damaged_file,
    hash_file,
)
from toolkit.data.manifest import TOKENIZER_FILE, DataManifest, TokenShard, TokenSplit, read_manifest
from toolkit.data.tokens.index import IndexFile
from toolkit.errors import InputError, Problem
from toolkit.progress import Progress

if TYPE_CHECKING:
    from toolkit.data.remote.cache import BlockCache

Ints = npt.NDArray[np.int64]
Buffer = bytes | memoryview


class TokenSource(Protocol):
    """The tokens of one split as one long row, local or remote. Reading is safe in several threads."""

    @property
    def tokens(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype that can represent every token."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def data_hash(self) -> str: ...
    @property
    def tokenizer_hash(self) -> str: ...

    def read(self, starts: Ints, out: npt.NDArray[Any]) -> None:
        """Copy the tokens ``starts[j] .. starts[j] + length`` into row ``j`` of ``out`` [rows, length].

        All tokens must exist. ``out`` has dtype ``dtype`` or wider integers.
        """

    def windows(self, starts: Ints, length: int) -> list[Buffer]:
        """Return the bytes of the windows of ``length`` tokens from ``starts`` [n], in this order.

        All must exist.
        """


class MappedTokens:
    """A split in mapped local files. Opening takes constant time, and all ranks share the page cache."""

    def __init__(self, manifest: DataManifest, split: str, *, checked: bool = False) -> None:
        """
        Args:
            checked: all bytes of the split were already verified; otherwise each block is when first read.

        Raises:
            InputError: a file is absent or does not match the manifest. Reading raises it for a damaged
                block.
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
        self._bytes = [_map_shard(manifest, shard).data.cast("B") for shard in shards]
        self._ends = np.cumsum([shard.tokens for shard in shards], dtype=np.int64)
        self._firsts = np.concatenate([np.zeros(1, dtype=np.int64), self._ends[:-1]])
        self._first_read = (
            None
            if checked
            else FirstReadVerifier(
                [
                    MappedFile(
                        manifest.file(f"{shard.name}.bin"),
                        content,
                        map_checksums(manifest.file(f"{shard.name}.sums"), shard.sums),
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
        """Return views of the mapped files.

        Joining such views is as fast as one numpy gather from a single file, for any number of files.
        """
        if not len(starts):
            return []
        assert starts.min() >= 0, f"start {starts.min()}"
        assert starts.max() + length <= self.tokens, (
            f"window {starts.max()} + {length} of {self.tokens} tokens"
        )
        files = np.searchsorted(self._ends, starts, side="right")
        offsets = (starts - self._firsts[files]) * self.token_bytes
        if self._first_read is not None:
            last = starts + length - 1
            lasts = np.searchsorted(self._ends, last, side="right")
            self._first_read.check(
                self._first_read.units(files, offsets),
                self._first_read.units(lasts, (last - self._firsts[lasts]) * self.token_bytes),
            )
        firsts, size, buffers = offsets.tolist(), length * self.token_bytes, self._bytes
        result: list[Buffer] = [
            buffers[shard][first : first + size] for shard, first in zip(files.tolist(), firsts, strict=True)
        ]
        for row in np.flatnonzero(starts + length > self._ends[files]).tolist():
            result[row] = self._across(int(files[row]), firsts[row], size)
        return result

    def _across(self, shard: int, first: int, size: int) -> bytes:
        """Read ``size`` bytes from byte ``first`` of file ``shard`` that end in a later file."""
        parts = [self._bytes[shard][first:]]
        size -= len(parts[0])
        while size > 0:
            shard += 1
            parts.append(self._bytes[shard][:size])
            size -= len(parts[-1])
        return b"".join(parts)


def open_split(
    path: str | Path,
    split: str,
    *,
    cache: BlockCache | None = None,
    repeated: bool = False,
    files_checked: bool = False,
) -> TokenSource:
    """Open the tokens of ``split`` of the data folder ``path``, which may be a URL.

    Sizes, headers and the tokenizer are always checked. All bytes of a local split of up to 256 MiB are
    verified at once. Blocks of a larger split and of data in a store are verified when read, if the folder
    has checksums (manifest format 3).

    Args:
        cache, repeated: for data in a store, see ``RemoteTokens``.
        files_checked: another process has called ``check_remote_files`` at this start, so
            ranks need not query the store for every shard again.

    Raises:
        InputError: no such folder or split, or a file does not match the manifest.
    """
    manifest = read_manifest(path)
    chosen = manifest.split(split)
    _check_tokenizer(manifest)
    if manifest.url is not None:
        from toolkit.data.remote.tokens import RemoteTokens, check_remote_files

        if not files_checked:
            check_remote_files(manifest, [split])
        return RemoteTokens(manifest, split, cache=cache, repeated=repeated)
    whole = sum(expected.bytes for expected in chosen.files.values()) <= HASHED_AT_OPENING_BYTES
    if whole:
        _check_bytes(manifest, chosen, Progress.silent())
    return MappedTokens(manifest, split, checked=whole)


def verify_tokens(path: str | Path, progress: Progress) -> DataManifest:
    """Read every byte of the data folder and verify it.

    Raises InputError naming the first file that differs.
    """
    manifest = read_manifest(path)
    _check_tokenizer(manifest)
    check_file_hashes(
        [(manifest.file(name), expected) for name, expected in manifest.files.items()], Progress.silent()
    )
    whole = TokenSplit(tuple(shard for split in manifest.splits.values() for shard in split.shards))
    _check_bytes(manifest, whole, progress)
    for shard in whole.shards:
        _open_index(manifest, shard).check_contiguous()
    return manifest


def _check_tokenizer(manifest: DataManifest) -> None:
    file = manifest.file(f"{manifest.tokenizer.folder}/{TOKENIZER_FILE}")
    seen = hash_file(file).xxh3_128 if file.is_file() else "absent"
    if seen != manifest.tokenizer.hash:
        remedy = "put back the tokenizer that encoded the tokens, or prepare the data again"
        rule = f"the stored tokenizer is the one that encoded the tokens: xxh3 {manifest.tokenizer.hash}"
        raise InputError(Problem(str(file), f"{file}: {seen}", rule, remedy))


def _check_bytes(manifest: DataManifest, split: TokenSplit, progress: Progress) -> None:
    check_file_hashes([(manifest.file(name), expected) for name, expected in split.files.items()], progress)


def _open_index(manifest: DataManifest, shard: TokenShard) -> IndexFile:
    index = IndexFile(check_file_size(manifest.file(f"{shard.name}.idx"), shard.idx))
    seen = (
        index.dtype.name,
        len(index.documents) - 1,
        index.bin_bytes // index.dtype.itemsize,
        index.bin_bytes,
    )
    expected = (manifest.dtype, shard.documents, shard.tokens, shard.bin.bytes)
    if seen != expected:
        template = "dtype {}, {} documents, {} tokens, {} bytes"
        raise damaged_file(
            index.path, template.format(*seen), f"the manifest has {template.format(*expected)}"
        )
    return index


def _map_shard(manifest: DataManifest, shard: TokenShard) -> npt.NDArray[Any]:
    """Map the tokens of one shard as a plain array, which is faster to slice than a memmap object."""
    dtype = _open_index(manifest, shard).dtype
    return np.asarray(
        np.memmap(check_file_size(manifest.file(f"{shard.name}.bin"), shard.bin), dtype=dtype, mode="r")
    )
