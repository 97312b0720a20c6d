"""Write token shards. A shard's files appear complete under their names when it is closed."""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.data.checksums import CHECKSUM_SUFFIX, ChecksumBuilder
from toolkit.data.digest import FileDigest
from toolkit.data.manifest import TokenShard, TokenSplit
from toolkit.data.tokens.index import encode_index
from toolkit.files import sync_folder, write_whole

SHARD_BYTES = 2 << 30


class HashedFile:
    """A file that is hashed while written; it appears under its name when closed, after its ``.sums``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
        self._file = self._partial.open("wb")
        self._hasher = xxhash.xxh3_128()
        self._sums = ChecksumBuilder()
        self.bytes = 0

    def write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._hasher.update(content)
        self._sums.update(content)
        self.bytes += memoryview(content).nbytes

    def close(self) -> tuple[FileDigest, FileDigest]:
        """Return size and hash of the file and of its ``.sums`` file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sums = write_checksums(self._path, self._sums.content())
        self._partial.replace(self._path)
        return FileDigest(self.bytes, self._hasher.hexdigest()), sums

    def discard(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


def write_checksums(path: Path, content: bytes) -> FileDigest:
    """Write the ``.sums`` file of the data file ``path``."""
    write_whole(path.with_suffix(CHECKSUM_SUFFIX), content)
    return FileDigest(len(content), xxhash.xxh3_128_hexdigest(content))


class ShardWriter:
    """Writes ``<name>.bin``, ``<name>.idx`` and ``<name>.sums``.

    Memory: four bytes per document and eight per 4 KiB of tokens.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any]) -> None:
        self._folder = folder
        self._name = name
        self._dtype = dtype
        self._file = HashedFile(folder / f"{name}.bin")
        self._lengths = array("i")

    @property
    def bytes(self) -> int:
        return self._file.bytes

    def add(self, document: npt.NDArray[Any]) -> None:
        """Add one document's tokens [tokens], with its closing end-of-text; every id must fit the dtype."""
        self._file.write(document.astype(self._dtype, copy=False).tobytes())
        self._lengths.append(len(document))

    def close(self) -> TokenShard:
        tokens, sums = self._file.close()
        index = encode_index(self._dtype, np.frombuffer(self._lengths, dtype=np.int32))
        write_whole(self._folder / f"{self._name}.idx", index)
        idx = FileDigest(len(index), xxhash.xxh3_128_hexdigest(index))
        return TokenShard(
            self._name, len(self._lengths), tokens.bytes // self._dtype.itemsize, tokens, idx, sums
        )

    def discard(self) -> None:
        self._file.discard()


class SplitWriter:
    """Writes the shards ``<split>-00000``, ``<split>-00001`` ... of a split without cutting documents.

    As a context manager it removes the unfinished shard after an error.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype[Any], shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._shard_bytes = shard_bytes
        self._shards: list[TokenShard] = []
        self._current: ShardWriter | None = None

    def add(self, document: npt.NDArray[Any]) -> None:
        if (
            self._current is not None
            and self._current.bytes + document.size * self._dtype.itemsize > self._shard_bytes
        ):
            self._end_shard()
        if self._current is None:
            self._current = ShardWriter(self._folder, f"{self._split}-{len(self._shards):05}", self._dtype)
        self._current.add(document)

    def close(self) -> TokenSplit:
        self._end_shard()
        sync_folder(self._folder)
        return TokenSplit(tuple(self._shards))

    def _end_shard(self) -> None:
        if self._current is not None:
            self._shards.append(self._current.close())
            self._current = None

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._current is not None:
            self._current.discard()
            self._current = None
