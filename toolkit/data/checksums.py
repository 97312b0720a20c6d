"""Block checksums of data files, which let a reader verify what it reads (``<name>.sums`` next to the data).

    block 0: bytes 0 .. 4096 -> xxh3-64, 8 bytes, little endian; block 1; ... the last block may be shorter

Checksums take 0.2% of the data's size. Training verifies a mapped file in units of 32 KiB, each once per
process, when a sample first touches it. Data in a store are verified whenever they come over the network.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.data.digest import FileDigest, check_file_size, damaged_file
from toolkit.paths import Location
from toolkit.remote.errors import DATA
from toolkit.remote.storage import Buffer, ByteRange, StoreFolder

Ints = npt.NDArray[np.int64]
Checksums = npt.NDArray[np.uint64]

CHECKSUM_SUFFIX = ".sums"
BLOCK = 4096  # bytes: windows of 4 KiB read one by one from a store take two or three blocks
UNIT = 8 * BLOCK  # of a mapped file: one flag per process for each unit, 32 MiB of flags for 1 TiB
CHECKSUM_DTYPE = np.dtype("<u8")
PAGE = 4096  # bytes of checksums fetched at once: those of 2 MiB of data
MAX_MERGED_BYTES = 1 << 20  # bytes of a range merged from several
CACHED_PAGES = 16384  # 64 MiB: the checksums of 32 GiB of data


def block_checksums(content: Buffer) -> list[int]:
    """Hash each block of ``content``, which starts at a block boundary."""
    hashed = xxhash.xxh3_64_intdigest
    return [hashed(content[first : first + BLOCK]) for first in range(0, len(content), BLOCK)]


class ChecksumBuilder:
    """Computes the checksums of a file written in chunks of any size."""

    def __init__(self) -> None:
        self._sums = array("Q")
        self._rest = bytearray()  # the beginning of an incomplete block

    def update(self, content: Buffer) -> None:
        content = memoryview(content).cast("B")
        if self._rest:
            missing = BLOCK - len(self._rest)
            self._rest += content[:missing]
            content = content[missing:]
            if len(self._rest) < BLOCK:
                return
            self._sums.extend(block_checksums(bytes(self._rest)))
            self._rest.clear()
        whole = len(content) // BLOCK * BLOCK
        self._sums.extend(block_checksums(content[:whole]))
        self._rest += content[whole:]

    def content(self) -> bytes:
        """Return the content of the ``.sums`` file, once all bytes were added."""
        return np.array([*self._sums, *block_checksums(bytes(self._rest))], dtype=CHECKSUM_DTYPE).tobytes()


def checksum_file_size(file_bytes: int) -> int:
    """Return the size of the ``.sums`` file of a data file."""
    return -(-file_bytes // BLOCK) * CHECKSUM_DTYPE.itemsize


# -- local files


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A mapped data file.

    Attributes:
        sums: None for a file written without checksums, which is not verified.
    """

    path: Path
    content: memoryview
    sums: Checksums | None


def map_checksums(path: Path, expected: FileDigest | None) -> Checksums | None:
    """Map the checksums in ``path``.

    Returns None if ``expected`` is None. Raises InputError if the size differs.
    """
    if expected is None:
        return None
    return (
        np.asarray(np.memmap(check_file_size(path, expected), dtype=CHECKSUM_DTYPE, mode="r"))
        if expected.bytes
        else np.empty(0, dtype=CHECKSUM_DTYPE)
    )


class FirstReadVerifier:
    """Verifies each unit of a split's mapped files once, when it is first read.

    Safe in several threads, which may verify a unit twice.
    """

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._files = files
        counts = [-(-len(file.content) // UNIT) for file in files]
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._first_units: list[int] = self._firsts.tolist()
        self._checked = np.zeros(int(self._firsts[-1]), dtype=bool)
        for number, file in enumerate(files):
            if file.sums is None:
                self._checked[self._firsts[number] : self._firsts[number + 1]] = True
        self._unverified = int(np.count_nonzero(~self._checked))
        self._lock = threading.Lock()

    def units(self, files: Ints, offsets: Ints) -> Ints:
        """Return the unit of each byte offset ``offsets`` [n] in the files ``files`` [n]."""
        return np.asarray(self._firsts[files] + offsets // UNIT, dtype=np.int64)

    def check(self, first: Ints, last: Ints) -> None:
        """Verify the units ``first[j] .. last[j]``, both included.

        Raises InputError naming file and bytes.
        """
        if not self._unverified or not len(first):
            return
        requested = np.minimum(first[:, None] + np.arange(int((last - first).max()) + 1), last[:, None])
        unchecked = np.unique(requested[~self._checked[requested]])
        for unit in unchecked.tolist():
            self._compare(unit)
            with self._lock:  # another thread may have verified the unit in the meantime
                self._unverified -= not self._checked[unit]
                self._checked[unit] = True

    def _compare(self, unit: int) -> None:
        number = bisect_right(self._first_units, unit) - 1
        file, start = self._files[number], (unit - self._first_units[number]) * UNIT
        assert file.sums is not None, f"{file.path} has no sums"
        content = file.content[start : start + UNIT]
        expected = file.sums[start // BLOCK : start // BLOCK + UNIT // BLOCK].tolist()
        computed = block_checksums(content)
        if computed == expected:
            return
        for index, (actual, expected_sum) in enumerate(zip(computed, expected, strict=True)):
            if actual != expected_sum:
                at = start + index * BLOCK
                raise damaged_file(
                    file.path,
                    f"bytes {at} to {min(at + BLOCK, len(file.content))} have xxh3 {actual:016x}",
                    f"{file.path.stem}{CHECKSUM_SUFFIX} has {expected_sum:016x}",
                )


# -- files in a store


class RangeReader(Protocol):
    """Reads ranges of files: a folder, or a ``CheckedReader`` around one."""

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[Buffer]: ...


def merge_ranges(ranges: Sequence[ByteRange]) -> tuple[list[ByteRange], list[int]]:
    """Merge ranges that touch or overlap into ranges of at most MAX_MERGED_BYTES, or one longer range.

    Returns the merged ranges and, for each of ``ranges``, the index of the merged range that contains it.
    """
    merged: list[ByteRange] = []
    owners = [0] * len(ranges)
    for number in sorted(range(len(ranges)), key=lambda number: (ranges[number].name, ranges[number].start)):
        item, last = ranges[number], merged[-1] if merged else None
        if (
            last is not None
            and last.name == item.name
            and item.start <= last.end
            and max(item.end, last.end) - last.start <= MAX_MERGED_BYTES
        ):
            merged[-1] = ByteRange(item.name, last.start, max(item.end, last.end))
        else:
            merged.append(item)
        owners[number] = len(merged) - 1
    return merged, owners


class CheckedReader:
    """Reads and verifies ranges from a store: widens them to whole blocks and fetches their checksums too.

    A block that does not match is fetched once more with its checksums, since it may have been damaged in
    transit.
    """

    def __init__(self, folder: RangeReader, location: Location, sizes: Mapping[str, int]) -> None:
        """
        Args:
            sizes: bytes of each file with checksums, by name. Other files are read without verification.
        """
        self._folder = folder
        self._location = location
        self._sizes = sizes
        self._cached_pages: dict[ByteRange, Checksums] = {}  # in the order in which pages were fetched
        self._lock = threading.Lock()

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[Buffer]:
        """Read each range. Raises InputError naming damaged bytes, and whatever the folder raises."""
        whole, owners = merge_ranges([self._widened(item) for item in ranges])
        contents, sums = self._read_with_checksums(whole, fresh=False)
        damaged = [
            number
            for number, item in enumerate(whole)
            if self._first_damaged_byte(item, contents[number], sums) is not None
        ]
        reread, sums = self._read_with_checksums([whole[number] for number in damaged], fresh=True)
        for number, content in zip(damaged, reread, strict=True):
            at = self._first_damaged_byte(whole[number], content, sums)
            if at is not None:
                name, end = whole[number].name, min(at + BLOCK, self._sizes[whole[number].name])
                raise DATA.error(
                    f"{self._location / name}: bytes {at} to {end} came twice with another hash",
                    f"a block has the hash in {_sums_name(name)}",
                    "restore the file, or prepare the data again",
                )
            contents[number] = content
        return [
            memoryview(contents[number])[item.start - whole[number].start : item.end - whole[number].start]
            for item, number in zip(ranges, owners, strict=True)
        ]

    def _widened(self, item: ByteRange) -> ByteRange:
        size = self._sizes.get(item.name)
        if size is None:
            return item
        return ByteRange(
            item.name, item.start // BLOCK * BLOCK, max(item.end, min(-(-item.end // BLOCK) * BLOCK, size))
        )

    def _checksum_pages(self, item: ByteRange) -> list[ByteRange]:
        """Return the checksum pages of a range of whole blocks."""
        size = self._sizes.get(item.name)
        if size is None:
            return []
        covered, total = PAGE // CHECKSUM_DTYPE.itemsize * BLOCK, checksum_file_size(size)
        return [
            ByteRange(_sums_name(item.name), number * PAGE, min((number + 1) * PAGE, total))
            for number in range(item.start // covered, -(-item.end // covered))
        ]

    def _read_with_checksums(
        self, whole: Sequence[ByteRange], *, fresh: bool
    ) -> tuple[list[Buffer], dict[ByteRange, Checksums]]:
        """Read whole blocks and their checksum pages; ``fresh`` ignores cached pages."""
        if not whole:
            return [], {}
        requested = dict.fromkeys(page for item in whole for page in self._checksum_pages(item))
        with self._lock:
            sums_by_page = (
                {}
                if fresh
                else {page: self._cached_pages[page] for page in requested if page in self._cached_pages}
            )
        missing = [page for page in requested if page not in sums_by_page]
        contents = self._folder.read_ranges([*whole, *missing])
        sums_by_page |= {
            page: np.frombuffer(content, dtype=CHECKSUM_DTYPE)
            for page, content in zip(missing, contents[len(whole) :], strict=True)
        }
        with self._lock:
            self._cached_pages |= {page: sums_by_page[page] for page in missing}
            for page in list(self._cached_pages)[: max(0, len(self._cached_pages) - CACHED_PAGES)]:
                del self._cached_pages[page]
        return contents[: len(whole)], sums_by_page

    def _first_damaged_byte(
        self, item: ByteRange, content: Buffer, sums_by_page: Mapping[ByteRange, Checksums]
    ) -> int | None:
        """Return the first byte of the first damaged block of a range, or None."""
        pages = self._checksum_pages(item)
        if not pages:
            return None
        sums = np.concatenate([sums_by_page[page] for page in pages])
        first = (item.start - pages[0].start // CHECKSUM_DTYPE.itemsize * BLOCK) // BLOCK
        seen_sums = block_checksums(content)
        for number, (actual, expected) in enumerate(
            zip(seen_sums, sums[first : first + len(seen_sums)].tolist(), strict=True)
        ):
            if actual != expected:
                return item.start + number * BLOCK
        return None


def make_checked_reader(folder: StoreFolder, files: Mapping[str, FileDigest]) -> CheckedReader:
    """Wrap ``folder`` for data files, some of which have checksums."""
    sizes = {
        name: expected.bytes
        for name, expected in files.items()
        if not name.endswith(CHECKSUM_SUFFIX) and _sums_name(name) in files
    }
    return CheckedReader(folder, folder.location, sizes)


def _sums_name(name: str) -> str:
    return f"{name.rpartition('.')[0]}{CHECKSUM_SUFFIX}"
