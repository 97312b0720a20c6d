"""Tokens that lie in a store. Windows are asked for by their bytes, all of a reading at once; nothing else of a shard is fetched.

Without a cache a reading fetches exactly its windows (those that touch, as one request), so bytes served are bytes delivered. With one
(``data.cache.folder``) whole blocks of 32 KiB are fetched and kept: more at first, and then each byte of the data at most once a node
while the cache holds it, for all its ranks and for later epochs and runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.data.cache import BlockCache, blocks_of
from toolkit.data.manifest import DataManifest, Shard
from toolkit.data.order import BLOCK_BYTES
from toolkit.data.storage import Buffer, Folder, Range, StoreFolder
from toolkit.errors import InputError, Problem

Ints = npt.NDArray[np.int64]

CLAIM_SECONDS = 5.0  # how long a block that another rank fetches is waited for before it is fetched here too
CLAIM_TICK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one row: ``count`` tokens from byte ``start`` of a shard's file, to column ``column``."""

    row: int
    column: int
    count: int
    shard: int
    start: int


def pieces_of(starts: Ints, length: int, ends: Ints, token_bytes: int) -> list[Piece]:
    """The windows ``starts[j] .. starts[j] + length`` in shards that end at token ``ends``: a window may lie in several."""
    found: list[Piece] = []
    for row, (start, first) in enumerate(zip(starts.tolist(), np.searchsorted(ends, starts, side="right").tolist(), strict=True)):
        shard, column = first, 0
        while column < length:
            begins = int(ends[shard - 1]) if shard else 0
            count = min(length - column, int(ends[shard]) - start - column)
            found.append(Piece(row, column, count, shard, (start + column - begins) * token_bytes))
            shard, column = shard + 1, column + count
    return found


def spans_of(pieces: Sequence[Piece], token_bytes: int, longest: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Pieces that touch or overlap as one span (shard, start, end) of at most ``longest`` bytes, unless a piece itself is longer.

    Returns the spans and for each piece the number of its span.
    """
    spans: list[tuple[int, int, int]] = []
    where = [0] * len(pieces)
    for number in sorted(range(len(pieces)), key=lambda number: (pieces[number].shard, pieces[number].start)):
        piece = pieces[number]
        end = piece.start + piece.count * token_bytes
        if spans:
            shard, begin, last = spans[-1]
            if shard == piece.shard and piece.start <= last and max(end, last) - begin <= longest:
                spans[-1] = (shard, begin, max(end, last))
                where[number] = len(spans) - 1
                continue
        spans.append((piece.shard, piece.start, end))
        where[number] = len(spans) - 1
    return spans, where


class RemoteTokens:
    """A split in a store: a ``TokenSource``."""

    def __init__(self, manifest: DataManifest, split: str, folder: Folder, cache: BlockCache | None = None) -> None:
        """Of files that were checked: see ``open_remote``."""
        self.manifest = manifest
        self.split = manifest.split(split)
        self.tokens = self.split.tokens
        self.vocab_size = manifest.tokenizer.size
        self.data_hash = self.split.data_hash
        self.tokenizer_hash = manifest.tokenizer.hash
        self.folder = folder
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self.token_bytes = self._dtype.itemsize
        self._cache = cache
        self._shards = [shard for shard in self.split.shards if shard.tokens]
        self._ends = np.cumsum([shard.tokens for shard in self._shards], dtype=np.int64)

    def read(self, starts: Ints, out: Ints) -> None:
        length = out.shape[1]
        assert len(starts) == len(out), f"{len(starts)} starts for {len(out)} rows"
        if not out.size:
            return
        assert starts.min() >= 0, f"start {starts.min()}"
        assert starts.max() + length <= self.tokens, f"window {starts.max()} + {length} of {self.tokens} tokens"
        pieces = pieces_of(starts, length, self._ends, self.token_bytes)
        longest = self.folder.limits.part_bytes if isinstance(self.folder, StoreFolder) else 1 << 20
        spans, where = spans_of(pieces, self.token_bytes, longest)
        contents = self._read_spans(spans, longest)
        for piece, number in zip(pieces, where, strict=True):
            offset = piece.start - spans[number][1]
            tokens = np.frombuffer(contents[number], self._dtype, piece.count, offset)
            out[piece.row, piece.column : piece.column + piece.count] = tokens
