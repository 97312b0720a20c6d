"""Records that are not tokens: samples of one fixed size (tiles of an image with a label, boards, spectra), read at random by number.

    records = open_records("data/tiles", "train")
    records.read(np.zeros(2, np.int64), np.array([7, 3]))["image"]      # uint16 [2, 12, 64, 64]

A folder of records, written by ``RecordWriter`` (toolkit/data/records/writer.py):

    manifest.json              fields, splits, counts, size and hash of every file, statistics of each field, origin and licence
    train-00000.records, ...   records one after another, nothing between them; none is cut by the end of a file
    train-00000.sums, ...      hashes of the blocks of the file beside it (toolkit/data/sums.py)

A record is a C struct: its fields in their order, little endian, each aligned as the C compiler does it, padded with zeros to a whole
number of its largest alignment (the manifest says every offset and the size). So record ``n`` is bytes ``n * record_bytes`` to
``(n + 1) * record_bytes`` of its split: one contiguous range of one file, on disk or in an object store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.data.digest import HASHED_AT_OPENING_BYTES, Digest, check_bytes, check_size
from toolkit.data.manifest import file_in, incomplete, read_content, write_content
from toolkit.data.order.permutation import BLOCK_BYTES
from toolkit.data.remote.storage import Place, Url, place_of
from toolkit.data.sums import ENDING as SUMS
from toolkit.data.sums import FirstRead, MappedFile, mapped_sums
from toolkit.errors import InputError, Problem
from toolkit.paths import relative_name
from toolkit.progress import Progress

if TYPE_CHECKING:
    from toolkit.data.remote.cache import BlockCache

Ints = npt.NDArray[np.int64]

KIND = "records"
FORMAT_VERSION = 2
READABLE = (1, FORMAT_VERSION)  # format 1 had no sums of blocks and no hash of the manifest itself
ENDING = ".records"
DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
)


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
    """The files ``<name>.records`` and, unless they were made before format 2, ``<name>.sums`` (toolkit/data/sums.py)."""

    name: str
    records: int
    file: Digest
    sums: Digest | None = None

    @property
    def file_name(self) -> str:
        return f"{self.name}{ENDING}"

    @property
    def sums_name(self) -> str:
        return f"{self.name}{SUMS}"


@dataclass(frozen=True, slots=True)
class RecordSplit:
    """Shards in the order in which their records are numbered; ``statistics`` by field."""

    shards: tuple[RecordShard, ...]
    statistics: Mapping[str, Statistics]

    @property
    def records(self) -> int:
        return sum(shard.records for shard in self.shards)

    @property
    def files(self) -> dict[str, Digest]:
        """What each file of the shards must be, by name."""
        return {shard.file_name: shard.file for shard in self.shards} | {
            shard.sums_name: shard.sums for shard in self.shards if shard.sums is not None
        }


@dataclass(frozen=True, slots=True)
class RecordOrigin:
    """Where the records come from, in words; ``source`` may be an address."""

    description: str
    licence: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordManifest:
    folder: Place  # where the files lie, perhaps in a store; not written
    origin: RecordOrigin
    fields: tuple[Field, ...]
    record_bytes: int
    splits: Mapping[str, RecordSplit]

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Of a record."""
        return np.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": [(np.dtype(field.dtype).newbyteorder("<"), field.shape) for field in self.fields],
                "offsets": [field.offset for field in self.fields],
                "itemsize": self.record_bytes,
            }
        )

    def split(self, name: str) -> RecordSplit:
        """Raises InputError naming the splits that there are."""
        if name not in self.splits:
            remedy = f"use one of: {', '.join(sorted(self.splits))}"
            raise InputError(
                Problem(
                    "data.path", f"split {name} of {self.folder}", "the data folder holds the split", remedy
                )
            )
        return self.splits[name]

    def data_hash(self, name: str) -> str:
        """Of everything that decides what a run sees of a split: bytes, fields, statistics. 32 hex digits."""
        split = self.split(name)
        shards = [(shard.records, shard.file.xxh3_128) for shard in split.shards]
        statistics = {field: asdict(found) for field, found in sorted(split.statistics.items())}
        parts = [[asdict(field) for field in self.fields], self.record_bytes, shards, statistics]
        return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


class Rows(Protocol):
    """The bytes of a split's records, wherever they are kept."""

    def take(self, numbers: Ints) -> npt.NDArray[np.uint8]:
        """The records ``numbers`` [n]: [n, record_bytes]."""


class MappedRows:
    """Local files, mapped: opening costs nothing that grows with the data, and ranks share the page cache."""

    def __init__(
        self, folder: Path, shards: Sequence[RecordShard], row_bytes: int, *, checked: bool = False
    ) -> None:
        """
        Args:
            checked: all bytes of the split were compared with their hashes already; else each block is when it is first read.

        Raises:
            InputError: a file is absent or has another size than the manifest says. Reading raises it for a damaged block.
        """
        files = [(file_in(folder, shard.file_name), shard.file) for shard in shards]
        # Bytes rather than structs, which numpy may copy field by field; plain arrays, since indexing a memmap object costs more.
        self._shards = [
            np.asarray(
                np.memmap(
                    check_size(file, expected),
                    dtype=np.uint8,
                    mode="r",
                    shape=(expected.bytes // row_bytes, row_bytes),
                )
            )
            for file, expected in files
        ]
        self._row_bytes = row_bytes
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)
        self._firsts = np.concatenate([np.zeros(1, dtype=np.int64), self._ends[:-1]])
        self._first_read = (
            None
            if checked
            else FirstRead(
                [
                    MappedFile(
                        path, rows.reshape(-1).data, mapped_sums(file_in(folder, shard.sums_name), shard.sums)
                    )
                    for (path, _), rows, shard in zip(files, self._shards, shards, strict=True)
                ]
            )
        )

    def take(self, numbers: Ints) -> npt.NDArray[np.uint8]:
        if self._first_read is not None:
            which = np.searchsorted(self._ends, numbers, side="right")
            places = (numbers - self._firsts[which]) * self._row_bytes
            self._first_read.check(
                self._first_read.units(which, places),
                self._first_read.units(which, places + self._row_bytes - 1),
            )
        if len(self._shards) == 1:
            return self._shards[0].take(numbers, axis=0)
        rows = np.empty((len(numbers), self._shards[0].shape[1]), dtype=np.uint8)
        which = np.searchsorted(self._ends, numbers, side="right")
        for number in np.unique(which).tolist():
            at = np.flatnonzero(which == number)
            shard = self._shards[number]
            rows[at] = shard.take(numbers[at] - (int(self._ends[number]) - len(shard)), axis=0)
        return rows


class Records:
    """``Samples`` of one split."""

    def __init__(self, manifest: RecordManifest, split: str, rows: Rows) -> None:
        self.manifest = manifest
        self.split = manifest.split(split)
        self.dtype = manifest.dtype
        self.count = self.split.records
        self.block = max(1, BLOCK_BYTES // manifest.record_bytes)
        self.stored, self.shape = self.dtype, ()
        self._name = split
        self._rows = rows

    def buffers(self, epochs: Ints, numbers: Ints) -> list[memoryview]:
        return [row.data for row in self._rows.take(numbers)]

    def read(self, epochs: Ints, numbers: Ints) -> npt.NDArray[np.void]:
        """The records ``numbers`` [n], the same in every epoch: [n] structs, whose fields are arrays [n, *shape]."""
        assert not numbers.size or (numbers.min() >= 0 and numbers.max() < self.count), (
            f"records of 0 .. {self.count}: {numbers}"
        )
        return self._rows.take(numbers).view(self.dtype)[:, 0]

    def fingerprint(self) -> dict[str, str | int]:
        return {"data": self.manifest.data_hash(self._name)}


def open_records(
    path: str | Path, split: str, *, cache: BlockCache | None = None, surveyed: bool = False
) -> Records:
    """The records of ``split`` of the data folder ``path``, which may be a URL.

    Sizes are checked always, and on this machine all bytes of a split of up to 256 MiB. Of a larger split and of data in a store each
    block is checked when it is read, if the folder has sums (format 2 of the manifest).

    Args:
        cache: of records in a store, see ``remote_records.StoreRows``.
        surveyed: another process has done ``survey`` for this start: ranks do not ask a store for every shard again.

    Raises:
        InputError: no such folder or split, or a file that is not what the manifest says.
    """
    manifest = read_records(path)
    chosen = manifest.split(split)
    if isinstance(manifest.folder, Url):
        from toolkit.data.remote.records import StoreRows

        if not surveyed:
            survey(manifest, [split])
        return Records(
            manifest, split, StoreRows(manifest.folder, chosen.files, manifest.record_bytes, cache=cache)
        )
    files = [(file_in(manifest.folder, name), expected) for name, expected in chosen.files.items()]
    whole = sum(expected.bytes for _, expected in files) <= HASHED_AT_OPENING_BYTES
    if whole:
        check_bytes(files, Progress.silent())
    return Records(
        manifest, split, MappedRows(manifest.folder, chosen.shards, manifest.record_bytes, checked=whole)
    )


def survey(manifest: RecordManifest, splits: Sequence[str]) -> None:
    """Before ranks start: every file of ``splits`` is there and as long as the manifest says. Raises InputError."""
    names = [file for split in splits for file in manifest.split(split).files.items()]
    if isinstance(manifest.folder, Url):
        from toolkit.data.remote.records import survey_files  # with it comes what speaks to stores

        survey_files(manifest.folder, names)
    else:
        for name, expected in names:
            check_size(file_in(manifest.folder, name), expected)


def verify_records(path: str | Path, progress: Progress) -> RecordManifest:
    """Read every byte of a data folder on this machine and compare. Raises InputError naming the first file that differs."""
    manifest = read_records(path)
    if isinstance(manifest.folder, Url):
        raise InputError(
            Problem(
                "inspect",
                f"{path} lies in a store",
                "records are verified on a disk",
                "copy the folder here first",
            )
        )
    names = [file for split in manifest.splits.values() for file in split.files.items()]
    check_bytes([(file_in(manifest.folder, name), expected) for name, expected in names], progress)
    return manifest


def read_records(path: str | Path) -> RecordManifest:
    """The manifest of the data folder ``path``.

    Raises:
        InputError: there is none, it is of another kind or format version, or it contradicts itself.
    """
    file, content = read_content(path, KIND, READABLE)
    try:
        manifest = RecordManifest(
            folder=place_of(path),
            origin=RecordOrigin(**content["origin"]),
            record_bytes=int(content["record_bytes"]),
            fields=tuple(Field(**{**field, "shape": tuple(field["shape"])}) for field in content["fields"]),
            splits={name: _split(split) for name, split in content["splits"].items()},
        )
        if not {field.dtype for field in manifest.fields} <= set(DTYPES):
            raise TypeError(f"dtype of {[field.dtype for field in manifest.fields]}")
        _ = manifest.dtype  # numpy refuses fields that reach beyond the record
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise incomplete(file, error) from error
    for name, split in manifest.splits.items():
        for shard in split.shards:
            if shard.records * manifest.record_bytes != shard.file.bytes or not shard.records:
                seen = f"{shard.name} of split {name}: {shard.records} records of {manifest.record_bytes} bytes in {shard.file.bytes} bytes"
                raise InputError(
                    Problem(
                        "data.path",
                        f"{file}: {seen}",
                        "a shard is whole records, at least one",
                        "restore the file, or write the records again",
                    )
                )
    return manifest


def write_manifest(manifest: RecordManifest) -> None:
    """Into ``manifest.folder``, which is on this machine."""
    assert isinstance(manifest.folder, Path), f"{manifest.folder} is read only"
    content = {name: value for name, value in asdict(manifest).items() if name != "folder"}
    write_content(manifest.folder, {"format_version": FORMAT_VERSION, "kind": KIND, **content})


def describe(manifest: RecordManifest) -> list[str]:
    """Lines for people: origin, fields, splits."""
    origin = manifest.origin
    source = f" from {origin.source}" if origin.source else ""
    lines = [
        f"records    {origin.description}{source} ({origin.licence}), {manifest.record_bytes:,} bytes each"
    ]
    for field in manifest.fields:
        lines.append(f"field      {field.name}: {field.dtype} {list(field.shape)}")
    for name, split in manifest.splits.items():
        lines.append(
            f"{name:<10} {split.records:,} records in {len(split.shards)} files, xxh3 {manifest.data_hash(name)}"
        )
        for of, found in split.statistics.items():
            means = ", ".join(
                f"{mean:.4g} ± {std:.4g}" for mean, std in zip(found.mean[:16], found.std[:16], strict=True)
            )
            lines.append(
                f"{'':<10} {of} in {found.least:g} .. {found.most:g}; mean ± std {means}{' ...' * (len(found.mean) > 16)}"
            )
    return lines


def _split(content: Mapping[str, Any]) -> RecordSplit:
    shards = tuple(
        RecordShard(
            relative_name(shard["name"]),
            int(shard["records"]),
            Digest(**shard["file"]),
            Digest(**shard["sums"]) if shard.get("sums") else None,
        )
        for shard in content["shards"]
    )
    found = content["statistics"].items()
    return RecordSplit(
        shards,
        {
            name: Statistics(tuple(of["mean"]), tuple(of["std"]), of["least"], of["most"])
            for name, of in found
        },
    )
