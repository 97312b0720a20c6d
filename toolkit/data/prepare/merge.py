"""Second pass: each shard takes the documents of its range of keys from all parts, by ascending key.

How many shards a split has follows from its tokens; keys are hashes, so shards are about equally large. Memory of a process: the tokens of
a slice of the range (``memory_mib``), and twice a document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.manifest import Shard, shard_of
from toolkit.data.prepare.keys import first_of_equal
from toolkit.data.prepare.parts import SPLITS, Chunk, Receipt, read_chunk, read_receipts
from toolkit.data.prepare.tokenise import PARTS
from toolkit.data.tokens.writer import ShardWriter
from toolkit.files import write_whole

SHARDS = "shards"
KEYS = 1 << 64  # of the high word, which decides the shard


@dataclass(frozen=True, slots=True)
class Piece:
    """One shard: number ``number`` of ``of`` of a split, of about ``bytes``."""

    split: int
    number: int
    of: int
    bytes: int

    @property
    def name(self) -> str:
        return f"{SPLITS[self.split]}-{self.number:05}"

    def bounds(self, slices: int) -> Iterator[tuple[int, int]]:
        """The shard's keys in ``slices`` ranges, which meet."""
        parts = self.of * slices
        edges = [-(-KEYS * (self.number * slices + index) // parts) for index in range(slices + 1)]
        return pairwise(edges)


@dataclass(frozen=True, slots=True)
class Written:
    """The receipt of a shard; ``shard`` is None where no document has a key of its range. ``equal``: documents dropped here."""

    shard: Shard | None
    equal: int


def pieces(receipts: Sequence[Receipt], token_bytes: int, shard_bytes: int) -> list[Piece]:
    """Every shard of every split, from the tokens before equal documents are dropped."""
    found = []
    for split in range(len(SPLITS)):
        size = sum(receipt.tokens[split] for receipt in receipts) * token_bytes
        count = -(-size // shard_bytes)
        found += [Piece(split, number, count, size // count) for number in range(count)]
    return found


def merging(
    work: Path,
    output: Path,
    dtype: np.dtype[Any],
    shards: Sequence[Piece],
    memory_bytes: int,
    deduplicate: bool,
) -> Callable[[int, Callable[[int], None]], None]:
    """What a process does with the number of a shard; it tells the bytes of tokens that it has written."""
    receipts = read_receipts(work / PARTS)

    def one(number: int, advance: Callable[[int], None]) -> None:
        piece = shards[number]
        writer = ShardWriter(output, piece.name, dtype)
        try:
            equal = 0
            for low, high in piece.bounds(max(1, -(-piece.bytes // memory_bytes))):
                chunks = (
                    read_chunk(work / PARTS, receipt, piece.split, low, high, dtype) for receipt in receipts
                )
                equal += _slice([chunk for chunk in chunks if len(chunk.high)], writer, deduplicate, advance)
            if writer.bytes:
                written = Written(writer.close(), equal)
            else:
                writer.discard()
                written = Written(None, equal)
        except BaseException:
            writer.discard()
            raise
        write_whole(work / SHARDS / f"{piece.name}.json", json.dumps(asdict(written)))

    return one


def _slice(
    chunks: Sequence[Chunk], writer: ShardWriter, deduplicate: bool, advance: Callable[[int], None]
) -> int:
    """Write the documents of a range of keys; the number of those that were dropped."""
    if not chunks:
        return 0
    highs, lows = (
        np.concatenate([chunk.high for chunk in chunks]),
        np.concatenate([chunk.low for chunk in chunks]),
    )
    owner = np.repeat(np.arange(len(chunks)), [len(chunk.high) for chunk in chunks])
    first = np.concatenate([chunk.starts[:-1] for chunk in chunks])
    last = np.concatenate([chunk.starts[1:] for chunk in chunks])
    order = np.lexsort((lows, highs))
    if deduplicate:
        order = order[first_of_equal(highs[order], lows[order])]
    for number, start, end in zip(
        owner[order].tolist(), first[order].tolist(), last[order].tolist(), strict=True
    ):
        writer.add(chunks[number].tokens[start:end])
    advance(sum(chunk.tokens.nbytes for chunk in chunks))
    return len(highs) - len(order)


def written(work: Path, shards: Sequence[Piece]) -> dict[int, Written]:
    """Number of a shard -> its receipt, of those that are done."""
    found = {}
    for number, piece in enumerate(shards):
        path = work / SHARDS / f"{piece.name}.json"
        if path.is_file():
            content = json.loads(path.read_bytes())
            shard = content["shard"]
            made = shard_of(shard) if shard else None
            found[number] = Written(made, content["equal"])
    return found
