"""From ``data.dataset.*`` to a dataset that is there: what splits it has, what decides its bytes, where its arrow files lie.

``data.dataset.path`` is looked for on this machine first and on the hub only where it cannot be a file's name.
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

# Endings of single files and patterns -> the reader of `datasets`.
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
# Files of a split are hashed whole up to this size together, which takes a second; of larger ones places spread over each file are.
HASHED_BYTES = 1 << 30
PLACES, PLACE_BYTES = 64, 1 << 16


@dataclass(frozen=True, slots=True)
class ArrowSplit:
    """``files`` in the order of their rows, each in arrow's stream format."""

    files: tuple[str, ...]
    features: Features


class Source(Protocol):
    """
    Attributes:
        revision: the commit of a dataset on the hub.
    """

    splits: tuple[str, ...]
    revision: str | None

    def digests(self, split: str) -> dict[str, str]:
        """What decides the split's bytes: a hash for each file, by its name; or of a dataset on the hub, its commit."""

    def arrow(self, split: str) -> ArrowSplit:
        """Fetched, and made into arrow files, where that was not done before."""

    def stream(self, split: str) -> IterableDataset: ...


def find(data: DatasetConfig) -> Source:
    """Raises InputError where there is no such dataset, configuration or revision."""
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
        return _Saved(saved, data)
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
                    f"correct it; {Path(path).absolute()} is absent",
                )
            )
        hub.online()
    with _named(data):
        builder = load_dataset_builder(**arguments, name=data.name, revision=data.revision)
    if not all((builder.config.data_files or {"": [path]}).values()):
        raise InputError(
            _path_problem(data, "the dataset's files are there", "correct the pattern; no file matches it")
        )
    return _Built(builder, data, local=_is_local(path))


def check(source: Source, data: DatasetConfig, split: str, key: str) -> None:
    """Raises InputError where the split is absent."""
    if split not in source.splits:
        there = ", ".join(source.splits)
        remedy = (
            f"there are: {there}"
            if "[" not in split and "+" not in split
            else f"name a whole split; there are: {there}"
        )
        raise InputError(
            Problem(key, f"{key}={split}, which {data.path} has not", "the dataset has the split", remedy)
        )


def check_columns(data: DatasetConfig, features: Features) -> None:
    """Raises InputError where a column of ``data.dataset.text`` is absent or is not text."""
    import pyarrow as pa

    kinds = {field.name: field.type for field in features.arrow_schema}
    texts = [
        name for name, kind in kinds.items() if pa.types.is_string(kind) or pa.types.is_large_string(kind)
    ]
    wrong = [
        f"{name} ({kinds[name]})" if name in kinds else f"{name} (absent)"
        for name in data.text
        if name not in texts
    ]
    if wrong or not data.text:
        choice = (
            f"write data.dataset.text=[{texts[0]}]; of text are: {', '.join(texts)}"
            if texts
            else "choose a dataset that has text"
        )
        raise InputError(
            Problem(
                "data.dataset.text",
                f"data.dataset.text=[{','.join(data.text)}]: {', '.join(wrong) or 'no column'}",
                f"each is a column of {data.path} that holds text",
                choice,
            )
        )


class _Built(Source):
    """Files on this machine or on the hub, by the readers of `datasets`."""

    def __init__(self, builder: DatasetBuilder, data: DatasetConfig, *, local: bool) -> None:
        self._builder, self._data, self._local = builder, data, local
        self._files = {str(name): list(files) for name, files in (builder.config.data_files or {}).items()}
        self.splits = tuple(self._files or (builder.info.splits or {}))
        # What `datasets` calls the hash of a dataset of the hub is its commit; so is the name of the folder that it was fetched to.
        self.revision = None if local else str(builder.hash)

    def digests(self, split: str) -> dict[str, str]:
        if self._local:
            return file_digests([Path(file) for file in self._files[split]])
        return {f"{self._data.path} {self._builder.config.name}": str(self.revision)}

    def arrow(self, split: str) -> ArrowSplit:
        with _named(self._data):
            self._builder.download_and_prepare()
            return _arrow_split(self._builder.as_dataset(split=split), self._data, split)

    def stream(self, split: str) -> IterableDataset:
        with _named(self._data):
            return self._builder.as_streaming_dataset(split=split)


class _Saved(Source):
    """A folder by ``save_to_disk``: its arrow files are read where they lie."""

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
        return file_digests(self._arrow_files(split))

    def arrow(self, split: str) -> ArrowSplit:
        from datasets import load_from_disk

        if not self._arrow_files(split):
            raise _no_rows(self._data, split)
        with _named(self._data):
            return _arrow_split(load_from_disk(str(self._folders[split])), self._data, split)

    def stream(self, split: str) -> IterableDataset:
        raise InputError(
            Problem(
                "data.dataset.streaming",
                "data.dataset.streaming=true of a folder by save_to_disk",
                "what streams is fetched piece by piece; this folder is here in the form that training reads",
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
            "a split that is read has rows",
            "name another split or another dataset",
        )
    )


def file_digests(files: Sequence[Path]) -> dict[str, str]:
    """By the path below the folder that all share: a moved or copied dataset is the same.

    Of large files a hash of their size and of places spread over them: a change elsewhere that keeps the size is not seen.
    """
    if not files:
        return {}
    shared = os.path.commonpath([file.absolute().parent for file in files])
    whole = sum(file.stat().st_size for file in files) <= HASHED_BYTES
    return {file.absolute().relative_to(shared).as_posix(): _hash(file, whole) for file in files}


def _hash(file: Path, whole: bool) -> str:
    size = file.stat().st_size
    hasher = xxhash.xxh3_128(str(size).encode())
    with file.open("rb") as content:
        if whole or size <= PLACES * PLACE_BYTES:
            while chunk := content.read(CHUNK_BYTES):
                hasher.update(chunk)
        else:
            for place in range(PLACES):
                content.seek((size - PLACE_BYTES) * place // (PLACES - 1))
                hasher.update(content.read(PLACE_BYTES))
    return hasher.hexdigest()


def _is_pattern(path: str) -> bool:
    return any(character in path for character in "*?[")


def _is_local(path: str) -> bool:
    """Of this machine: it is there, or it is written as only a file can be."""
    known = _suffix(path) in READERS
    return (
        Path(path).exists()
        or _is_pattern(path)
        or known
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
        known = ", ".join(READERS)
        raise InputError(
            _path_problem(
                data,
                f"a file that is a dataset ends with one of {known} (and {', '.join(COMPRESSED)})",
                "rename it, or name the folder that it lies in",
            )
        )
    return reader


@contextmanager
def _named(data: DatasetConfig) -> Iterator[None]:
    """What `datasets` finds wrong with the user's words or files, as an InputError."""
    import datasets
    from datasets.exceptions import DatasetsError

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()  # in a log file each of their updates is a line
    try:
        yield
    except InputError:
        raise
    except (DatasetsError, OSError, ValueError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        words = " ".join(f"{error}{cause}".split())[:400]
        absent = "" if data.path is not None and _is_local(data.path) else hub.why_absent()
        seen = f"data.dataset.path={data.path}" + (f" data.dataset.name={data.name}" if data.name else "")
        seen += f" data.dataset.revision={data.revision}" if data.revision else ""
        raise InputError(
            Problem(
                "data.dataset.path",
                f"{seen}: {words}{absent}",
                "the dataset can be opened by the package datasets",
                "correct the path, data.dataset.name or data.dataset.revision, or fetch the dataset first",
            )
        ) from error


def _path_problem(data: DatasetConfig, rule: str, remedy: str) -> Problem:
    return Problem("data.dataset.path", f"data.dataset.path={data.path}", rule, remedy)
