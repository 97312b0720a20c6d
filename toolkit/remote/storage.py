"""Folders from which files are read: local, or in a store by URL (s3, gs, az, http, https).

    folder = open_folder("s3://bucket/corpus")
    folder.read_bytes("manifest.json")
    folder.read_range("train-00000.bin", 4096, 8192)

The package obstore accesses stores, with credentials from the environment or the instance. To support
another kind of store, add its scheme to ``SCHEMES`` in ``toolkit/config/urls.py`` and open it in ``_store``.

Error texts of this module never quote a library or a server, since these may name keys, signatures and
tokens. They contain a status, a kind of failure and a location.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from toolkit.config.urls import credentials_remedy, is_url, url_problem
from toolkit.errors import InputError
from toolkit.paths import Location, UnsafePath, Url, inside
from toolkit.remote.errors import DATA, Subject, translate_error
from toolkit.remote.fetch import (
    ForkedProcess,
    RequestLimits,
    RequestPacing,
    RetriesExhausted,
    TransientError,
    fetch_all,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
Buffer = bytes | memoryview
# These variables may name a store on another machine with http, as for the AWS tools.
_STORE_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_")
_ENDPOINTS = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
)


class StorageError(OSError):
    """A store did not answer while training read from it.

    Starting again may help, so it is not a user error.
    """


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file below a folder of a store. ``modified`` is in nanoseconds since 1970, from the store."""

    name: str
    bytes: int
    modified: int


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``start .. end`` of the file ``name``."""

    name: str
    start: int
    end: int


class DataFolder(Protocol):
    """A folder of files. Reading is safe in several threads.

    Every method raises InputError if a file is absent, may not be read, has changed since its first use, or
    is shorter than a requested range; and StorageError if a store does not answer.
    """

    location: Location

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the size of each file in bytes."""

    def size(self, name: str) -> int:
        return self.sizes([name])[0]

    def read_files(self, names: Sequence[str]) -> list[bytes]:
        """Read each file whole."""

    def read_bytes(self, name: str) -> bytes:
        return self.read_files([name])[0]

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[Buffer]:
        """Read each range, none of them empty; from a store all at once, each as one request."""

    def read_range(self, name: str, start: int, end: int) -> Buffer:
        return self.read_ranges([ByteRange(name, start, end)])[0]


def parse_location(path: str | Path, key: str = DATA.key) -> Location:
    """Parse ``path``; ``file:///folder`` is the folder itself. Raises InputError if a URL is not allowed."""
    if not is_url(path) or isinstance(path, Path):
        return Path(path)
    problem = url_problem(key, path)
    if problem is not None:
        raise InputError(problem)
    return Path(unquote(urlsplit(path).path)) if path.startswith("file://") else Url(path.rstrip("/"))


def open_folder(path: str | Path, limits: RequestLimits | None = None, subject: Subject = DATA) -> DataFolder:
    """Create a folder without accessing it. Raises InputError like ``parse_location``.

    Args:
        path: The folder.
        limits: Bounds of requests; None: the defaults.
        subject: What the folder holds, for errors.
    """
    location = parse_location(path, subject.key)
    return (
        LocalFolder(location, subject)
        if isinstance(location, Path)
        else open_store(location, limits, subject)
    )


def open_store(url: Url, limits: RequestLimits | None = None, subject: Subject = DATA) -> StoreFolder:
    """Create the folder of a store without accessing it. Raises InputError if the store is not known."""
    limits = limits or RequestLimits()
    return StoreFolder(make_store(url, limits, subject), url, limits, subject=subject)


class LocalFolder(DataFolder):
    location: Path

    def __init__(self, location: Path, subject: Subject = DATA) -> None:
        self.location, self._subject = location, subject

    def sizes(self, names: Sequence[str]) -> list[int]:
        return [self._access(name, lambda file: file.stat().st_size) for name in names]

    def read_files(self, names: Sequence[str]) -> list[bytes]:
        return [self._access(name, Path.read_bytes) for name in names]

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[Buffer]:
        return [self._access(range.name, partial(_pread, range=range)) for range in ranges]

    def _access(self, name: str, read: Any) -> Any:
        try:
            return read(inside(self.location, name))
        except UnsafePath as error:
            seen, remedy = f"{self.location}: {error}", "put the file itself there, or prepare the data again"
            raise self._subject.error(
                seen, f"the files of a {self._subject.folder} lie in it", remedy
            ) from error
        except OSError as error:
            seen, remedy = (
                f"{self.location / name}: {error.strerror or error}",
                "restore it, or prepare the data again",
            )
            raise self._subject.error(seen, "the file is there and can be read", remedy) from error


def _pread(file: Path, range: ByteRange) -> bytes:
    with file.open("rb") as opened:
        content = os.pread(opened.fileno(), range.end - range.start, range.start)
    if len(content) < range.end - range.start:
        raise OSError(f"ends before byte {range.end}")
    return content


class StoreFolder(DataFolder):
    """A prefix of a store.

    Every answer must have the size and entity tag of the first answer about that file.
    """

    location: Url

    def __init__(
        self,
        store: ObjectStore,
        location: Url,
        limits: RequestLimits,
        sizes: Mapping[str, int] | None = None,
        subject: Subject = DATA,
    ) -> None:
        """Args: store: a store whose root is the folder. sizes: the expected size of each file. With it the
        folder waits for a store as long as training does. subject: what the folder holds, for errors.
        """
        self.location, self.subject = location, subject
        self.limits = limits
        self.pacing = RequestPacing(limits)
        self._store = store
        self._identities: dict[str, tuple[int, str | None]] = {
            name: (size, None) for name, size in (sizes or {}).items()
        }
        self._reading = sizes is not None

    def for_reading(self, sizes: Mapping[str, int]) -> StoreFolder:
        return StoreFolder(self._store, self.location, self.limits, sizes, self.subject)

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return sizes; files that were read before need no request, since every answer has the size."""
        unknown = [name for name in dict.fromkeys(names) if name not in self._identities]
        self._fetch([partial(self._head, name) for name in unknown])
        return [self._identities[name][0] for name in names]

    def read_files(self, names: Sequence[str]) -> list[bytes]:
        """Read whole files: the first answer for each gives its size."""
        firsts = self._fetch(
            [partial(self._get, name, 0, self.limits.part_bytes, whole=False) for name in names]
        )
        remaining = [
            ByteRange(name, len(first), self._identities[name][0])
            for name, first in zip(names, firsts, strict=True)
            if len(first) < self._identities[name][0]
        ]
        rest = dict(zip((item.name for item in remaining), self.read_ranges(remaining), strict=True))
        return [b"".join([first, rest.get(name, b"")]) for name, first in zip(names, firsts, strict=True)]

    def read_ranges(self, ranges: Sequence[ByteRange]) -> list[Buffer]:
        """Read ranges; one longer than ``part_bytes`` is split into several requests."""
        part = self.limits.part_bytes
        starts_by_range = [range(item.start, item.end, part) for item in ranges]
        calls = [
            partial(self._get, item.name, start, min(start + part, item.end))
            for item, starts in zip(ranges, starts_by_range, strict=True)
            for start in starts
        ]
        contents = iter(self._fetch(calls))
        return [
            next(contents) if len(starts) == 1 else b"".join(next(contents) for _ in starts)
            for starts in starts_by_range
        ]

    def listing(self) -> list[StoredFile]:
        """List every file below the folder by name; empty if there is no such folder.

        HTTP stores cannot list.
        """
        (files,) = self._fetch([self._list])
        return files

    def _fetch(self, calls: Sequence[Any]) -> list[Any]:
        seconds = self.limits.reading_seconds if self._reading else self.limits.opening_seconds
        try:
            return fetch_all(calls, self.pacing, self.limits, seconds)
        except RetriesExhausted as error:
            seen = f"{self.location}: {error}"
        except ForkedProcess:
            rule = (
                "a store is read by the process that opened it, or by a process that was started without fork"
            )
            remedy = "leave out workers (num_workers=0): a stream reads ahead with threads"
            raise self.subject.error(f"{self.location} in a forked process", rule, remedy) from None
        if self._reading:
            raise StorageError(seen)
        remedy = f"check the address and the network; {credentials_remedy(self.location)}"
        raise self.subject.error(seen, "the store answers", remedy)

    def _head(self, name: str) -> int:
        import obstore

        return self._check_identity(name, self._call(name, lambda: obstore.head(self._store, name)))

    def _list(self) -> list[StoredFile]:
        import obstore

        def request() -> list[StoredFile]:
            entries = (meta for page in obstore.list(self._store) for meta in page)
            return [
                StoredFile(meta["path"], meta["size"], _nanoseconds(meta["last_modified"]))
                for meta in entries
            ]

        return sorted(self._call("", request), key=lambda file: file.name)

    def _get(self, name: str, start: int, end: int, *, whole: bool = True) -> Buffer:
        """Make one attempt. ``whole``: the range must be inside the file."""
        import obstore

        def request() -> tuple[Any, tuple[int, int], memoryview]:
            result = obstore.get(self._store, name, options={"range": (start, end)})
            return result.meta, result.range, memoryview(result.bytes())

        meta, seen, content = self._call(name, request)
        size = self._check_identity(name, meta)
        if whole and end > size:
            raise self.subject.error(
                f"{self.location / name}: {size} bytes",
                f"it has the bytes {start} to {end}",
                "restore the file",
            )
        if seen != (start, min(end, size)) or len(content) != seen[1] - seen[0]:
            raise TransientError(
                f"bytes {seen[0]} to {seen[0] + len(content)} came instead of {start} to {end}"
            )
        return content

    def _call(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - translate_error distinguishes them
            translated = translate_error(error, self.location / name, self.subject)
        raise translated  # outside the handler, so that it does not carry the library's error

    def _check_identity(self, name: str, meta: Any) -> int:
        size, tag = meta["size"], meta["e_tag"]
        first_size, first_tag = self._identities.setdefault(name, (size, tag))
        if first_tag is None:
            self._identities[name] = (first_size, tag)
        elif tag is not None and tag != first_tag:
            raise self.subject.error(
                f"{self.location / name} changed while it was read: tag {first_tag}, now {tag}",
                self.subject.unchanged_rule,
                self.subject.restore_remedy,
            )
        if size != first_size:
            raise self.subject.error(
                f"{self.location / name}: {size} bytes instead of {first_size}",
                self.subject.unchanged_rule,
                self.subject.restore_remedy,
            )
        return size


def _nanoseconds(time: datetime) -> int:
    return int(time.replace(microsecond=0).timestamp()) * 10**9 + time.microsecond * 1000


def make_store(url: Url, limits: RequestLimits, subject: Subject) -> ObjectStore:
    """Return the store whose root is ``url``, without accessing it.

    Raises:
        InputError: The environment's settings do not fit the store.
    """
    environment = frozenset(item for item in os.environ.items() if item[0].startswith(_STORE_VARIABLES))
    try:
        return _store(url, limits, environment)
    except Exception as error:  # noqa: BLE001 - translate_error distinguishes them
        translated = translate_error(error, url, subject)
    if isinstance(translated, InputError):
        raise translated
    raise subject.error(
        f"{url}: {translated}",
        "the store can be opened with the environment's settings",
        credentials_remedy(url),
    )


@lru_cache(maxsize=32)
def _store(url: Url, limits: RequestLimits, environment: frozenset[tuple[str, str]]) -> ObjectStore:
    """Create one store per URL so that connections stay open; ``environment`` is part of the cache key."""
    from obstore.store import from_url

    allow_http = url.startswith("http://") or any(
        name in _ENDPOINTS and value.startswith("http://") for name, value in environment
    )
    seconds = {
        "connect_timeout": limits.connect_seconds,
        "read_timeout": limits.silence_seconds,
        "timeout": limits.request_seconds,
    }
    options: Any = {name: timedelta(seconds=value) for name, value in seconds.items()} | {
        "allow_http": allow_http
    }
    retries: Any = {
        "max_retries": limits.store_retries,
        "backoff": {
            "init_backoff": timedelta(seconds=limits.first_backoff_seconds),
            "max_backoff": timedelta(seconds=limits.max_backoff_seconds),
        },
    }
    return from_url(url, client_options=options, retry_config=retries)
