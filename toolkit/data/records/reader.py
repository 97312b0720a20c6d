"""Fixed-size records other than tokens (image tiles with a label, spectra), read at random by number.

    records = open_records("data/tiles", "train")
    records.read(np.zeros(2, np.int64), np.array([7, 3]))["image"]      # uint16 [2, 12, 64, 64]

A folder of records, written by ``RecordWriter`` (toolkit/data/records/writer.py):

    manifest.json              fields, splits, size and hash of every file, statistics, origin, licence
    train-00000.records, ...   records without gaps; none crosses the end of a file
    train-00000.sums, ...      block checksums of each file (toolkit/data/checksums.py)

A record is a C struct: its fields in order, little endian, aligned as by a C compiler, padded with zeros to a
multiple of its largest alignment (the manifest has every offset and the size). So record ``n`` is bytes ``n *
record_bytes`` to ``(n + 1) * record_bytes`` of its split: one contiguous range of one file, on disk or in an
object store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from toolkit.data.checksums import CHECKSUM_SUFFIX
from toolkit.data.digest import HASHED_AT_OPENING_BYTES, FileDigest, check_file_hashes, check_file_size
from toolkit.data.manifest_file import (
    incomplete_manifest,
    read_manifest_file,
    resolve_file,
    write_manifest_file,
)
from toolkit.data.order.permutation import BLOCK_BYTES
from toolkit.data.records.row_storage import MappedRows, RecordRows, StoreRows, check_store_sizes
from toolkit.errors import InputError, Problem
from toolkit.paths import Location, Url, relative_name
from toolkit.progress import Progress
from toolkit.remote.errors import DATA
from toolkit.remote.storage import parse_location

if TYPE_CHECKING:
    from toolkit.data.remote.cache import BlockCache

Ints = npt.NDArray[np.int64]

RECORDS_KIND = "records"
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, FORMAT_VERSION)  # format 1 has no block checksums and no hash of the manifest itself
RECORD_SUFFIX = ".records"
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
class RecordField:
    """One array in every record."""

    name: str
    dtype: str  # one of DTYPES
    shape: tuple[int, ...]  # () for a number
    offset: int  # bytes from the start of the record


@dataclass(frozen=True, slots=True)
class FieldStatistics:
    """Statistics of one field over all records of a split.

    Attributes:
        mean, std: of each index of the field's first dimension (each band of an image [bands, height,
            width]), or of the number itself. ``std`` is that of the population.
        least, most: minimum and maximum of all values.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class RecordShard:
    """The files ``<name>.records`` and, from format 2 on, ``<name>.sums`` (toolkit/data/checksums.py)."""

    name: str
    records: int
    file: FileDigest
    sums: FileDigest | None = None

    @property
    def file_name(self) -> str:
        return f"{self.name}{RECORD_SUFFIX}"

    @property
    def sums_name(self) -> str:
        return f"{self.name}{CHECKSUM_SUFFIX}"


@dataclass(frozen=True, slots=True)
class RecordSplit:
    """Shards in the order of their records, and statistics by field."""

    shards: tuple[RecordShard, ...]
    statistics: Mapping[str, FieldStatistics]

    @property
    def records(self) -> int:
        return sum(shard.records for shard in self.shards)

    @property
    def files(self) -> dict[str, FileDigest]:
        """Size and hash of each file of the shards, by name."""
        return {shard.file_name: shard.file for shard in self.shards} | {
            shard.sums_name: shard.sums for shard in self.shards if shard.sums is not None
        }


@dataclass(frozen=True, slots=True)
class RecordOrigin:
    """The origin of the records; ``source`` may be an address."""

    description: str
    licence: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordManifest:
    folder: Location  # where the files are, perhaps a store; not written
    origin: RecordOrigin
    fields: tuple[RecordField, ...]
    record_bytes: int
    splits: Mapping[str, RecordSplit]

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Dtype of a record."""
        return np.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": [(np.dtype(field.dtype).newbyteorder("<"), field.shape) for field in self.fields],
                "offsets": [field.offset for field in self.fields],
                "itemsize": self.record_bytes,
            }
        )

    def split(self, name: str) -> RecordSplit:
        """Return the split ``name``. Raises InputError naming the available splits if there is none of this
        name.
        """
        if name not in self.splits:
            remedy = f"use one of: {', '.join(sorted(self.splits))}"
            raise DATA.error(f"split {name} of {self.folder}", "the data folder holds the split", remedy)
        return self.splits[name]

    def data_hash(self, name: str) -> str:
        """Hash what determines a run's view of a split: bytes, fields, statistics. 32 hex digits."""
        split = self.split(name)
        shards = [(shard.records, shard.file.xxh3_128) for shard in split.shards]
        statistics = {
            field: asdict(field_statistics) for field, field_statistics in sorted(split.statistics.items())
        }
        parts = [[asdict(field) for field in self.fields], self.record_bytes, shards, statistics]
        return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


class RecordSamples:
    """The records of one split as a ``SampleSource``."""

    def __init__(self, manifest: RecordManifest, split: str, rows: RecordRows) -> None:
        self.manifest = manifest
        self.split = manifest.split(split)
        self.dtype = manifest.dtype
        self.count = self.split.records
        self.block = max(1, BLOCK_BYTES // manifest.record_bytes)
        self.stored_dtype, self.shape = self.dtype, ()
        self._name = split
        self._rows = rows

    def limit(self, max_samples: int | None) -> None:
        """Use only the first ``max_samples`` records; None: all."""
        self.count = min(self.split.records, max_samples or self.split.records)

    def buffers(self, epochs: Ints, numbers: Ints) -> list[memoryview]:
        return [row.data for row in self._rows.take(numbers)]

    def read(self, epochs: Ints, numbers: Ints) -> npt.NDArray[np.void]:
        """Return the records ``numbers`` [n], equal in every epoch, as [n] structs of arrays [n, *shape]."""
        assert not numbers.size or (numbers.min() >= 0 and numbers.max() < self.count), (
            f"records of 0 .. {self.count}: {numbers}"
        )
        return self._rows.take(numbers).view(self.dtype)[:, 0]

    def fingerprint(self) -> dict[str, str | int]:
        whole = self.count == self.split.records
        return {"data": self.manifest.data_hash(self._name), **({} if whole else {"max_samples": self.count})}


def open_records(
    path: str | Path, split: str, *, cache: BlockCache | None = None, files_checked: bool = False
) -> RecordSamples:
    """Open the records of ``split`` of the data folder ``path``, which may be a URL.

    Sizes are always checked. All bytes of a local split of up to 256 MiB are verified at once. Blocks of a
    larger split and of data in a store are verified when read, if the folder has checksums (manifest format
    2).

    Args:
        cache: for records in a store, see ``StoreRows``.
        files_checked: another process has called ``check_record_files`` at this start, so
            ranks need not query the store for every shard again.

    Raises:
        InputError: no such folder or split, or a file does not match the manifest.
    """
    manifest = read_record_manifest(path)
    chosen = manifest.split(split)
    if isinstance(manifest.folder, Url):
        if not files_checked:
            check_record_files(manifest, [split])
        return RecordSamples(
            manifest, split, StoreRows(manifest.folder, chosen.files, manifest.record_bytes, cache=cache)
        )
    files = [(resolve_file(manifest.folder, name), expected) for name, expected in chosen.files.items()]
    whole = sum(expected.bytes for _, expected in files) <= HASHED_AT_OPENING_BYTES
    if whole:
        check_file_hashes(files, Progress.silent())
    return RecordSamples(
        manifest, split, MappedRows(manifest.folder, chosen.shards, manifest.record_bytes, checked=whole)
    )


def check_record_files(manifest: RecordManifest, splits: Sequence[str]) -> None:
    """Check that every file of ``splits`` exists and has the manifest's size. Raises InputError."""
    files = [file for split in splits for file in manifest.split(split).files.items()]
    if isinstance(manifest.folder, Url):
        check_store_sizes(manifest.folder, files)
    else:
        for name, expected in files:
            check_file_size(resolve_file(manifest.folder, name), expected)


def verify_records(path: str | Path, progress: Progress) -> RecordManifest:
    """Read and verify every byte of a local data folder.

    Raises InputError naming the first file that differs.
    """
    manifest = read_record_manifest(path)
    if isinstance(manifest.folder, Url):
        raise InputError(
            Problem(
                "inspect",
                f"{path} is in a store",
                "records are verified on a disk",
                "copy the folder here first",
            )
        )
    files = [file for split in manifest.splits.values() for file in split.files.items()]
    check_file_hashes([(resolve_file(manifest.folder, name), expected) for name, expected in files], progress)
    return manifest


def read_record_manifest(path: str | Path) -> RecordManifest:
    """Read the manifest of the data folder ``path``.

    Raises:
        InputError: the manifest is absent, of another kind or format version, or contradicts itself.
    """
    file, content = read_manifest_file(path, RECORDS_KIND, READABLE_VERSIONS)
    try:
        manifest = RecordManifest(
            folder=parse_location(path),
            origin=RecordOrigin(**content["origin"]),
            record_bytes=int(content["record_bytes"]),
            fields=tuple(
                RecordField(**{**field, "shape": tuple(field["shape"])}) for field in content["fields"]
            ),
            splits={name: _split(split) for name, split in content["splits"].items()},
        )
        if not {field.dtype for field in manifest.fields} <= set(DTYPES):
            raise TypeError(f"dtype of {[field.dtype for field in manifest.fields]}")
        _ = manifest.dtype  # numpy raises ValueError for fields that exceed the record
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise incomplete_manifest(file, error) from error
    for name, split in manifest.splits.items():
        for shard in split.shards:
            if shard.records * manifest.record_bytes != shard.file.bytes or not shard.records:
                seen = (
                    f"{shard.name} of split {name}: {shard.records} records of {manifest.record_bytes} bytes "
                    f"in {shard.file.bytes} bytes"
                )
                raise DATA.error(
                    f"{file}: {seen}",
                    "a shard consists of whole records, at least one",
                    "restore the file, or write the records again",
                )
    return manifest


def write_record_manifest(manifest: RecordManifest) -> None:
    """Write the manifest into ``manifest.folder``, which is local."""
    assert isinstance(manifest.folder, Path), f"{manifest.folder} is read-only"
    content = {name: value for name, value in asdict(manifest).items() if name != "folder"}
    write_manifest_file(manifest.folder, {"format_version": FORMAT_VERSION, "kind": RECORDS_KIND, **content})


def describe_records(manifest: RecordManifest) -> list[str]:
    """Format the manifest for display: origin, fields, splits."""
    origin = manifest.origin
    source = f" from {origin.source}" if origin.source else ""
    lines = [
        f"records    {origin.description}{source} ({origin.licence}), {manifest.record_bytes:,} bytes each"
    ]
    for field in manifest.fields:
        lines.append(f"field      {field.name}: {field.dtype} {list(field.shape)}")
    for name, split in manifest.splits.items():
        lines.append(
            f"{name:<10} {split.records:,} records in {len(split.shards)} files, "
            f"xxh3 {manifest.data_hash(name)}"
        )
        for field_name, field_statistics in split.statistics.items():
            means = ", ".join(
                f"{mean:.4g} ± {std:.4g}"
                for mean, std in zip(field_statistics.mean[:16], field_statistics.std[:16], strict=True)
            )
            lines.append(
                f"{'':<10} {field_name} in {field_statistics.least:g} .. {field_statistics.most:g}; "
                f"mean ± std {means}{' ...' * (len(field_statistics.mean) > 16)}"
            )
    return lines


def _split(content: Mapping[str, Any]) -> RecordSplit:
    shards = tuple(
        RecordShard(
            relative_name(shard["name"]),
            int(shard["records"]),
            FileDigest(**shard["file"]),
            FileDigest(**shard["sums"]) if shard.get("sums") else None,
        )
        for shard in content["shards"]
    )
    field_statistics = content["statistics"].items()
    return RecordSplit(
        shards,
        {
            name: FieldStatistics(
                tuple(field_name["mean"]), tuple(field_name["std"]), field_name["least"], field_name["most"]
            )
            for name, field_name in field_statistics
        },
    )
