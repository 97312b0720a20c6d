"""Second pass: each shard gets the documents of its key range from all parts, by ascending key.

The number of shards of a split follows from its tokens; keys are hashes, so shards are about equally large.
Memory of a process: the tokens of a slice of the range (``memory_mib``), and twice one document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.manifest import TokenShard, parse_shard
from toolkit.data.prepare.document_keys import first_of_equal_keys
from toolkit.data.prepare.parts import SPLITS, PartReceipt, PartSlice, read_part_slice, read_receipts
from toolkit.data.prepare.tokenise import PARTS
from toolkit.data.tokens.writer import ShardWriter
from toolkit.files import write_whole

SHARDS = "shards"
KEYS = 1 << 64  # values of the key's high word, which determines the shard


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A shard to write: number ``number`` of the ``count`` shards of a split, about ``bytes`` large."""

    split: int
    number: int
    count: int
    bytes: int

    @property
    def name(self) -> str:
        return f"{SPLITS[self.split]}-{self.number:05}"

    def bounds(self, slices: int) -> Iterator[tuple[int, int]]:
        """Split the shard's key range into ``slices`` adjacent ranges."""
        parts = self.count * slices
        edges = [-(-KEYS * (self.number * slices + index) // parts) for index in range(slices + 1)]
        return pairwise(edges)


@dataclass(frozen=True, slots=True)
class ShardReceipt:
    """The result of a shard: None if no key is in its range; and the number of duplicates dropped."""

    shard: TokenShard | None
    equal: int


def plan_shards(receipts: Sequence[PartReceipt], token_bytes: int, shard_bytes: int) -> list[ShardPlan]:
    """Plan every shard of every split, from the token counts before duplicates are dropped."""
    plans = []
    for split in range(len(SPLITS)):
        size = sum(receipt.tokens[split] for receipt in receipts) * token_bytes
        count = -(-size // shard_bytes)
        plans += [ShardPlan(split, number, count, size // count) for number in range(count)]
    return plans


def start_merging(
    work: Path,
    output: Path,
    dtype: np.dtype[Any],
    shards: Sequence[ShardPlan],
    memory_bytes: int,
    deduplicate: bool,
) -> Callable[[int, Callable[[int], None]], None]:
    """Return a function that writes a shard by number and reports the bytes of tokens written."""
    receipts = read_receipts(work / PARTS)

    def merge_shard(number: int, advance: Callable[[int], None]) -> None:
        planned = shards[number]
        writer = ShardWriter(output, planned.name, dtype)
        try:
            equal = 0
            for low, high in planned.bounds(max(1, -(-planned.bytes // memory_bytes))):
                chunks = (
                    read_part_slice(work / PARTS, receipt, planned.split, low, high, dtype)
                    for receipt in receipts
                )
                equal += _write_range(
                    [chunk for chunk in chunks if len(chunk.high)], writer, deduplicate, advance
                )
            if writer.bytes:
                receipt = ShardReceipt(writer.close(), equal)
            else:
                writer.discard()
                receipt = ShardReceipt(None, equal)
        except BaseException:
            writer.discard()
            raise
        write_whole(work / SHARDS / f"{planned.name}.json", json.dumps(asdict(receipt)))

    return merge_shard


def _write_range(
    chunks: Sequence[PartSlice], writer: ShardWriter, deduplicate: bool, advance: Callable[[int], None]
) -> int:
    """Write the documents of a key range and return the number of duplicates dropped."""
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
        order = order[first_of_equal_keys(highs[order], lows[order])]
    for number, start, end in zip(
        owner[order].tolist(), first[order].tolist(), last[order].tolist(), strict=True
    ):
        writer.add(chunks[number].tokens[start:end])
    advance(sum(chunk.tokens.nbytes for chunk in chunks))
    return len(highs) - len(order)


def read_shard_receipts(work: Path, shards: Sequence[ShardPlan]) -> dict[int, ShardReceipt]:
    """Read the receipts of finished shards, by shard number."""
    plans = {}
    for number, planned in enumerate(shards):
        path = work / SHARDS / f"{planned.name}.json"
        if path.is_file():
            content = json.loads(path.read_bytes())
            shard = content["shard"]
            parsed_shard = parse_shard(shard) if shard else None
            plans[number] = ShardReceipt(parsed_shard, content["equal"])
    return plans
