"""Write a folder of records; toolkit/data/records/reader.py describes the format.

    fields = {"image": ("uint16", (12, 64, 64)), "label": ("int64", ())}
    with RecordWriter("data/tiles", fields, description="field campaign", licence="CC-BY-4.0") as writer:
        for image, label in tiles:
            writer.add("train", image=image, label=label)

The complete folder appears when the ``with`` block ends without an error. Until then the files are in
``.tiles.<hex>.writing`` next to it, which a killed writer leaves behind and which may be deleted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from toolkit.data.records.reader import (
    DTYPES,
    RECORD_SUFFIX,
    FieldStatistics,
    RecordField,
    RecordManifest,
    RecordOrigin,
    RecordShard,
    RecordSplit,
    write_record_manifest,
)
from toolkit.data.tokens.writer import SHARD_BYTES, HashedFile
from toolkit.errors import InputError, Problem
from toolkit.files import sync_folder

BUFFER_BYTES = 1 << 20


class RecordWriter:
    """Writes a folder of records; a context manager.

    Memory: 1 MiB per split, or one record if that is larger, and up to eight times as much for the
    statistics.
    """

    def __init__(
        self,
        folder: str | Path,
        fields: Mapping[str, tuple[npt.DTypeLike, Sequence[int]]],
        *,
        description: str,
        licence: str,
        source: str = "",
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """
        Args:
            fields: dtype and shape of every field by name, in their order.
            source: where the records come from; may be an address.
            shard_bytes: maximum size of a file; records are not cut.

        Raises:
            InputError: ``folder`` is not empty, or a field is invalid.
        """
        self._folder = Path(folder)
        if self._folder.exists() and (not self._folder.is_dir() or any(self._folder.iterdir())):
            raise _problem(
                f"{folder} exists", "a writer makes a new folder", "name another folder, or remove this one"
            )
        self._dtype, self._fields = _layout(fields)
        self._origin = RecordOrigin(description, licence, source)
        self._shard_bytes = shard_bytes
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._partial = self._folder.with_name(f".{self._folder.name}.{os.urandom(4).hex()}.writing")
        self._partial.mkdir()
        self._splits: dict[str, _SplitWriter] = {}
        self._manifest: RecordManifest | None = None

    def add(self, split: str, /, **values: npt.ArrayLike) -> None:
        """Add one record at the end of ``split``, with a value of the right shape for every field.

        Raises:
            InputError: a field is missing or of another shape, or a number does not fit its dtype or is not
                finite.
        """
        if split not in self._splits:
            if not split.isidentifier():
                raise _problem(
                    f"split {split!r}",
                    "a split's name consists of letters, digits and '_'",
                    "name it train or validation",
                )
            self._splits[split] = _SplitWriter(self._partial, split, self._dtype, self._shard_bytes)
        self._splits[split].add(values)

    @property
    def manifest(self) -> RecordManifest:
        """The manifest of the closed folder."""
        assert self._manifest is not None, "close the writer first"
        return self._manifest

    def close(self) -> None:
        """Finish the folder and rename it.

        Closing again has no effect. Raises InputError if there is no record.
        """
        if self._manifest is not None:
            return
        if not self._splits:
            raise _problem(
                "no record", "a folder of records has at least one", "add records before closing the writer"
            )
        splits = {name: writer.close() for name, writer in self._splits.items()}
        self._splits = {}
        size = self._dtype.itemsize
        manifest = RecordManifest(
            folder=self._partial, origin=self._origin, fields=self._fields, record_bytes=size, splits=splits
        )
        write_record_manifest(manifest)
        self._partial.replace(self._folder)
        sync_folder(self._folder.parent)
        self._manifest = replace(manifest, folder=self._folder)

    def discard(self) -> None:
        """Remove everything that was written."""
        for writer in self._splits.values():
            writer.discard()
        shutil.rmtree(self._partial, ignore_errors=True)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.close()
        except BaseException:
            self.discard()
            raise


class _SplitWriter:
    """Writes the shards ``<split>-00000``, ``<split>-00001`` ... and computes their field statistics."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[np.void], shard_bytes: int) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._shard_records = max(1, shard_bytes // dtype.itemsize)
        self._buffer = np.zeros(max(1, min(BUFFER_BYTES // dtype.itemsize, self._shard_records)), dtype=dtype)
        self._filled = 0
        self._statistics_by_field = {name: _RunningStatistics() for name in dtype.names or ()}
        self._shards: list[RecordShard] = []
        self._file: HashedFile | None = None
        self._records = 0  # in the current shard

    def add(self, values: Mapping[str, npt.ArrayLike]) -> None:
        names = self._dtype.names or ()
        if values.keys() != set(names):
            raise self._record_error(
                f"has {', '.join(values) or 'nothing'}",
                f"a record has the fields {', '.join(names)}",
                "give a value for each of them",
            )
        if self._filled == len(self._buffer):
            self._flush()
        for name in names:
            self._buffer[name][self._filled] = self._convert(name, np.asarray(values[name]))
        self._filled += 1

    def close(self) -> RecordSplit:
        self._flush()
        self._end_shard()
        return RecordSplit(
            tuple(self._shards),
            {name: running.statistics() for name, running in self._statistics_by_field.items()},
        )

    def discard(self) -> None:
        if self._file is not None:
            self._file.discard()

    def _convert(self, name: str, value: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """Convert ``value`` to the field's dtype after checking its shape."""
        dtype, shape = self._dtype[name].base, self._dtype[name].shape
        if value.shape != shape:
            raise self._record_error(
                f"has a {name} of shape {list(value.shape)}",
                f"its shape is {list(shape)}",
                "crop or pad it first",
            )
        if value.dtype.kind not in "biuf":
            raise self._record_error(
                f"has a {name} of dtype {value.dtype}", "a field stores numbers", "convert it first"
            )
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise self._record_error(
                f"has a {name} with NaN or infinity",
                "numbers are finite, as losses must be",
                "fill missing values",
            )
        if value.dtype == dtype:
            return value
        with np.errstate(all="ignore"):  # values that do not fit are reported below
            converted = value.astype(dtype)
        if not (np.isfinite(converted).all() if dtype.kind == "f" else np.array_equal(converted, value)):
            raise self._record_error(
                f"has a {name} in {value.min()} .. {value.max()}",
                f"each number fits {dtype}",
                "scale it, or use a wider dtype",
            )
        return converted

    def _flush(self) -> None:
        """Write the buffered records to shards; padding stays zero."""
        remaining = self._buffer[: self._filled]
        for name, running in self._statistics_by_field.items():
            if len(remaining):
                running.add(remaining[name])
        while len(remaining):
            if self._file is None:
                self._file = HashedFile(self._folder / f"{self._split}-{len(self._shards):05}{RECORD_SUFFIX}")
            part = remaining[: self._shard_records - self._records]
            self._file.write(part.view(np.uint8).data)
            self._records += len(part)
            remaining = remaining[len(part) :]
            if self._records == self._shard_records:
                self._end_shard()
        self._filled = 0

    def _end_shard(self) -> None:
        if self._file is not None:
            self._shards.append(
                RecordShard(f"{self._split}-{len(self._shards):05}", self._records, *self._file.close())
            )
            self._file, self._records = None, 0

    def _record_error(self, seen: str, rule: str, remedy: str) -> InputError:
        written = sum(shard.records for shard in self._shards) + self._records + self._filled
        return _problem(f"record {written} of split {self._split} {seen}", rule, remedy)


class _RunningStatistics:
    """Mean and variance updated batch by batch (Chan, Golub, LeVeque 1983), without cancellation."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._squares = np.zeros(1)
        self._minimum, self._maximum = np.inf, -np.inf

    def add(self, values: npt.NDArray[np.generic]) -> None:
        """Add values [records, *shape]."""
        self._minimum, self._maximum = (
            min(self._minimum, values.min().item()),
            max(self._maximum, values.max().item()),
        )
        bands = values.shape[1] if values.ndim > 1 else 1
        parts = values.reshape(len(values), bands, -1).astype(np.float64)
        count = len(values) * parts.shape[2]
        mean = parts.mean(axis=(0, 2))
        parts -= mean[:, None]
        squares = np.einsum("rbi,rbi->b", parts, parts)
        total = self._count + count
        difference = mean - self._mean
        self._squares = self._squares + squares + difference**2 * (self._count * count / total)
        self._mean = self._mean + difference * (count / total)
        self._count = total

    def statistics(self) -> FieldStatistics:
        std = np.sqrt(self._squares / self._count)
        return FieldStatistics(tuple(self._mean.tolist()), tuple(std.tolist()), self._minimum, self._maximum)


def _layout(
    fields: Mapping[str, tuple[npt.DTypeLike, Sequence[int]]],
) -> tuple[np.dtype[np.void], tuple[RecordField, ...]]:
    """Return the struct of the fields, aligned as in C, little endian."""
    parts = []
    for name, (kind, shape) in fields.items():
        field_dtype = np.dtype(kind)
        if field_dtype.name not in DTYPES or not name.isidentifier() or any(size < 1 for size in shape):
            raise _problem(
                f"field {name!r} of dtype {field_dtype} and shape {list(shape)}",
                f"a field has a name of letters, digits and '_', one of the dtypes {', '.join(DTYPES)}, "
                "and no empty dimension",
                "describe it like this: image=('uint16', (12, 64, 64))",
            )
        parts.append((name, field_dtype.newbyteorder("<"), tuple(shape)))
    if not parts:
        raise _problem(
            "no field", "a record has a field", "describe it like this: image=('uint16', (12, 64, 64))"
        )
    dtype = np.dtype(parts, align=True)
    assert dtype.fields is not None
    return dtype, tuple(
        RecordField(name, kind.name, shape, int(dtype.fields[name][1])) for name, kind, shape in parts
    )


def _problem(seen: str, rule: str, remedy: str) -> InputError:
    return InputError(Problem("records", seen, rule, remedy))
