"""Sums of a data file's blocks, which let a reader check the part that it reads: ``<name>.sums`` beside ``<name>.bin`` or ``.records``.

    block 0: bytes 0 .. 4096 -> xxh3-64, 8 bytes, little endian; block 1; ... the last block may be shorter

They take 0.2% of the data's size. Training checks a mapped file in units of 32 KiB, each of them once in a process, when a sample first
touches it and before that sample is handed over. Data in a store are checked each time they come over the network.
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

from toolkit.data.digest import Digest, broken, check_size
from toolkit.data.remote.storage import Buffer, Place, Range, StoreFolder
from toolkit.errors import InputError, Problem

Ints = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]

ENDING = ".sums"
BLOCK = 4096  # bytes: windows of 4 KiB that are read one by one from a store take two or three of them
UNIT = 8 * BLOCK  # of a mapped file: one mark of a process for each, 32 MiB of them for 1 TiB
SUM = np.dtype("<u8")
PAGE = 4096  # bytes of sums that are fetched at once: those of 2 MiB of data
LONGEST = 1 << 20  # bytes of a range that is joined of several
KEPT_PAGES = 16384  # 64 MiB: the sums of 32 GiB of data


def block_sums(content: Buffer) -> list[int]:
    """Of bytes that begin at the beginning of a block."""
    hashed = xxhash.xxh3_64_intdigest
    return [hashed(content[first : first + BLOCK]) for first in range(0, len(content), BLOCK)]


class SumsOfStream:
    """The sums of a file whose bytes come in pieces of any size."""

    def __init__(self) -> None:
        self._sums = array("Q")
        self._rest = bytearray()  # of a block that has begun

    def update(self, content: Buffer) -> None:
        content = memoryview(content).cast("B")
        if self._rest:
            missing = BLOCK - len(self._rest)
            self._rest += content[:missing]
            content = content[missing:]
            if len(self._rest) < BLOCK:
                return
            self._sums.extend(block_sums(bytes(self._rest)))
            self._rest.clear()
        whole = len(content) // BLOCK * BLOCK
        self._sums.extend(block_sums(content[:whole]))
        self._rest += content[whole:]

    def content(self) -> bytes:
        """Of the ``.sums`` file, once all bytes have come."""
        return np.array([*self._sums, *block_sums(bytes(self._rest))], dtype=SUM).tobytes()


def sums_bytes(file_bytes: int) -> int:
    """Of the ``.sums`` file of a data file."""
    return -(-file_bytes // BLOCK) * SUM.itemsize


# -- files on this machine


@dataclass(frozen=True, slots=True)
class MappedFile:
    """``sums``: None for a file that was written without them, which is not checked."""

    path: Path
    content: memoryview
    sums: Sums | None


def mapped_sums(path: Path, expected: Digest | None) -> Sums | None:
    """The sums in the file ``path``, mapped; None where ``expected`` is None. Raises InputError if it has another size."""
    if expected is None:
        return None
    return (
        np.asarray(np.memmap(check_size(path, expected), dtype=SUM, mode="r"))
        if expected.bytes
        else np.empty(0, dtype=SUM)
    )


class FirstRead:
    """Checks each unit of the mapped files of a split once, when it is first read. Safe in several threads, which may check one twice."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._files = files
        counts = [-(-len(file.content) // UNIT) for file in files]
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._begins: list[int] = self._firsts.tolist()
        self._checked = np.zeros(int(self._firsts[-1]), dtype=bool)
        for number, file in enumerate(files):
            if file.sums is None:
                self._checked[self._firsts[number] : self._firsts[number + 1]] = True
        self._left = int(np.count_nonzero(~self._checked))
        self._lock = threading.Lock()

    def units(self, files: Ints, places: Ints) -> Ints:
        """Numbers of the units in which the bytes ``places`` [n] of the files ``files`` [n] lie."""
        return np.asarray(self._firsts[files] + places // UNIT, dtype=np.int64)

    def check(self, first: Ints, last: Ints) -> None:
        """The units ``first[j] .. last[j]``, the last included. Raises InputError naming the file and the bytes that are damaged."""
        if not self._left or not len(first):
            return
        wanted = np.minimum(first[:, None] + np.arange(int((last - first).max()) + 1), last[:, None])
        new = np.unique(wanted[~self._checked[wanted]])
        for unit in new.tolist():
            self._compare(unit)
            with self._lock:  # another thread may have checked it meanwhile
                self._left -= not self._checked[unit]
                self._checked[unit] = True

    def _compare(self, unit: int) -> None:
        number = bisect_right(self._begins, unit) - 1
        file, start = self._files[number], (unit - self._begins[number]) * UNIT
        assert file.sums is not None, f"{file.path} has no sums"
        content = file.content[start : start + UNIT]
        expected = file.sums[start // BLOCK : start // BLOCK + UNIT // BLOCK].tolist()
        found = block_sums(content)
        if found == expected:
            return
        for place, (seen, rule) in enumerate(zip(found, expected, strict=True)):
            if seen != rule:
                at = start + place * BLOCK
                raise broken(
                    file.path,
                    f"bytes {at} to {min(at + BLOCK, len(file.content))} have xxh3 {seen:016x}",
                    f"{file.path.stem}{ENDING} beside it says {rule:016x}",
                )


# -- files in a store


class Reader(Protocol):
    """What reads ranges of files: a folder, or a ``CheckedReader`` over one."""

    def read_ranges(self, ranges: Sequence[Range]) -> list[Buffer]: ...


def joined(ranges: Sequence[Range]) -> tuple[list[Range], list[int]]:
    """Ranges that touch or overlap as one of at most LONGEST bytes, unless one of them is longer itself.

    Returns the new ranges, and for each of ``ranges`` the number of the one in which it lies.
    """
    found: list[Range] = []
    where = [0] * len(ranges)
    for number in sorted(range(len(ranges)), key=lambda number: (ranges[number].name, ranges[number].start)):
        one, last = ranges[number], found[-1] if found else None
        if (
            last is not None
            and last.name == one.name
            and one.start <= last.end
            and max(one.end, last.end) - last.start <= LONGEST
        ):
            found[-1] = Range(one.name, last.start, max(one.end, last.end))
        else:
            found.append(one)
        where[number] = len(found) - 1
    return found, where


class CheckedReader:
    """Reads ranges from a store and checks them. A range is widened to whole blocks, its sums are fetched with it and kept.

    A block that does not agree is fetched once more with its sums: it may have been damaged on the way.
    """

    def __init__(self, folder: Reader, place: Place, sizes: Mapping[str, int]) -> None:
        """
        Args:
            sizes: bytes of each file that has sums beside it, by name. Other files are read as they are.
        """
        self._folder = folder
        self._place = place
        self._sizes = sizes
        self._kept: dict[Range, Sums] = {}  # the page fetched last is the last
        self._lock = threading.Lock()

    def read_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Each range. Raises InputError naming the file and the bytes that are damaged, and whatever the folder raises."""
        whole, where = joined([self._widened(one) for one in ranges])
        contents, sums = self._read(whole, fresh=False)
        wrong = [
            number
            for number, one in enumerate(whole)
            if self._damaged(one, contents[number], sums) is not None
        ]
        again, sums = self._read([whole[number] for number in wrong], fresh=True)
        for number, content in zip(wrong, again, strict=True):
            at = self._damaged(whole[number], content, sums)
            if at is not None:
                name, end = whole[number].name, min(at + BLOCK, self._sizes[whole[number].name])
                raise InputError(
                    Problem(
                        "data.path",
                        f"{self._place / name}: bytes {at} to {end} came twice with another hash",
                        f"a block has the hash that stands in {_sums_name(name)}",
                        "restore the file, or prepare the data again",
                    )
                )
            contents[number] = content
        return [
            memoryview(contents[number])[one.start - whole[number].start : one.end - whole[number].start]
            for one, number in zip(ranges, where, strict=True)
        ]

    def _widened(self, one: Range) -> Range:
        size = self._sizes.get(one.name)
        if size is None:
            return one
        return Range(
            one.name, one.start // BLOCK * BLOCK, max(one.end, min(-(-one.end // BLOCK) * BLOCK, size))
        )

    def _pages(self, one: Range) -> list[Range]:
        """Of the sums of a range that is whole blocks."""
        size = self._sizes.get(one.name)
        if size is None:
            return []
        covered, total = PAGE // SUM.itemsize * BLOCK, sums_bytes(size)
        return [
            Range(_sums_name(one.name), number * PAGE, min((number + 1) * PAGE, total))
            for number in range(one.start // covered, -(-one.end // covered))
        ]

    def _read(self, whole: Sequence[Range], *, fresh: bool) -> tuple[list[Buffer], dict[Range, Sums]]:
        """The ranges, which are whole blocks, and the pages of their sums. Fetches the pages that are not kept, or with ``fresh`` all."""
        if not whole:
            return [], {}
        wanted = dict.fromkeys(page for one in whole for page in self._pages(one))
        with self._lock:
            found = {} if fresh else {page: self._kept[page] for page in wanted if page in self._kept}
        missing = [page for page in wanted if page not in found]
        contents = self._folder.read_ranges([*whole, *missing])
        found |= {
            page: np.frombuffer(content, dtype=SUM)
            for page, content in zip(missing, contents[len(whole) :], strict=True)
        }
        with self._lock:
            self._kept |= {page: found[page] for page in missing}
            for page in list(self._kept)[: max(0, len(self._kept) - KEPT_PAGES)]:
                del self._kept[page]
        return contents[: len(whole)], found

    def _damaged(self, one: Range, content: Buffer, found: Mapping[Range, Sums]) -> int | None:
        """Where the first damaged block of a range begins; None if all of it is sound."""
        pages = self._pages(one)
        if not pages:
            return None
        sums = np.concatenate([found[page] for page in pages])
        first = (one.start - pages[0].start // SUM.itemsize * BLOCK) // BLOCK
        seen_sums = block_sums(content)
        for number, (seen, expected) in enumerate(
            zip(seen_sums, sums[first : first + len(seen_sums)].tolist(), strict=True)
        ):
            if seen != expected:
                return one.start + number * BLOCK
        return None


def checked_reader(folder: StoreFolder, files: Mapping[str, Digest]) -> CheckedReader:
    """Over ``folder``, for data files and the sums beside some of them."""
    sizes = {
        name: expected.bytes
        for name, expected in files.items()
        if not name.endswith(ENDING) and _sums_name(name) in files
    }
    return CheckedReader(folder, folder.place, sizes)


def _sums_name(name: str) -> str:
    return f"{name.rpartition('.')[0]}{ENDING}"
