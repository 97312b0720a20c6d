"""Tokens that lie in a store. Windows are asked for by their bytes, all of a reading at once; nothing else of a shard is fetched.

Without a cache a reading fetches its windows (those that touch, as one request), widened to whole blocks of 4 KiB if the data have sums
to check them with (sums.py). With one (``data.cache.folder``) whole blocks of 32 KiB are fetched and kept: more at first, and then each
byte of the data at most once a node while the cache holds it, for all its ranks and for later epochs and runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.manifest import DataManifest, Shard, Split
from toolkit.data.remote.cache import BlockCache, CachedFile, read_cached
from toolkit.data.remote.fetch import Limits
from toolkit.data.remote.storage import Buffer, Range, StoreFolder, Url, open_folder
from toolkit.data.sums import checked_reader
from toolkit.data.tokens.index import CODES, HEADER, MAGIC
from toolkit.errors import InputError, Problem

Ints = npt.NDArray[np.int64]
Span = tuple[int, int, int]  # shard, first byte, end

KEPT_BYTES = 64 << 20  # of a split that is read again and again


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
    for row, (start, first) in enumerate(
        zip(starts.tolist(), np.searchsorted(ends, starts, side="right").tolist(), strict=True)
    ):
        shard, column = first, 0
        while column < length:
            begins = int(ends[shard - 1]) if shard else 0
            count = min(length - column, int(ends[shard]) - start - column)
            found.append(Piece(row, column, count, shard, (start + column - begins) * token_bytes))
            shard, column = shard + 1, column + count
    return found


def spans_of(pieces: Sequence[Piece], token_bytes: int, longest: int) -> tuple[list[Span], list[int]]:
    """Pieces that touch or overlap as one span of at most ``longest`` bytes, unless a piece itself is longer.

    Returns the spans and for each piece the number of its span.
    """
    spans: list[Span] = []
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


def survey(manifest: DataManifest, names: Sequence[str]) -> None:
    """Sizes and headers of every file of the splits ``names``: three small requests a shard, all at once.

    Raises InputError naming the first file that is absent or is not what the manifest says.
    """
    shards = [shard for name in names for shard in _filled(manifest.split(name))]
    folder = _folder(manifest)
    heads = [Range(f"{shard.name}.idx", 0, HEADER.size) for shard in shards]
    # Some bytes of a file tell its size, and that it may be read. Not one byte alone: some servers take "bytes=0-0" for the whole file.
    files = Split(tuple(shards)).files
    some = [
        Range(name, 0, min(HEADER.size, expected.bytes))
        for name, expected in files.items()
        if not name.endswith(".idx")
    ]
    contents = folder.read_ranges([*heads, *some])
    for name, expected in files.items():
        size = folder.size(name)
        if size != expected.bytes:
            raise _broken(folder.place / name, f"{size} bytes", f"the manifest says {expected.bytes} bytes")
    for shard, head in zip(shards, contents, strict=False):
        _check_header(folder.place / f"{shard.name}.idx", bytes(head), manifest, shard)


def _check_header(place: Url, head: bytes, manifest: DataManifest, shard: Shard) -> None:
    magic, version, code, sequences, ends = HEADER.unpack(head)
    if magic != MAGIC or version != 1 or code not in CODES:
        raise _broken(
            place,
            f"starting with {magic!r}, version={version}, dtype code={code}",
            "an .idx file starts with Megatron's header",
        )
    seen = (CODES[code].name, ends - 1, HEADER.size + sequences * 12 + ends * 8)
    expected = (manifest.dtype, shard.documents, shard.idx.bytes)
    if seen != expected:
        words = "dtype {}, {} documents, {} bytes"
        raise _broken(place, words.format(*seen), f"the manifest says {words.format(*expected)}")


def _filled(split: Split) -> list[Shard]:
    return [shard for shard in split.shards if shard.tokens]


def _folder(manifest: DataManifest, limits: Limits | None = None) -> StoreFolder:
    assert manifest.url is not None, f"{manifest.folder} lies on this machine"
    folder = open_folder(manifest.url, limits)
    assert isinstance(folder, StoreFolder)
    return folder


def _broken(place: Url, seen: str, rule: str) -> InputError:
    return InputError(
        Problem("data.path", f"{place}: {seen}", rule, "restore the file, or prepare the data again")
    )


class RemoteTokens:
    """A split in a store: a ``TokenSource``. An answer about a file of another size than the manifest says is an InputError."""

    def __init__(
        self,
        manifest: DataManifest,
        split: str,
        *,
        cache: BlockCache | None = None,
        repeated: bool = False,
        limits: Limits | None = None,
    ) -> None:
        """
        Args:
            cache: where blocks are kept; None: windows are fetched exactly.
            repeated: the same windows are read again and again (an evaluation): up to KEPT_BYTES of them stay in memory.
        """
        self.manifest = manifest
        self.split = manifest.split(split)
        self.tokens = self.split.tokens
        self.vocab_size = manifest.tokenizer.size
        self.data_hash = self.split.data_hash
        self.tokenizer_hash = manifest.tokenizer.hash
        self.dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self.token_bytes = self.dtype.itemsize
        self._shards = _filled(self.split)
        self._ends = np.cumsum([shard.tokens for shard in self._shards], dtype=np.int64)
        self._names = [f"{shard.name}.bin" for shard in self._shards]
        self._files = {
            name: CachedFile(name, shard.bin.xxh3_128, shard.bin.bytes)
            for name, shard in zip(self._names, self._shards, strict=True)
        }
        files = Split(tuple(self._shards)).files
        self.folder = _folder(manifest, limits).for_reading(
            {name: expected.bytes for name, expected in files.items()}
        )
        self._reader = checked_reader(self.folder, files)
        self._cache = cache
        self._room = KEPT_BYTES if repeated else 0
        self._kept: dict[Span, Buffer] = {}

    def read(self, starts: Ints, out: npt.NDArray[Any]) -> None:
        length = out.shape[1]
        assert len(starts) == len(out), f"{len(starts)} starts for {len(out)} rows"
        if not out.size:
            return
        assert starts.min() >= 0, f"start {starts.min()}"
        assert starts.max() + length <= self.tokens, (
            f"window {starts.max()} + {length} of {self.tokens} tokens"
        )
        pieces = pieces_of(starts, length, self._ends, self.token_bytes)
        spans, where = spans_of(pieces, self.token_bytes, self.folder.limits.part_bytes)
        contents = self._contents(spans)
        for piece, number in zip(pieces, where, strict=True):
            tokens = np.frombuffer(contents[number], self.dtype, piece.count, piece.start - spans[number][1])
            out[piece.row, piece.column : piece.column + piece.count] = tokens

    def windows(self, starts: Ints, length: int) -> list[bytes | memoryview]:
        rows = np.empty((len(starts), length), dtype=self.dtype)
        self.read(starts, rows)
        return [memoryview(row).cast("B") for row in rows]

    def _contents(self, spans: list[Span]) -> list[Buffer]:
        missing = [span for span in spans if span not in self._kept]
        fetched = dict(zip(missing, self._read(missing), strict=True))
        for span, content in fetched.items():
            if len(content) <= self._room:
                self._kept[span] = content
                self._room -= len(content)
        return [fetched[span] if span in fetched else self._kept[span] for span in spans]

    def _read(self, spans: list[Span]) -> list[Buffer]:
        ranges = [Range(self._names[shard], start, end) for shard, start, end in spans]
        if self._cache is None:
            return self._reader.read_ranges(ranges)
        return read_cached(self._cache, self._reader, self._files, ranges)
