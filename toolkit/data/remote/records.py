"""Records that lie in a store: each is one range of one file, and all of a reading are asked for at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from toolkit.data.digest import Digest
from toolkit.data.remote.cache import BlockCache, CachedFile, read_cached
from toolkit.data.remote.fetch import Limits
from toolkit.data.remote.storage import Range, StoreFolder, Url, open_folder
from toolkit.data.sums import ENDING, checked_reader
from toolkit.errors import InputError, Problem

Ints = npt.NDArray[np.int64]
Files = Sequence[tuple[str, Digest]]  # name, and what the file must be


def survey_files(place: Url, files: Files) -> None:
    """The sizes of ``files``, one small request each, all at once. Raises InputError naming the first that is absent or has another."""
    for (name, expected), size in zip(files, _folder(place).sizes([name for name, _ in files]), strict=True):
        if size != expected.bytes:
            raise InputError(
                Problem(
                    "data.path",
                    f"{place / name}: {size} bytes",
                    f"the manifest says {expected.bytes} bytes",
                    "restore the file, or write the records again",
                )
            )


class StoreRows:
    """The rows of one split: see ``records.Rows``. An answer about a file of another size than the manifest says is an InputError."""

    def __init__(
        self,
        place: Url,
        files: Mapping[str, Digest],
        row_bytes: int,
        *,
        cache: BlockCache | None = None,
        limits: Limits | None = None,
    ) -> None:
        """
        Args:
            files: what each must be, by name: the records in their order, and the sums beside them.
            cache: where blocks of 32 KiB are kept; None: records are fetched exactly, each time that they are read.
        """
        self.folder = _folder(place, limits).for_reading(
            {name: expected.bytes for name, expected in files.items()}
        )
        self._reader = checked_reader(self.folder, files)
        self._names = [name for name in files if not name.endswith(ENDING)]
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
            Range(self._names[shard], start, start + self._row_bytes)
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


def _folder(place: Url, limits: Limits | None = None) -> StoreFolder:
    folder = open_folder(place, limits)
    assert isinstance(folder, StoreFolder)
    return folder
