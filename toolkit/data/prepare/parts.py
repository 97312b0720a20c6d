"""A part: documents of a work unit as tokens, sorted by key; it exists once its receipt does.

    UUUUUU-PPPPP.tokens   concatenated tokens of the documents, in the manifest's dtype
    UUUUUU-PPPPP.keys     u64 [documents] high words of the keys, u64 [documents] low words,
                          i64 [documents + 1] first token of each document
    UUUUUU-PPPPP.json     the receipt: counts, and how far the unit was read

Training documents precede validation documents; both are sorted by key.
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

UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PartReceipt:
    """Counts of a part.

    Attributes:
        read: documents of the unit read up to the end of this part, including empty ones.
        last: this is the unit's last part.
        kept: documents in the files, for each of SPLITS.
        tokens: for each of SPLITS, including dropped duplicates, so that the sum does not depend on the
            parts.
        text_bytes: UTF-8 bytes of all documents that are not empty.
        equal: documents dropped as duplicates of an earlier one in the part.
        replaced: documents with bytes that are not UTF-8, which became U+FFFD.
        inside: end-of-text tokens that do not end a document.
        special: [string of a special token, occurrences] over all documents that are not empty.
        bad: rows skipped because of ``on_bad_row=skip``.
        first_bad: [source, position, what is wrong] of the first FIRST_BAD of them.
        sources: [number, documents that are not empty] of the part's sources.
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
    receipt: PartReceipt,
    tokens: npt.NDArray[Any],
    high: UInt64s,
    low: UInt64s,
    starts: npt.NDArray[np.int64],
) -> None:
    """Write tokens [tokens], keys [documents] and starts [documents + 1]; the receipt is written last."""
    if len(high):
        write_whole(folder / f"{receipt.name}.tokens", tokens.tobytes())
        write_whole(
            folder / f"{receipt.name}.keys", b"".join(array.tobytes() for array in (high, low, starts))
        )
    write_whole(folder / f"{receipt.name}.json", json.dumps(asdict(receipt)))


def read_receipts(folder: Path) -> list[PartReceipt]:
    """Read all receipts, by unit and part."""
    return [_receipt(path) for path in sorted(folder.glob("*.json")) if not path.name.startswith(".")]


def read_unit_receipts(folder: Path, unit: int) -> list[PartReceipt]:
    """Read the receipts of a unit's finished parts, in order."""
    return list(_following(folder, unit))


def remove_parts(folder: Path, unit: int) -> None:
    """Remove the parts of a unit.

    The last receipt goes first, so that after a kill the remaining ones are contiguous.
    """
    for path in sorted(folder.glob(f"{unit:06}-*.json"), reverse=True):
        path.unlink()
    for path in folder.glob(f"{unit:06}-*"):
        path.unlink()


def _following(folder: Path, unit: int) -> Iterator[PartReceipt]:
    part = 0
    while (path := folder / f"{unit:06}-{part:05}.json").is_file():
        yield _receipt(path)
        part += 1


def _receipt(path: Path) -> PartReceipt:
    content = json.loads(path.read_bytes())
    for name in ("kept", "tokens"):
        content[name] = tuple(content[name])
    for name in ("special", "sources"):
        content[name] = tuple((key, count) for key, count in content[name])
    content["first_bad"] = tuple((source, position, seen) for source, position, seen in content["first_bad"])
    return PartReceipt(**content)


@dataclass(frozen=True, slots=True)
class PartSlice:
    """Documents of a part in a key range: tokens [tokens], keys [documents], starts [documents + 1]."""

    tokens: npt.NDArray[Any]
    high: UInt64s
    low: UInt64s
    starts: npt.NDArray[np.int64]


def read_part_slice(
    folder: Path, receipt: PartReceipt, split: int, low: int, high: int, dtype: np.dtype[Any]
) -> PartSlice:
    """Read only the documents of SPLITS[``split``] whose key's high word is in [low, high)."""
    documents = sum(receipt.kept)
    first = sum(receipt.kept[:split])
    count = receipt.kept[split]
    keys = folder / f"{receipt.name}.keys"
    high_words = (
        np.memmap(keys, dtype="<u8", mode="r", offset=8 * first, shape=(count,))
        if count
        else np.empty(0, dtype="<u8")
    )
    # A bound of 2^64 does not fit u64: the last range ends with the last document.
    begin = int(np.searchsorted(high_words, np.uint64(low)))
    end = int(np.searchsorted(high_words, np.uint64(high))) if high < 1 << 64 else count
    if begin == end:
        no_keys = np.empty(0, dtype="<u8")
        return PartSlice(np.empty(0, dtype), no_keys, no_keys, np.zeros(1, dtype=np.int64))
    starts = np.fromfile(
        keys, dtype="<i8", count=end - begin + 1, offset=16 * documents + 8 * (first + begin)
    )
    count, offset = int(starts[-1] - starts[0]), int(starts[0]) * dtype.itemsize
    tokens = np.fromfile(folder / f"{receipt.name}.tokens", dtype=dtype, count=count, offset=offset)
    lows = np.fromfile(keys, dtype="<u8", count=end - begin, offset=8 * (documents + first + begin))
    return PartSlice(tokens, np.array(high_words[begin:end]), lows, starts - starts[0])
