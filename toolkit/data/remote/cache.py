"""A bounded cache of blocks on a local disk, for data in a store: each block comes over the network once a node.

    <folder>/32KiB-<slots>.blocks    the slots, 32 KiB each; grows up to its bound and not beyond
    <folder>/32KiB-<slots>.index     one record a slot: whose block it holds, its length, its hash, when it came
    <folder>/32KiB-<slots>.claims    empty; its bytes are locked while a process fetches the block of a slot

A block may lie in one of WAYS slots, found from its file and number, so opening costs nothing and needs no list. Where all of them are
taken, the oldest goes. Ranks share the files without talking: whatever a record says, a block counts only where its bytes have the
record's hash. So a process that is killed while it writes, two that write one slot, and a machine that stops leave a block that is not
there, never a wrong one. A folder under /dev/shm makes it a cache in memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from toolkit.config.data import DataCacheConfig
from toolkit.data.order.permutation import BLOCK_BYTES
from toolkit.data.remote.storage import Buffer, Range
from toolkit.data.sums import Reader
from toolkit.errors import InputError, Problem

Block = tuple[str, int]  # file's name, number

WAYS = 16
FETCHED_BLOCKS = 32  # in one request: 1 MiB
CLAIM_SECONDS = (
    5.0  # how long a block that another process fetches is waited for before it is fetched here too
)
CLAIM_TICK_SECONDS = 0.002
# 48 bytes: key of the block, hash of its bytes, length, nanoseconds since 1970.
RECORD = np.dtype([("key", "<u8", 2), ("check", "<u8", 2), ("length", "<u8"), ("came", "<u8")])


class BlockCache:
    """Blocks of up to 32 KiB under (file, number), where ``file`` says what the bytes are and not where they lie."""

    def __init__(self, folder: Path, gib: float) -> None:
        """Raises InputError where the folder cannot be written or has no room."""
        sets = int(gib * 2**30) // (BLOCK_BYTES * WAYS)
        self.slots = max(1, sets) * WAYS
        self.folder = folder
        self._full = False
        name = f"{BLOCK_BYTES >> 10}KiB-{self.slots}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._drop_others(name)
            self._blocks = os.open(folder / f"{name}.blocks", os.O_RDWR | os.O_CREAT, 0o600)
            self._claims = os.open(folder / f"{name}.claims", os.O_RDWR | os.O_CREAT, 0o600)
            self._check_room()
            index = os.open(folder / f"{name}.index", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(
                    index, self.slots * RECORD.itemsize
                )  # a hole reads as zeros: empty slots. Repeating it changes nothing
            finally:
                os.close(index)
            self._index: Any = np.memmap(folder / f"{name}.index", dtype=RECORD, mode="r+")
        except OSError as error:
            seen = f"data.cache.folder={folder}: {error.strerror or error}"
            raise InputError(
                Problem("data.cache.folder", seen, "the cache can be written", "name another folder")
            ) from error

    def get(self, file: str, number: int) -> bytes | None:
        key, first = self._place(file, number)
        for slot in self._holding(key, first):
            record = self._index[slot].copy()
            content = os.pread(self._blocks, int(record["length"]), slot * BLOCK_BYTES)
            if _check(key, content) == tuple(record["check"].tolist()):
                return content
        return None

    def put(self, file: str, number: int, content: Buffer) -> None:
        assert 0 < len(content) <= BLOCK_BYTES, f"a block of {len(content)} bytes"
        if self._full:
            return
        key, first = self._place(file, number)
        taken = self._holding(key, first)
        slot = taken[0] if taken else first + int(self._index["came"][first : first + WAYS].argmin())
        try:
            self._index[slot] = np.zeros(
                (), dtype=RECORD
            )  # so that a record never speaks of half a block for long
            os.pwrite(self._blocks, content, slot * BLOCK_BYTES)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._full = True
            warnings.warn(f"the cache {self.folder} keeps no more blocks: {error.strerror}", stacklevel=2)
            return
        self._index[slot] = (key, _check(key, content), len(content), time.time_ns())

    def claim(self, file: str, number: int) -> bool:
        """Whether this process is the one to fetch the block: no other does. The kernel ends the claim with the process."""
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._claimed(file, number))
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False

    def release(self, file: str, number: int) -> None:
        fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, self._claimed(file, number))

    def _claimed(self, file: str, number: int) -> int:
        return self._place(file, number)[0][0] >> 2  # an offset in a file has 63 bits

    def _place(self, file: str, number: int) -> tuple[tuple[int, int], int]:
        """The key of a block and the first of its slots. Blocks of one file lie in sets that follow one another: none is fuller."""
        key = xxhash.xxh3_128_intdigest(f"{file} {number}".encode())
        sets = self.slots // WAYS
        # A record of zeros is an empty slot, so no key is zero.
        return ((key >> 64) | 1, key & (2**64 - 1)), (
            xxhash.xxh3_64_intdigest(file.encode()) + number
        ) % sets * WAYS

    def _holding(self, key: tuple[int, int], first: int) -> list[int]:
        keys = self._index["key"][first : first + WAYS]
        return (first + np.flatnonzero((keys[:, 0] == key[0]) & (keys[:, 1] == key[1]))).tolist()

    def _check_room(self) -> None:
        size, there = self.slots * (BLOCK_BYTES + RECORD.itemsize), os.fstat(self._blocks).st_blocks * 512
        free = shutil.disk_usage(self.folder).free + there
        if size > free:
            seen = f"data.cache.folder={self.folder} has room for {free / 2**30:.2f} GiB, the cache takes up to {size / 2**30:.2f} GiB"
            remedy = f"write data.cache.gib={max(0.01, free * 0.9 / 2**30):.2f}, or name another folder"
            raise InputError(Problem("data.cache.gib", seen, "the whole cache has room", remedy))

    def _drop_others(self, name: str) -> None:
        """Of another size: one bound holds for a folder. A process that still uses them keeps its open files."""
        for ending in ("blocks", "index", "claims"):
            for file in self.folder.glob(f"{BLOCK_BYTES >> 10}KiB-*.{ending}"):
                if file.stem != name:
                    file.unlink(missing_ok=True)


def _check(key: tuple[int, int], content: Buffer) -> tuple[int, int]:
    """Of the bytes and of whose they are: another block's bytes in this slot are not taken for these."""
    whole = xxhash.xxh3_128_intdigest(content, seed=key[1])
    return whole >> 64, whole & (2**64 - 1)


def cache_of(config: DataCacheConfig) -> BlockCache | None:
    """The cache of a run, one in a process; None where none is asked for."""
    return None if config.folder is None else _opened(Path(config.folder), config.gib)


@cache
def _opened(folder: Path, gib: float) -> BlockCache:
    return BlockCache(folder, gib)


@dataclass(frozen=True, slots=True)
class CachedFile:
    """``content``: hash of the file's bytes, under which its blocks are kept."""

    name: str
    content: str
    bytes: int


def read_cached(
    cache: BlockCache, folder: Reader, files: Mapping[str, CachedFile], ranges: Sequence[Range]
) -> list[Buffer]:
    """The ranges, from the blocks that the cache has and from ``folder``, whose blocks are kept then.

    Of the processes that share the cache one fetches a block and the others wait for it, for a bounded time.
    """
    wanted = dict.fromkeys(
        (range.name, number) for range in ranges for number in blocks_of(range.start, range.end)
    )
    found: dict[Block, bytes] = {}
    _look(cache, files, wanted, found)
    mine = [
        block for block in wanted if block not in found and cache.claim(files[block[0]].content, block[1])
    ]
    try:
        _look(cache, files, mine, found)  # another process may have put it there, and let go, in between
        _fetch(cache, folder, files, [block for block in mine if block not in found], found)
    finally:
        for name, number in mine:
            cache.release(files[name].content, number)
    until = time.monotonic() + CLAIM_SECONDS
    while (others := [block for block in wanted if block not in found]) and time.monotonic() < until:
        time.sleep(CLAIM_TICK_SECONDS)
        _look(cache, files, others, found)
    _fetch(cache, folder, files, others, found)
    return [_cut(found, range) for range in ranges]


def _look(
    cache: BlockCache, files: Mapping[str, CachedFile], blocks: Iterable[Block], found: dict[Block, bytes]
) -> None:
    for name, number in blocks:
        content = cache.get(files[name].content, number)
        if content is not None:
            found[name, number] = content


def _fetch(
    cache: BlockCache,
    folder: Reader,
    files: Mapping[str, CachedFile],
    blocks: Sequence[Block],
    found: dict[Block, bytes],
) -> None:
    """Neighbours as one request of at most FETCHED_BLOCKS."""
    rows: list[list[Block]] = []
    for block in sorted(blocks):
        last = rows[-1] if rows else None
        if last and last[-1] == (block[0], block[1] - 1) and len(last) < FETCHED_BLOCKS:
            last.append(block)
        else:
            rows.append([block])
    if not rows:
        return
    spans = [
        Range(row[0][0], row[0][1] * BLOCK_BYTES, min((row[-1][1] + 1) * BLOCK_BYTES, files[row[0][0]].bytes))
        for row in rows
    ]
    for row, content in zip(rows, folder.read_ranges(spans), strict=True):
        for place, (name, number) in enumerate(row):
            part = bytes(content[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES])
            cache.put(files[name].content, number, part)
            found[name, number] = part


def _cut(found: Mapping[Block, bytes], range: Range) -> Buffer:
    numbers = blocks_of(range.start, range.end)
    joined = b"".join(found[range.name, number] for number in numbers)
    start = range.start - numbers[0] * BLOCK_BYTES
    return memoryview(joined)[start : start + range.end - range.start]


def blocks_of(start: int, end: int) -> Sequence[int]:
    """Numbers of the blocks in which the bytes ``start .. end`` lie."""
    return range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
