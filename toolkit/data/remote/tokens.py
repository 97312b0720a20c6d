"""Tokens in a store. All windows of one read are requested at once, and nothing else of a shard.

Without a cache a read fetches its windows (adjacent windows as one request), widened to whole blocks of 4 KiB
if the data have checksums. With a cache (``data.cache.folder``) whole blocks of 32 KiB are fetched and
stored: more bytes at first, and then each byte at most once per node while the cache has it, for all ranks
and for later epochs and runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.data.checksums import make_checked_reader
from toolkit.data.manifest import DataManifest, TokenShard, TokenSplit
from toolkit.data.remote.cache import BlockCache, CachedFile, read_cached
from toolkit.data.tokens.index import DTYPE_CODES, HEADER, MAGIC
from toolkit.errors import InputError
from toolkit.paths import Url
from toolkit.remote.errors import DATA
from toolkit.remote.fetch import RequestLimits
from toolkit.remote.storage import Buffer, ByteRange, StoreFolder, open_folder

Ints = npt.NDArray[np.int64]
Span = tuple[int, int, int]  # shard, first byte, end

CACHED_BYTES = 64 << 20  # cached in memory for a split that is read repeatedly


@dataclass(frozen=True, slots=True)
class WindowPart:
    """Part of one row: ``count`` tokens from byte ``start`` of a shard's file, written from ``column`` on."""

    row: int
    column: int
    count: int
    shard: int
    start: int


def split_windows(starts: Ints, length: int, ends: Ints, token_bytes: int) -> list[WindowPart]:
    """Split the windows ``starts[j] .. starts[j] + length`` at the shard ends ``ends`` (in tokens)."""
    parts: list[WindowPart] = []
    for row, (start, first) in enumerate(
        zip(starts.tolist(), np.searchsorted(ends, starts, side="right").tolist(), strict=True)
    ):
        shard, column = first, 0
        while column < length:
            shard_start = int(ends[shard - 1]) if shard else 0
            count = min(length - column, int(ends[shard]) - start - column)
            parts.append(WindowPart(row, column, count, shard, (start + column - shard_start) * token_bytes))
            shard, column = shard + 1, column + count
    return parts


def merge_spans(
    parts: Sequence[WindowPart], token_bytes: int, max_bytes: int
) -> tuple[list[Span], list[int]]:
    """Merge parts that touch or overlap into spans of at most ``max_bytes``, or of one longer part.

    Returns the spans and the index of each part's span.
    """
    spans: list[Span] = []
    owners = [0] * len(parts)
    for owner in sorted(range(len(parts)), key=lambda owner: (parts[owner].shard, parts[owner].start)):
        part = parts[owner]
        end = part.start + part.count * token_bytes
        if spans:
            shard, begin, last = spans[-1]
            if shard == part.shard and part.start <= last and max(end, last) - begin <= max_bytes:
                spans[-1] = (shard, begin, max(end, last))
                owners[owner] = len(spans) - 1
                continue
        spans.append((part.shard, part.start, end))
        owners[owner] = len(spans) - 1
    return spans, owners


def check_remote_files(manifest: DataManifest, names: Sequence[str]) -> None:
    """Check sizes and headers of every file of the splits ``names`` with three small requests per shard.

    Raises InputError naming the first file that is absent or does not match the manifest.
    """
    shards = [shard for name in names for shard in _non_empty_shards(manifest.split(name))]
    folder = _folder(manifest)
    heads = [ByteRange(f"{shard.name}.idx", 0, HEADER.size) for shard in shards]
    # Any bytes of a file reveal its size. Not one byte alone: some servers answer "bytes=0-0" with the whole
    # file.
    files = TokenSplit(tuple(shards)).files
    heads_of_files = [
        ByteRange(name, 0, min(HEADER.size, expected.bytes))
        for name, expected in files.items()
        if not name.endswith(".idx")
    ]
    contents = folder.read_ranges([*heads, *heads_of_files])
    for name, expected in files.items():
        size = folder.size(name)
        if size != expected.bytes:
            raise _damage_error(
                folder.location / name, f"{size} bytes", f"the manifest has {expected.bytes} bytes"
            )
    for shard, head in zip(shards, contents, strict=False):
        _check_header(folder.location / f"{shard.name}.idx", bytes(head), manifest, shard)


def _check_header(location: Url, head: bytes, manifest: DataManifest, shard: TokenShard) -> None:
    magic, version, code, sequences, ends = HEADER.unpack(head)
    if magic != MAGIC or version != 1 or code not in DTYPE_CODES:
        raise _damage_error(
            location,
            f"starting with {magic!r}, version={version}, dtype code={code}",
            "an .idx file starts with Megatron's header",
        )
    seen = (DTYPE_CODES[code].name, ends - 1, HEADER.size + sequences * 12 + ends * 8)
    expected = (manifest.dtype, shard.documents, shard.idx.bytes)
    if seen != expected:
        template = "dtype {}, {} documents, {} bytes"
        raise _damage_error(
            location, template.format(*seen), f"the manifest has {template.format(*expected)}"
        )


def _non_empty_shards(split: TokenSplit) -> list[TokenShard]:
    return [shard for shard in split.shards if shard.tokens]


def _folder(manifest: DataManifest, limits: RequestLimits | None = None) -> StoreFolder:
    assert manifest.url is not None, f"{manifest.folder} is a local folder"
    folder = open_folder(manifest.url, limits)
    assert isinstance(folder, StoreFolder)
    return folder


def _damage_error(location: Url, seen: str, rule: str) -> InputError:
    return DATA.error(f"{location}: {seen}", rule, "restore the file, or prepare the data again")


class RemoteTokens:
    """A split in a store: a ``TokenSource``.

    Raises InputError if a file's size differs from the manifest's.
    """

    def __init__(
        self,
        manifest: DataManifest,
        split: str,
        *,
        cache: BlockCache | None = None,
        repeated: bool = False,
        limits: RequestLimits | None = None,
    ) -> None:
        """Args: cache: stores blocks of 32 KiB; None: windows are fetched exactly. repeated: the same
        windows are read repeatedly (an evaluation): up to CACHED_BYTES of them stay in memory.
        """
        self.manifest = manifest
        self.split = manifest.split(split)
        self.tokens = self.split.tokens
        self.vocab_size = manifest.tokenizer.size
        self.data_hash = self.split.data_hash
        self.tokenizer_hash = manifest.tokenizer.hash
        self.dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self.token_bytes = self.dtype.itemsize
        self._shards = _non_empty_shards(self.split)
        self._ends = np.cumsum([shard.tokens for shard in self._shards], dtype=np.int64)
        self._names = [f"{shard.name}.bin" for shard in self._shards]
        self._files = {
            name: CachedFile(name, shard.bin.xxh3_128, shard.bin.bytes)
            for name, shard in zip(self._names, self._shards, strict=True)
        }
        files = TokenSplit(tuple(self._shards)).files
        self.folder = _folder(manifest, limits).for_reading(
            {name: expected.bytes for name, expected in files.items()}
        )
        self._reader = make_checked_reader(self.folder, files)
        self._cache = cache
        self._memory_left = CACHED_BYTES if repeated else 0
        self._cached: dict[Span, Buffer] = {}

    def read(self, starts: Ints, out: npt.NDArray[Any]) -> None:
        length = out.shape[1]
        assert len(starts) == len(out), f"{len(starts)} starts for {len(out)} rows"
        if not out.size:
            return
        assert starts.min() >= 0, f"start {starts.min()}"
        assert starts.max() + length <= self.tokens, (
            f"window {starts.max()} + {length} of {self.tokens} tokens"
        )
        parts = split_windows(starts, length, self._ends, self.token_bytes)
        spans, owners = merge_spans(parts, self.token_bytes, self.folder.limits.part_bytes)
        contents = self._contents(spans)
        for part, owner in zip(parts, owners, strict=True):
            tokens = np.frombuffer(contents[owner], self.dtype, part.count, part.start - spans[owner][1])
            out[part.row, part.column : part.column + part.count] = tokens

    def windows(self, starts: Ints, length: int) -> list[bytes | memoryview]:
        rows = np.empty((len(starts), length), dtype=self.dtype)
        self.read(starts, rows)
        return [memoryview(row).cast("B") for row in rows]

    def _contents(self, spans: list[Span]) -> list[Buffer]:
        missing = [span for span in spans if span not in self._cached]
        fetched = dict(zip(missing, self._read(missing), strict=True))
        for span, content in fetched.items():
            if len(content) <= self._memory_left:
                self._cached[span] = content
                self._memory_left -= len(content)
        return [fetched[span] if span in fetched else self._cached[span] for span in spans]

    def _read(self, spans: list[Span]) -> list[Buffer]:
        ranges = [ByteRange(self._names[shard], start, end) for shard, start, end in spans]
        if self._cache is None:
            return self._reader.read_ranges(ranges)
        return read_cached(self._cache, self._reader, self._files, ranges)
