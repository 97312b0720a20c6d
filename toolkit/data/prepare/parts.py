"""A part: some documents of a unit as tokens, sorted by key; three files that are there when the last of them, the receipt, is.

    UUUUUU-PPPPP.tokens   tokens of the documents, one after another, in the manifest's dtype
    UUUUUU-PPPPP.keys     u64 [documents] high words of the keys, u64 [documents] low words, i64 [documents + 1] first token of each
    UUUUUU-PPPPP.json     the receipt: counts, and how far the unit was read

Training documents stand before validation documents; each of the two is sorted by key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.files import write_whole

SPLITS = ("train", "validation")
FIRST_BAD = 10

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Receipt:
    """
    Attributes:
        read: documents of the unit that were read up to the end of this part, empty ones too.
        last: nothing of the unit comes after it.
        kept: documents in the files, of each of SPLITS.
        tokens: of each of SPLITS, equal documents that were dropped here included, so that the sum does not depend on the parts.
        text_bytes: UTF-8 bytes of all documents that are not empty.
        equal: documents that were dropped since one before in the part is equal.
        replaced: documents with bytes that are not UTF-8, which became U+FFFD.
        inside: end-of-text tokens that do not end a document.
        special: [string of a special token, how often the documents contain it], of all documents that are not empty.
        bad: rows that were left out, by ``on_bad_row=skip``.
        first_bad: [source, place, what is wrong] of the first FIRST_BAD of them.
        sources: [number, documents that are not empty] of the sources in it.
    """

    unit: int
    part: int
    read: int
    last: bool
    kept: tuple[int, int]
    tokens: tuple[int, int]
    text_bytes: int
    empty: int
    equal: int
    replaced: int
    inside: int
    special: tuple[tuple[str, int], ...]
    bad: int
    first_bad: tuple[tuple[int, int, str], ...]
    sources: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return f"{self.unit:06}-{self.part:05}"


def write_part(
    folder: Path,
    receipt: Receipt,
    tokens: npt.NDArray[Any],
    high: Words,
    low: Words,
    starts: npt.NDArray[np.int64],
) -> None:
    """Tokens [tokens]; keys [documents]; starts [documents + 1]. Nothing is there, or all of it."""
    if len(high):
        write_whole(folder / f"{receipt.name}.tokens", tokens.tobytes())
        write_whole(
            folder / f"{receipt.name}.keys", b"".join(array.tobytes() for array in (high, low, starts))
        )
    write_whole(folder / f"{receipt.name}.json", json.dumps(asdict(receipt)))


def read_receipts(folder: Path) -> list[Receipt]:
    """By unit and part."""
    return [_receipt(path) for path in sorted(folder.glob("*.json")) if not path.name.startswith(".")]


def parts_of(folder: Path, unit: int) -> list[Receipt]:
    """What is done of a unit: its parts from the first on."""
    return list(_following(folder, unit))


def remove_parts(folder: Path, unit: int) -> None:
    """Nothing of the unit is done then. The last receipt goes first, so that after a kill the ones that are left follow each other."""
    for path in sorted(folder.glob(f"{unit:06}-*.json"), reverse=True):
        path.unlink()
    for path in folder.glob(f"{unit:06}-*"):
        path.unlink()


def _following(folder: Path, unit: int) -> Iterator[Receipt]:
    part = 0
    while (path := folder / f"{unit:06}-{part:05}.json").is_file():
        yield _receipt(path)
        part += 1


def _receipt(path: Path) -> Receipt:
    content = json.loads(path.read_bytes())
    for name in ("kept", "tokens"):
        content[name] = tuple(content[name])
    for name in ("special", "sources"):
        content[name] = tuple((key, count) for key, count in content[name])
    content["first_bad"] = tuple((source, place, seen) for source, place, seen in content["first_bad"])
    return Receipt(**content)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Documents of a part whose keys lie in a range: tokens [tokens], keys [documents], starts [documents + 1] from 0 on."""

    tokens: npt.NDArray[Any]
    high: Words
    low: Words
    starts: npt.NDArray[np.int64]


def read_chunk(
    folder: Path, receipt: Receipt, split: int, low: int, high: int, dtype: np.dtype[Any]
) -> Chunk:
    """The documents of SPLITS[``split``] with ``low <= high word of the key < high``: only their bytes are read."""
    documents = sum(receipt.kept)
    first = sum(receipt.kept[:split])
    count = receipt.kept[split]
    keys = folder / f"{receipt.name}.keys"
    words = (
        np.memmap(keys, dtype="<u8", mode="r", offset=8 * first, shape=(count,))
        if count
        else np.empty(0, dtype="<u8")
    )
    # A bound of 2^64 is no u64: the last range ends with the last document.
    begin = int(np.searchsorted(words, np.uint64(low)))
    end = int(np.searchsorted(words, np.uint64(high))) if high < 1 << 64 else count
    if begin == end:
        none = np.empty(0, dtype="<u8")
        return Chunk(np.empty(0, dtype), none, none, np.zeros(1, dtype=np.int64))
    starts = np.fromfile(
        keys, dtype="<i8", count=end - begin + 1, offset=16 * documents + 8 * (first + begin)
    )
    count, offset = int(starts[-1] - starts[0]), int(starts[0]) * dtype.itemsize
    tokens = np.fromfile(folder / f"{receipt.name}.tokens", dtype=dtype, count=count, offset=offset)
    lows = np.fromfile(keys, dtype="<u8", count=end - begin, offset=8 * (documents + first + begin))
    return Chunk(tokens, np.array(words[begin:end]), lows, starts - starts[0])
