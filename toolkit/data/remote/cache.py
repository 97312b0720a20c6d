"""A bounded cache on a local disk for data in a store: each block is fetched once per node.

    <folder>/32KiB-<slots>.blocks    the slots, 32 KiB each; grows up to its bound
    <folder>/32KiB-<slots>.index     one record per slot: key of its block, length, hash, time
    <folder>/32KiB-<slots>.claims    empty; its bytes are locked while a process fetches the block of a slot

A block may be in one of WAYS slots, computed from its file and number, so opening takes constant time and
needs no list. If all of them are used, the oldest block is replaced. Ranks share the files without
communication: a block is valid only if its bytes have the record's hash. So a process killed while it writes,
two processes that write one slot, or a machine that stops leave a missing block, never a wrong one. With a
folder under /dev/shm the cache is in memory.
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
from toolkit.data.checksums import RangeReader
from toolkit.data.order.permutation import BLOCK_BYTES
from toolkit.errors import InputError, Problem
from toolkit.remote.storage import Buffer, ByteRange

Block = tuple[str, int]  # file's name, number

WAYS = 16
FETCHED_BLOCKS = 32  # in one request: 1 MiB
# How long to wait for a block that another process fetches before this process fetches it too.
CLAIM_SECONDS = 5.0
CLAIM_TICK_SECONDS = 0.002
# 48 bytes: key of the block, hash of its bytes, length, nanoseconds since 1970.
INDEX_RECORD = np.dtype([("key", "<u8", 2), ("hash", "<u8", 2), ("length", "<u8"), ("stored_at", "<u8")])


class BlockCache:
    """Blocks of up to 32 KiB by (file, number), where ``file`` identifies the content, not the location."""

    def __init__(self, folder: Path, gib: float) -> None:
        """Raise InputError if the folder cannot be written or has no room."""
        sets = int(gib * 2**30) // (BLOCK_BYTES * WAYS)
        self.slots = max(1, sets) * WAYS
        self.folder = folder
        self._full = False
        name = f"{BLOCK_BYTES >> 10}KiB-{self.slots}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._remove_other_sizes(name)
            self._blocks = os.open(folder / f"{name}.blocks", os.O_RDWR | os.O_CREAT, 0o600)
            self._claims = os.open(folder / f"{name}.claims", os.O_RDWR | os.O_CREAT, 0o600)
            self._check_room()
            index = os.open(folder / f"{name}.index", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                # A hole reads as zeros: empty slots. Repeating the call changes nothing.
                os.ftruncate(index, self.slots * INDEX_RECORD.itemsize)
            finally:
                os.close(index)
            self._index: Any = np.memmap(folder / f"{name}.index", dtype=INDEX_RECORD, mode="r+")
        except OSError as error:
            seen = f"data.cache.folder={folder}: {error.strerror or error}"
            raise InputError(
                Problem("data.cache.folder", seen, "the cache can be written", "name another folder")
            ) from error

    def get(self, file: str, number: int) -> bytes | None:
        key, first = self._slots_of(file, number)
        for slot in self._find(key, first):
            record = self._index[slot].copy()
            content = os.pread(self._blocks, int(record["length"]), slot * BLOCK_BYTES)
            if _content_hash(key, content) == tuple(record["hash"].tolist()):
                return content
        return None

    def put(self, file: str, number: int, content: Buffer) -> None:
        assert 0 < len(content) <= BLOCK_BYTES, f"a block of {len(content)} bytes"
        if self._full:
            return
        key, first = self._slots_of(file, number)
        existing = self._find(key, first)
        slot = (
            existing[0] if existing else first + int(self._index["stored_at"][first : first + WAYS].argmin())
        )
        try:
            # First, so that a record does not describe a partly written block for long.
            self._index[slot] = np.zeros((), dtype=INDEX_RECORD)
            os.pwrite(self._blocks, content, slot * BLOCK_BYTES)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._full = True
            warnings.warn(f"the cache {self.folder} stores no more blocks: {error.strerror}", stacklevel=2)
            return
        self._index[slot] = (key, _content_hash(key, content), len(content), time.time_ns())

    def claim(self, file: str, number: int) -> bool:
        """Return whether this process shall fetch the block; no other will.

        The kernel ends the claim with the process.
        """
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._claim_offset(file, number))
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            return False

    def release(self, file: str, number: int) -> None:
        fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, self._claim_offset(file, number))

    def _claim_offset(self, file: str, number: int) -> int:
        return self._slots_of(file, number)[0][0] >> 2  # an offset in a file has 63 bits

    def _slots_of(self, file: str, number: int) -> tuple[tuple[int, int], int]:
        """Return a block's key and its first slot.

        Blocks of a file are in consecutive sets, which fill evenly.
        """
        key = xxhash.xxh3_128_intdigest(f"{file} {number}".encode())
        sets = self.slots // WAYS
        # A record of zeros is an empty slot, so no key may be zero.
        return ((key >> 64) | 1, key & (2**64 - 1)), (
            xxhash.xxh3_64_intdigest(file.encode()) + number
        ) % sets * WAYS

    def _find(self, key: tuple[int, int], first: int) -> list[int]:
        keys = self._index["key"][first : first + WAYS]
        return (first + np.flatnonzero((keys[:, 0] == key[0]) & (keys[:, 1] == key[1]))).tolist()

    def _check_room(self) -> None:
        size, used = (
            self.slots * (BLOCK_BYTES + INDEX_RECORD.itemsize),
            os.fstat(self._blocks).st_blocks * 512,
        )
        free = shutil.disk_usage(self.folder).free + used
        if size > free:
            seen = (
                f"data.cache.folder={self.folder} has room for {free / 2**30:.2f} GiB, "
                f"the cache needs up to {size / 2**30:.2f} GiB"
            )
            remedy = f"write data.cache.gib={max(0.01, free * 0.9 / 2**30):.2f}, or name another folder"
            raise InputError(Problem("data.cache.gib", seen, "the whole cache has room", remedy))

    def _remove_other_sizes(self, name: str) -> None:
        """Remove caches of other sizes from the folder, which has one bound.

        Processes that use them keep open files.
        """
        for ending in ("blocks", "index", "claims"):
            for file in self.folder.glob(f"{BLOCK_BYTES >> 10}KiB-*.{ending}"):
                if file.stem != name:
                    file.unlink(missing_ok=True)


def _content_hash(key: tuple[int, int], content: Buffer) -> tuple[int, int]:
    """Hash the bytes with the block's key, so that another block's bytes in this slot do not match."""
    whole = xxhash.xxh3_128_intdigest(content, seed=key[1])
    return whole >> 64, whole & (2**64 - 1)


def open_cache(config: DataCacheConfig) -> BlockCache | None:
    """Open the cache of a run, one per process; None if the configuration has none."""
    return None if config.folder is None else _open_folder(Path(config.folder), config.gib)


@cache
def _open_folder(folder: Path, gib: float) -> BlockCache:
    return BlockCache(folder, gib)


@dataclass(frozen=True, slots=True)
class CachedFile:
    """``content`` is the hash of the file's bytes and identifies its blocks in the cache."""

    name: str
    content: str
    bytes: int


def read_cached(
    cache: BlockCache, folder: RangeReader, files: Mapping[str, CachedFile], ranges: Sequence[ByteRange]
) -> list[Buffer]:
    """Read the ranges from cached blocks, and fetch and cache the missing blocks from ``folder``.

    One of the processes that share the cache fetches a block, and the others wait for it for a bounded time.
    """
    requested = dict.fromkeys(
        (range.name, number) for range in ranges for number in block_numbers(range.start, range.end)
    )
    contents: dict[Block, bytes] = {}
    _look_up(cache, files, requested, contents)
    claimed = [
        block
        for block in requested
        if block not in contents and cache.claim(files[block[0]].content, block[1])
    ]
    try:
        # Another process may have stored it and released the claim in between.
        _look_up(cache, files, claimed, contents)
        _fetch(cache, folder, files, [block for block in claimed if block not in contents], contents)
    finally:
        for name, number in claimed:
            cache.release(files[name].content, number)
    deadline = time.monotonic() + CLAIM_SECONDS
    while (
        missing := [block for block in requested if block not in contents]
    ) and time.monotonic() < deadline:
        time.sleep(CLAIM_TICK_SECONDS)
        _look_up(cache, files, missing, contents)
    _fetch(cache, folder, files, missing, contents)
    return [_cut(contents, range) for range in ranges]


def _look_up(
    cache: BlockCache, files: Mapping[str, CachedFile], blocks: Iterable[Block], contents: dict[Block, bytes]
) -> None:
    for name, number in blocks:
        content = cache.get(files[name].content, number)
        if content is not None:
            contents[name, number] = content


def _fetch(
    cache: BlockCache,
    folder: RangeReader,
    files: Mapping[str, CachedFile],
    blocks: Sequence[Block],
    contents: dict[Block, bytes],
) -> None:
    """Fetch consecutive blocks as one request of at most FETCHED_BLOCKS."""
    groups: list[list[Block]] = []
    for block in sorted(blocks):
        last = groups[-1] if groups else None
        if last and last[-1] == (block[0], block[1] - 1) and len(last) < FETCHED_BLOCKS:
            last.append(block)
        else:
            groups.append([block])
    if not groups:
        return
    spans = [
        ByteRange(
            group[0][0],
            group[0][1] * BLOCK_BYTES,
            min((group[-1][1] + 1) * BLOCK_BYTES, files[group[0][0]].bytes),
        )
        for group in groups
    ]
    for group, content in zip(groups, folder.read_ranges(spans), strict=True):
        for index, (name, number) in enumerate(group):
            block_content = bytes(content[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES])
            cache.put(files[name].content, number, block_content)
            contents[name, number] = block_content


def _cut(contents: Mapping[Block, bytes], range: ByteRange) -> Buffer:
    numbers = block_numbers(range.start, range.end)
    content = b"".join(contents[range.name, number] for number in numbers)
    start = range.start - numbers[0] * BLOCK_BYTES
    return memoryview(content)[start : start + range.end - range.start]


def block_numbers(start: int, end: int) -> Sequence[int]:
    """Return the numbers of the blocks that contain the bytes ``start .. end``."""
    return range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
