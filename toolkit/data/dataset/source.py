"""Open the dataset of ``data.dataset.*``: its splits, what determines its bytes, and its arrow files.

``data.dataset.path`` is looked up on this machine first, and on the hub only if it cannot be a file name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from toolkit.config.data import DatasetConfig
from toolkit.data import hub
from toolkit.data.digest import CHUNK_BYTES
from toolkit.errors import InputError, Problem
from toolkit.paths import UnsafePath, inside

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, Features, IterableDataset

# Suffixes of single files and patterns -> the reader of `datasets`.
READERS = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".txt": "text",
}
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
# Up to this total size the files of a split are hashed whole, which takes a second; of larger files, samples
# are hashed.
HASHED_BYTES = 1 << 30
SAMPLES, SAMPLE_BYTES = 64, 1 << 16


@dataclass(frozen=True, slots=True)
class ArrowSplit:
    """Arrow files in stream format, in the order of their rows."""

    files: tuple[str, ...]
    features: Features


class DatasetSource(Protocol):
    """A dataset with named splits.

    Attributes:
        revision: the commit of a dataset on the hub; None for a local dataset.
    """

    splits: tuple[str, ...]
    revision: str | None

    def digests(self, split: str) -> dict[str, str]:
        """Return what determines the split's bytes: a hash per file, or the commit of a hub dataset."""

    def arrow(self, split: str) -> ArrowSplit:
        """Fetch the split and convert it to arrow files, unless that was done before."""

    def stream(self, split: str) -> IterableDataset: ...


def open_source(data: DatasetConfig) -> DatasetSource:
    """Open the configured dataset.

    Raises InputError if there is no such dataset, configuration or revision.
    """
    path = data.path
    if path is None:
        raise InputError(
            _path_problem(
                data,
                "data=dataset reads a dataset",
                "write data.dataset.path=FOLDER, FILE or NAME/ON-THE-HUB",
            )
        )
    if data.revision is not None and _is_local(path):
        raise InputError(
            Problem(
                "data.dataset.revision",
                f"data.dataset.revision={data.revision}, data.dataset.path={path}",
                "a dataset on this machine has no revision",
                "leave out data.dataset.revision",
            )
        )
    saved = Path(path)
    if (saved / "dataset_dict.json").is_file() or (saved / "state.json").is_file():
        return _SavedDataset(saved, data)
    from datasets import load_dataset_builder

    arguments: dict[str, Any] = {"path": path}
    if _is_pattern(path) or Path(path).is_file():
        arguments = {"path": _reader(data, path), "data_files": {"train": path}}
    elif not Path(path).is_dir():
        if _is_local(path):
            raise InputError(
                _path_problem(
                    data,
                    "the dataset's folder or file is there",
                    f"correct the path; {Path(path).absolute()} is absent",
                )
            )
        hub.is_online()
    with _dataset_errors(data):
        builder = load_dataset_builder(**arguments, name=data.name, revision=data.revision)
    if not all((builder.config.data_files or {"": [path]}).values()):
        raise InputError(
            _path_problem(data, "the dataset's files are there", "correct the pattern; no file matches it")
        )
    return _BuiltDataset(builder, data, local=_is_local(path))


def check_split_exists(source: DatasetSource, data: DatasetConfig, split: str, key: str) -> None:
    """Raise InputError if the split is absent."""
    if split not in source.splits:
        available = ", ".join(source.splits)
        remedy = (
            f"available: {available}"
            if "[" not in split and "+" not in split
            else f"name a whole split; available: {available}"
        )
        raise InputError(
            Problem(key, f"{key}={split} is absent from {data.path}", "the dataset has the split", remedy)
        )


def check_columns(data: DatasetConfig, features: Features) -> None:
    """Raise InputError if a column of ``data.dataset.text`` is absent or is not text."""
    import pyarrow as pa

    types = {field.name: field.type for field in features.arrow_schema}
    texts = [
        name for name, kind in types.items() if pa.types.is_string(kind) or pa.types.is_large_string(kind)
    ]
    invalid = [
        f"{name} ({types[name]})" if name in types else f"{name} (absent)"
        for name in data.text
        if name not in texts
    ]
    if invalid or not data.text:
        choice = (
            f"write data.dataset.text=[{texts[0]}]; columns of text: {', '.join(texts)}"
            if texts
            else "choose a dataset that has text"
        )
        raise InputError(
            Problem(
                "data.dataset.text",
                f"data.dataset.text=[{','.join(data.text)}]: {', '.join(invalid) or 'no column'}",
                f"each is a column of {data.path} with text",
                choice,
            )
        )


class _BuiltDataset(DatasetSource):
    """Files on this machine or on the hub, opened with the readers of `datasets`."""

    def __init__(self, builder: DatasetBuilder, data: DatasetConfig, *, local: bool) -> None:
        self._builder, self._data, self._local = builder, data, local
        self._files = {str(name): list(files) for name, files in (builder.config.data_files or {}).items()}
        self.splits = tuple(self._files or (builder.info.splits or {}))
        # For a hub dataset, the `hash` of `datasets` is its commit, and the name of its folder in the cache.
        self.revision = None if local else str(builder.hash)

    def digests(self, split: str) -> dict[str, str]:
        if self._local:
            return hash_files([Path(file) for file in self._files[split]])
        return {f"{self._data.path} {self._builder.config.name}": str(self.revision)}

    def arrow(self, split: str) -> ArrowSplit:
        with _dataset_errors(self._data):
            self._builder.download_and_prepare()
            return _arrow_split(self._builder.as_dataset(split=split), self._data, split)

    def stream(self, split: str) -> IterableDataset:
        with _dataset_errors(self._data):
            return self._builder.as_streaming_dataset(split=split)


class _SavedDataset(DatasetSource):
    """A folder written by ``save_to_disk``: its arrow files are read in place."""

    revision = None

    def __init__(self, folder: Path, data: DatasetConfig) -> None:
        self._data = data
        listing = folder / "dataset_dict.json"
        names = json.loads(listing.read_text())["splits"] if listing.is_file() else None
        self._folders = (
            {name: self._inside(folder, name) for name in names} if names is not None else {"train": folder}
        )
        self.splits = tuple(self._folders)

    def digests(self, split: str) -> dict[str, str]:
        return hash_files(self._arrow_files(split))

    def arrow(self, split: str) -> ArrowSplit:
        from datasets import load_from_disk

        if not self._arrow_files(split):
            raise _no_rows(self._data, split)
        with _dataset_errors(self._data):
            return _arrow_split(load_from_disk(str(self._folders[split])), self._data, split)

    def stream(self, split: str) -> IterableDataset:
        raise InputError(
            Problem(
                "data.dataset.streaming",
                "data.dataset.streaming=true with a folder written by save_to_disk",
                "a stream is fetched while it is read; this folder is local and already in arrow format",
                "leave out data.dataset.streaming",
            )
        )

    def _arrow_files(self, split: str) -> list[Path]:
        folder = self._folders[split]
        names = [file["filename"] for file in json.loads((folder / "state.json").read_text())["_data_files"]]
        return [self._inside(folder, name) for name in names]

    def _inside(self, folder: Path, name: str) -> Path:
        try:
            return inside(folder, name)
        except UnsafePath as error:
            raise InputError(
                _path_problem(
                    self._data,
                    "the files of a dataset lie in its folder",
                    f"save it again with save_to_disk; {error}",
                )
            ) from error


def _arrow_split(dataset: Dataset, data: DatasetConfig, split: str) -> ArrowSplit:
    files = tuple(file["filename"] for file in dataset.cache_files)
    if not files or not dataset.num_rows:
        raise _no_rows(data, split)
    return ArrowSplit(files, dataset.features)


def _no_rows(data: DatasetConfig, split: str) -> InputError:
    return InputError(
        Problem(
            "data.dataset.split",
            f"split {split} of {data.path} has 0 rows",
            "a split has rows",
            "name another split or another dataset",
        )
    )


def hash_files(files: Sequence[Path]) -> dict[str, str]:
    """Hash files, by their path below their common folder: a moved or copied dataset has the same hashes.

    Of large files, size and evenly spread samples are hashed: another change that keeps the size is not
    detected.
    """
    if not files:
        return {}
    common_folder = os.path.commonpath([file.absolute().parent for file in files])
    whole = sum(file.stat().st_size for file in files) <= HASHED_BYTES
    return {file.absolute().relative_to(common_folder).as_posix(): _hash(file, whole) for file in files}


def _hash(file: Path, whole: bool) -> str:
    size = file.stat().st_size
    hasher = xxhash.xxh3_128(str(size).encode())
    with file.open("rb") as content:
        if whole or size <= SAMPLES * SAMPLE_BYTES:
            while chunk := content.read(CHUNK_BYTES):
                hasher.update(chunk)
        else:
            for number in range(SAMPLES):
                content.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                hasher.update(content.read(SAMPLE_BYTES))
    return hasher.hexdigest()


def _is_pattern(path: str) -> bool:
    return any(character in path for character in "*?[")


def _is_local(path: str) -> bool:
    """Return whether ``path`` exists locally or can only be a local file name."""
    readers = _suffix(path) in READERS
    return (
        Path(path).exists()
        or _is_pattern(path)
        or readers
        or path.startswith((".", "/", "~"))
        or path.count("/") > 1
    )


def _suffix(path: str) -> str:
    for ending in COMPRESSED:
        path = path.removesuffix(ending)
    return Path(path).suffix


def _reader(data: DatasetConfig, path: str) -> str:
    reader = READERS.get(_suffix(path))
    if reader is None:
        readers = ", ".join(READERS)
        raise InputError(
            _path_problem(
                data,
                f"a dataset file ends with one of {readers} (and {', '.join(COMPRESSED)})",
                "rename it, or name its folder",
            )
        )
    return reader


@contextmanager
def _dataset_errors(data: DatasetConfig) -> Iterator[None]:
    """Convert exceptions of `datasets` about the user's settings or files to InputError."""
    import datasets
    from datasets.exceptions import DatasetsError

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # in a log file each update would be a line
    try:
        yield
    except InputError:
        raise
    except (DatasetsError, OSError, ValueError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        message = " ".join(f"{error}{cause}".split())[:400]
        absent = "" if data.path is not None and _is_local(data.path) else hub.offline_hint()
        seen = f"data.dataset.path={data.path}" + (f" data.dataset.name={data.name}" if data.name else "")
        seen += f" data.dataset.revision={data.revision}" if data.revision else ""
        raise InputError(
            Problem(
                "data.dataset.path",
                f"{seen}: {message}{absent}",
                "the dataset can be opened by the package datasets",
                "correct the path, data.dataset.name or data.dataset.revision, or fetch the dataset first",
            )
        ) from error


def _path_problem(data: DatasetConfig, rule: str, remedy: str) -> Problem:
    return Problem("data.dataset.path", f"data.dataset.path={data.path}", rule, remedy)
