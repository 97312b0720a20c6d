"""Access to the bytes of a split's records, mapped from local files or read from a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from toolkit.data.checksums import (
    CHECKSUM_SUFFIX,
    FirstReadVerifier,
    MappedFile,
    make_checked_reader,
    map_checksums,
)
from toolkit.data.digest import FileDigest, check_file_size
from toolkit.data.manifest_file import resolve_file
from toolkit.data.remote.cache import BlockCache, CachedFile, read_cached
from toolkit.paths import Url
from toolkit.remote.errors import DATA
from toolkit.remote.fetch import RequestLimits
from toolkit.remote.storage import ByteRange, StoreFolder, open_folder

if TYPE_CHECKING:
    from toolkit.data.records.reader import RecordShard

Ints = npt.NDArray[np.int64]
Files = Sequence[tuple[str, FileDigest]]  # name, size and hash of each file


class RecordRows(Protocol):
    """The bytes of a split's records, local or remote."""

    def take(self, numbers: Ints) -> npt.NDArray[np.uint8]:
        """Return the records ``numbers`` [n]: [n, record_bytes]."""


class MappedRows:
    """Mapped local files. Opening takes constant time, and ranks share the page cache."""

    def __init__(
        self, folder: Path, shards: Sequence[RecordShard], row_bytes: int, *, checked: bool = False
    ) -> None:
        """
        Args:
            checked: all bytes of the split were already verified; otherwise each block is when first read.

        Raises:
            InputError: a file is absent or its size differs from the manifest's. Reading raises it for a
                damaged block.
        """
        files = [(resolve_file(folder, shard.file_name), shard.file) for shard in shards]
        # Bytes rather than structs, which numpy may copy field by field; plain arrays, which are faster than
        # memmap.
        self._shards = [
            np.asarray(
                np.memmap(
                    check_file_size(file, expected),
                    dtype=np.uint8,
                    mode="r",
                    shape=(expected.bytes // row_bytes, row_bytes),
                )
            )
            for file, expected in files
        ]
        self._row_bytes = row_bytes
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)
        self._firsts = np.concatenate([np.zeros(1, dtype=np.int64), self._ends[:-1]])
        self._first_read = (
            None
            if checked
            else FirstReadVerifier(
                [
                    MappedFile(
                        path,
                        rows.reshape(-1).data,
                        map_checksums(resolve_file(folder, shard.sums_name), shard.sums),
                    )
                    for (path, _), rows, shard in zip(files, self._shards, shards, strict=True)
                ]
            )
        )

    def take(self, numbers: Ints) -> npt.NDArray[np.uint8]:
        if self._first_read is not None:
            shard_index = np.searchsorted(self._ends, numbers, side="right")
            offsets = (numbers - self._firsts[shard_index]) * self._row_bytes
            self._first_read.check(
                self._first_read.units(shard_index, offsets),
                self._first_read.units(shard_index, offsets + self._row_bytes - 1),
            )
        if len(self._shards) == 1:
            return self._shards[0].take(numbers, axis=0)
        rows = np.empty((len(numbers), self._shards[0].shape[1]), dtype=np.uint8)
        shard_index = np.searchsorted(self._ends, numbers, side="right")
        for shard_number in np.unique(shard_index).tolist():
            selected = np.flatnonzero(shard_index == shard_number)
            shard = self._shards[shard_number]
            rows[selected] = shard.take(
                numbers[selected] - (int(self._ends[shard_number]) - len(shard)), axis=0
            )
        return rows


def check_store_sizes(location: Url, files: Files) -> None:
    """Check the sizes of ``files`` with one small request each, all at once.

    Raises InputError naming the first mismatch.
    """
    for (name, expected), size in zip(
        files, _folder(location).sizes([name for name, _ in files]), strict=True
    ):
        if size != expected.bytes:
            raise DATA.error(
                f"{location / name}: {size} bytes",
                f"the manifest has {expected.bytes} bytes",
                "restore the file, or write the records again",
            )


class StoreRows:
    """Records of one split in a store. Raises InputError if a file's size differs from the manifest's."""

    def __init__(
        self,
        location: Url,
        files: Mapping[str, FileDigest],
        row_bytes: int,
        *,
        cache: BlockCache | None = None,
        limits: RequestLimits | None = None,
    ) -> None:
        """
        Args:
            files: size and hash of each file, by name: the records in their order, and their checksums.
            cache: stores blocks of 32 KiB; None: records are fetched exactly whenever they are read.
        """
        self.folder = _folder(location, limits).for_reading(
            {name: expected.bytes for name, expected in files.items()}
        )
        self._reader = make_checked_reader(self.folder, files)
        self._names = [name for name in files if not name.endswith(CHECKSUM_SUFFIX)]
        self._files = {
            name: CachedFile(name, files[name].xxh3_128, files[name].bytes) for name in self._names
        }
        self._ends = np.cumsum([files[name].bytes // row_bytes for name in self._names], dtype=np.int64)
        self._row_bytes = row_bytes
        self._cache = cache

    def take(self, numbers: Ints) -> npt.NDArray[np.uint8]:
        which = np.searchsorted(self._ends, numbers, side="right")
        starts = (numbers - np.concatenate([[0], self._ends])[which]) * self._row_bytes
        ranges = [
            ByteRange(self._names[shard], start, start + self._row_bytes)
            for shard, start in zip(which.tolist(), starts.tolist(), strict=True)
        ]
        contents = (
            self._reader.read_ranges(ranges)
            if self._cache is None
            else read_cached(self._cache, self._reader, self._files, ranges)
        )
        rows = np.empty((len(numbers), self._row_bytes), dtype=np.uint8)
        for row, content in zip(rows, contents, strict=True):
            row[:] = np.frombuffer(content, dtype=np.uint8)
        return rows


def _folder(location: Url, limits: RequestLimits | None = None) -> StoreFolder:
    folder = open_folder(location, limits)
    assert isinstance(folder, StoreFolder)
    return folder
