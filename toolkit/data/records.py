"""Records that are not tokens: samples of one fixed size (tiles of an image with a label, boards, spectra), read at random by number.

    records = open_records("data/tiles", "train")
    records.read(np.zeros(2, np.int64), np.array([7, 3]))["image"]      # uint16 [2, 12, 64, 64]

A folder of records, written by ``RecordWriter`` (toolkit/data/write_records.py):

    manifest.json              fields, splits, counts, size and hash of every file, statistics of each field, origin and licence
    train-00000.records, ...   records one after another, nothing between them; none is cut by the end of a file

A record is a C struct: its fields in their order, little endian, each aligned as the C compiler does it, padded with zeros to a whole
number of its largest alignment (the manifest says every offset and the size). So record ``n`` is bytes ``n * record_bytes`` to
``(n + 1) * record_bytes`` of its split: one contiguous range of one file, on disk or in an object store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.data.digest import Digest, broken, check_bytes, check_size
from toolkit.data.index import HASHED_AT_OPENING_BYTES
from toolkit.data.manifest import NAME, incomplete, read_content
from toolkit.data.order import BLOCK_BYTES
from toolkit.errors import InputError, Problem
from toolkit.files import write_whole
from toolkit.progress import Progress

Ints = npt.NDArray[np.int64]

KIND = "records"
FORMAT_VERSION = 1
ENDING = ".records"
DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Field:
    """One array of every record."""

    name: str
    dtype: str  # one of DTYPES
    shape: tuple[int, ...]  # () for a number
    offset: int  # bytes from the record's first


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one field in all records of a split. ``mean`` and ``std`` (of the population) are of each index of the field's first dim:
    of each band of an image [bands, height, width]; one of a number."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class RecordShard:
    """The file ``<name>.records``."""

    name: str
    records: int
    file: Digest


@dataclass(frozen=True, slots=True)
class RecordSplit:
    """Shards in the order in which their records are numbered; ``statistics`` by field."""

    shards: tuple[RecordShard, ...]
    statistics: Mapping[str, Statistics]

    @property
    def records(self) -> int:
        return sum(shard.records for shard in self.shards)


@dataclass(frozen=True, slots=True)
class RecordOrigin:
    """Where the records come from, in words; ``source`` may be an address."""

    description: str
    licence: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordManifest:
    folder: Path  # where the files lie; not written
    origin: RecordOrigin
    fields: tuple[Field, ...]
    record_bytes: int
    splits: Mapping[str, RecordSplit]

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Of a record."""
        return np.dtype({
            "names": [field.name for field in self.fields],
            "formats": [(np.dtype(field.dtype).newbyteorder("<"), field.shape) for field in self.fields],
            "offsets": [field.offset for field in self.fields],
            "itemsize": self.record_bytes,
        })

    def split(self, name: str) -> RecordSplit:
        """Raises InputError naming the splits that there are."""
        if name not in self.splits:
            remedy = f"use one of: {', '.join(sorted(self.splits))}"
            raise InputError(Problem("data.path", f"split {name} of {self.folder}", "the data folder holds the split", remedy))
        return self.splits[name]

    def data_hash(self, name: str) -> str:
        """Of everything that decides what a run sees of a split: bytes, fields, statistics. 32 hex digits."""
        split = self.split(name)
        shards = [(shard.records, shard.file.xxh3_128) for shard in split.shards]
        statistics = {field: asdict(found) for field, found in sorted(split.statistics.items())}
        parts = [[asdict(field) for field in self.fields], self.record_bytes, shards, statistics]
        return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


class Records:
    """``Samples`` of a split in local files, mapped: opening costs nothing that grows with the data; ranks share the page cache."""

    def __init__(self, manifest: RecordManifest, split: str) -> None:
        """Raises InputError where a file is absent or has another size than the manifest says."""
        self.manifest = manifest
        self.split = manifest.split(split)
        self.dtype = manifest.dtype
        self.count = self.split.records
        self.block = max(1, BLOCK_BYTES // manifest.record_bytes)
        self._name = split
        # Bytes rather than structs, which numpy may copy field by field.
        self._shards = [_map(manifest, shard) for shard in self.split.shards]
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)

    def read(self, epochs: Ints, numbers: Ints) -> npt.NDArray[np.void]:
        """The records ``numbers`` [n], the same in every epoch: [n] structs, whose fields are arrays [n, *shape]."""
        assert not numbers.size or (numbers.min() >= 0 and numbers.max() < self.count), f"records of 0 .. {self.count}: {numbers}"
        if len(self._shards) == 1:
            rows = self._shards[0].take(numbers, axis=0)
        else:
            rows = np.empty((len(numbers), self.dtype.itemsize), dtype=np.uint8)
            which = np.searchsorted(self._ends, numbers, side="right")
            for number in np.unique(which).tolist():
                at = np.flatnonzero(which == number)
                shard = self._shards[number]
                rows[at] = shard.take(numbers[at] - (int(self._ends[number]) - len(shard)), axis=0)
        return rows.view(self.dtype)[:, 0]

    def fingerprint(self) -> dict[str, str | int]:
        return {"data": self.manifest.data_hash(self._name)}


def open_records(path: str | Path, split: str) -> Records:
    """The records of ``split`` of the data folder ``path``.

    Sizes are checked always, and all bytes of a split of up to 256 MiB.

    Raises:
        InputError: no such folder or split, or a file that is not what the manifest says.
    """
    manifest = read_records(path)
    files = _files(manifest, manifest.split(split).shards)
    if sum(expected.bytes for _, expected in files) <= HASHED_AT_OPENING_BYTES:
        check_bytes(files, Progress.silent())
    return Records(manifest, split)


def verify_records(path: str | Path, progress: Progress) -> RecordManifest:
    """Read every byte of the data folder and compare. Raises InputError naming the first file that differs."""
    manifest = read_records(path)
    check_bytes(_files(manifest, [shard for split in manifest.splits.values() for shard in split.shards]), progress)
    return manifest


def read_records(path: str | Path) -> RecordManifest:
    """The manifest of the data folder ``path``.

    Raises:
        InputError: there is none, it is of another kind or format version, or it contradicts itself.
    """
    file, content = read_content(path, KIND, (FORMAT_VERSION,))
    assert isinstance(file, Path), "read_content refuses a URL for what is read from this machine"
    try:
        manifest = RecordManifest(
            folder=Path(path), origin=RecordOrigin(**content["origin"]), record_bytes=int(content["record_bytes"]),
            fields=tuple(Field(**{**field, "shape": tuple(field["shape"])}) for field in content["fields"]),
            splits={name: _split(split) for name, split in content["splits"].items()})
        if not {field.dtype for field in manifest.fields} <= set(DTYPES):
            raise TypeError(f"dtype of {[field.dtype for field in manifest.fields]}")
        _ = manifest.dtype  # numpy refuses fields that reach beyond the record
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise incomplete(file, error) from error
    for name, split in manifest.splits.items():
        for shard in split.shards:
            if shard.records * manifest.record_bytes != shard.file.bytes or not shard.records:
                seen = f"{shard.name} of split {name}: {shard.records} records of {manifest.record_bytes} bytes in {shard.file.bytes} bytes"
                raise broken(file, seen, "a shard is whole records, at least one")
    return manifest


def write_manifest(manifest: RecordManifest) -> None:
    """Into ``manifest.folder``."""
    content = {name: value for name, value in asdict(manifest).items() if name != "folder"}
    write_whole(manifest.folder / NAME, json.dumps({"format_version": FORMAT_VERSION, "kind": KIND, **content}, indent=1) + "\n")


def describe(manifest: RecordManifest) -> list[str]:
    """Lines for people: origin, fields, splits."""
    origin = manifest.origin
    source = f" from {origin.source}" if origin.source else ""
    lines = [f"records    {origin.description}{source} ({origin.licence}), {manifest.record_bytes:,} bytes each"]
    for field in manifest.fields:
        lines.append(f"field      {field.name}: {field.dtype} {list(field.shape)}")
    for name, split in manifest.splits.items():
        lines.append(f"{name:<10} {split.records:,} records in {len(split.shards)} files, xxh3 {manifest.data_hash(name)}")
        for of, found in split.statistics.items():
            means = ", ".join(f"{mean:.4g} ± {std:.4g}" for mean, std in zip(found.mean[:16], found.std[:16], strict=True))
            lines.append(f"{'':<10} {of} in {found.least:g} .. {found.most:g}; mean ± std {means}{' ...' * (len(found.mean) > 16)}")
    return lines


def _split(content: Mapping[str, Any]) -> RecordSplit:
    shards = tuple(RecordShard(shard["name"], int(shard["records"]), Digest(**shard["file"])) for shard in content["shards"])
    found = content["statistics"].items()
    return RecordSplit(shards, {name: Statistics(tuple(of["mean"]), tuple(of["std"]), of["least"], of["most"]) for name, of in found})


def _files(manifest: RecordManifest, shards: Sequence[RecordShard]) -> list[tuple[Path, Digest]]:
    return [(manifest.folder / f"{shard.name}{ENDING}", shard.file) for shard in shards]


def _map(manifest: RecordManifest, shard: RecordShard) -> npt.NDArray[np.uint8]:
    """uint8 [records, record_bytes]. A plain array: indexing a memmap object costs more than reading a short record."""
    file = check_size(manifest.folder / f"{shard.name}{ENDING}", shard.file)
    return np.asarray(np.memmap(file, dtype=np.uint8, mode="r", shape=(shard.records, manifest.record_bytes)))
