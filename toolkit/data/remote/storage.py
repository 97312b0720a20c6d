"""Folders from which data are read: local, or in a store by URL (``s3://``, ``gs://``, ``az://``, ``http(s)://``).

    folder = open_folder("s3://bucket/corpus")
    folder.read_bytes("manifest.json")
    folder.read_range("train-00000.bin", 4096, 8192)

The package obstore accesses stores, with credentials from the environment or the instance. Error texts of this module
never quote a library or a server, since these may name keys, signatures and tokens. They contain a status, a kind of
failure and a location.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from toolkit.config.urls import credentials_remedy, is_url, url_problem
from toolkit.data.remote.fetch import Forked, Limits, Pace, TooSlow, Transient, Unanswered, fetch_all
from toolkit.errors import InputError, Problem
from toolkit.paths import UnsafePath, inside

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
STAYS = "the files of a data folder do not change"
RESTORE = "restore the file, or put new data into another folder"
_INSTANCE = ("169.254.169.254", "metadata.google.internal", "MissingAccount", "MissingCredentials")


class Url(str):
    """A folder or file in a store. ``/`` joins, as for a ``Path``."""

    __slots__ = ()

    def __truediv__(self, name: str) -> Url:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        return Url("/".join([self.rstrip("/"), *parts]))


Place = Path | Url


class StorageError(OSError):
    """A store did not answer while training read from it. Starting again may help, so it is not a user error."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A file below a folder of a store. ``modified`` is in nanoseconds since 1970, from the store."""

    name: str
    bytes: int
    modified: int


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes ``start .. end`` of the file ``name``."""

    name: str
    start: int
    end: int


class Folder(Protocol):
    """A folder of files. Reading is safe in several threads.

    Every method raises InputError if a file is absent, may not be read, has changed since its first use, or is shorter
    than a requested range; and StorageError if a store does not answer.
    """

    place: Place

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the size of each file in bytes."""

    def size(self, name: str) -> int:
        return self.sizes([name])[0]

    def read_files(self, names: Sequence[str]) -> list[bytes]:
        """Read each file whole."""

    def read_bytes(self, name: str) -> bytes:
        return self.read_files([name])[0]

    def read_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Read each range, none of them empty; from a store all at once, each as one request."""

    def read_range(self, name: str, start: int, end: int) -> Buffer:
        return self.read_ranges([Range(name, start, end)])[0]


def place_of(path: str | Path, key: str = "data.path") -> Place:
    """Parse ``path``; ``file:///folder`` is the folder itself. Raises InputError if a URL is not allowed."""
    if not is_url(path) or isinstance(path, Path):
        return Path(path)
    problem = url_problem(key, path)
    if problem is not None:
        raise InputError(problem)
    return Path(unquote(urlsplit(path).path)) if path.startswith("file://") else Url(path.rstrip("/"))


def open_folder(path: str | Path, limits: Limits | None = None) -> Folder:
    """Create a folder without accessing it. Raises InputError like ``parse_location``."""
    place, limits = place_of(path), limits or Limits()
    if isinstance(place, Path):
        return LocalFolder(place)
    environment = frozenset(item for item in os.environ.items() if item[0].startswith(_STORE_VARIABLES))
    return StoreFolder(_store(place, limits, environment), place, limits)


class LocalFolder(Folder):
    place: Path

    def __init__(self, place: Path) -> None:
        self.place = place

    def sizes(self, names: Sequence[str]) -> list[int]:
        return [self._access(name, lambda file: file.stat().st_size) for name in names]

    def read_files(self, names: Sequence[str]) -> list[bytes]:
        return [self._access(name, Path.read_bytes) for name in names]

    def read_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        return [self._access(range.name, partial(_pread, range=range)) for range in ranges]

    def _access(self, name: str, read: Any) -> Any:
        try:
            return read(inside(self.place, name))
        except UnsafePath as error:
            seen, remedy = f"{self.place}: {error}", "put the file itself there, or prepare the data again"
            raise InputError(
                Problem("data.path", seen, "the files of a data folder lie in it", remedy)
            ) from error
        except OSError as error:
            seen, remedy = (
                f"{self.place / name}: {error.strerror or error}",
                "restore it, or prepare the data again",
            )
            raise InputError(
                Problem("data.path", seen, "the file is there and can be read", remedy)
            ) from error


def _pread(file: Path, range: Range) -> bytes:
    with file.open("rb") as opened:
        content = os.pread(opened.fileno(), range.end - range.start, range.start)
    if len(content) < range.end - range.start:
        raise OSError(f"ends before byte {range.end}")
    return content


class StoreFolder(Folder):
    """A prefix of a store. Every answer must have the size and entity tag of the first answer about that file."""

    place: Url

    def __init__(
        self, store: ObjectStore, place: Url, limits: Limits, sizes: Mapping[str, int] | None = None
    ) -> None:
        """
        Args:
            store: a store whose root is the folder.
            sizes: the expected size of each file. With it the folder waits for a store as long as training does.
        """
        self.place = place
        self.limits = limits
        self.pace = Pace(limits)
        self._store = store
        self._seen: dict[str, tuple[int, str | None]] = {
            name: (size, None) for name, size in (sizes or {}).items()
        }
        self._reading = sizes is not None

    def for_reading(self, sizes: Mapping[str, int]) -> StoreFolder:
        return StoreFolder(self._store, self.place, self.limits, sizes)

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return sizes; files that were read before need no request, since every answer has the size."""
        unknown = [name for name in dict.fromkeys(names) if name not in self._seen]
        self._fetch([partial(self._head, name) for name in unknown])
        return [self._seen[name][0] for name in names]

    def read_files(self, names: Sequence[str]) -> list[bytes]:
        """Read whole files: the first answer for each gives its size."""
        firsts = self._fetch(
            [partial(self._get, name, 0, self.limits.part_bytes, whole=False) for name in names]
        )
        remaining = [
            Range(name, len(first), self._seen[name][0])
            for name, first in zip(names, firsts, strict=True)
            if len(first) < self._seen[name][0]
        ]
        rest = dict(zip((item.name for item in remaining), self.read_ranges(remaining), strict=True))
        return [b"".join([first, rest.get(name, b"")]) for name, first in zip(names, firsts, strict=True)]

    def read_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
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

    def listing(self) -> list[Listed]:
        """List every file below the folder by name; empty if there is no such folder. HTTP stores cannot list."""
        (match,) = self._fetch([self._list])
        return match

    def _fetch(self, calls: Sequence[Any]) -> list[Any]:
        seconds = self.limits.reading_seconds if self._reading else self.limits.opening_seconds
        try:
            return fetch_all(calls, self.pace, self.limits, seconds)
        except Unanswered as error:
            seen = f"{self.place}: {error}"
        except Forked:
            rule = "a store is read by the process that opened it, or by a process that was started without fork"
            remedy = "leave out workers (num_workers=0): a stream reads ahead with threads"
            raise InputError(
                Problem("data.path", f"{self.place} in a forked process", rule, remedy)
            ) from None
        if self._reading:
            raise StorageError(seen)
        remedy = f"check the address and the network; {credentials_remedy(self.place)}"
        raise InputError(Problem("data.path", seen, "the store answers", remedy))

    def _head(self, name: str) -> int:
        import obstore

        return self._check_identity(name, self._call(name, lambda: obstore.head(self._store, name)))

    def _list(self) -> list[Listed]:
        import obstore

        def ask() -> list[Listed]:
            match = (meta for page in obstore.list(self._store) for meta in page)
            return [Listed(meta["path"], meta["size"], _nanoseconds(meta["last_modified"])) for meta in match]

        return sorted(self._call("", ask), key=lambda file: file.name)

    def _get(self, name: str, start: int, end: int, *, whole: bool = True) -> Buffer:
        """Make one attempt. ``whole``: the range must be inside the file."""
        import obstore

        def ask() -> tuple[Any, tuple[int, int], memoryview]:
            result = obstore.get(self._store, name, options={"range": (start, end)})
            return result.meta, result.range, memoryview(result.bytes())

        meta, seen, content = self._call(name, ask)
        size = self._check_identity(name, meta)
        if whole and end > size:
            raise _problem(
                f"{self.place / name}: {size} bytes", f"it has the bytes {start} to {end}", "restore the file"
            )
        if seen != (start, min(end, size)) or len(content) != seen[1] - seen[0]:
            raise Transient(
                f"bytes {seen[0]} to {seen[0] + len(content)} came instead of {start} to {end}"
            )
        return content

    def _call(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - _translate distinguishes them
            translated = _translate(error, self.place / name)
        raise translated  # outside the handler, so that it does not carry the library's error

    def _check_identity(self, name: str, meta: Any) -> int:
        size, tag = meta["size"], meta["e_tag"]
        first_size, first_tag = self._seen.setdefault(name, (size, tag))
        if first_tag is None:
            self._seen[name] = (first_size, tag)
        elif tag is not None and tag != first_tag:
            raise _problem(
                f"{self.place / name} changed while it was read: tag {first_tag}, now {tag}", STAYS, RESTORE
            )
        if size != first_size:
            raise _problem(
                f"{self.place / name}: {size} bytes instead of {first_size}",
                STAYS,
                RESTORE,
            )
        return size


def _nanoseconds(time: datetime) -> int:
    return int(time.replace(microsecond=0).timestamp()) * 10**9 + time.microsecond * 1000


@lru_cache(maxsize=32)
def _store(url: Url, limits: Limits, environment: frozenset[tuple[str, str]]) -> ObjectStore:
    """Create one store per URL so that its connections stay open, or another if the ``told`` variables change.

    Retries are done in fetch.py, which measures how long requests take and may start a second attempt early.
    """
    from obstore.store import from_url

    allow_http = url.startswith("http://") or any(
        name in _ENDPOINTS and value.startswith("http://") for name, value in environment
    )
    seconds = {
        "connect_timeout": limits.connect_seconds,
        "read_timeout": limits.silence_seconds,
        "timeout": limits.request_seconds,
    }
    options: Any = {name: timedelta(seconds=value) for name, value in seconds.items()} | {"allow_http": allow_http}
    try:
        return from_url(url, client_options=options, retry_config={"max_retries": 0})
    except Exception as error:  # noqa: BLE001 - _translate distinguishes them
        translated = _translate(error, url)
    if isinstance(translated, InputError):
        raise translated
    raise _problem(
        f"{url}: {translated}", "the store can be opened with the environment's settings", credentials_remedy(url)
    )


def _translate(error: Exception, place: Url) -> InputError | Transient:
    """Translate an exception of obstore without quoting it.

    obstore has one exception class for most failures and distinguishes them only in its text, which is searched here.
    """
    from obstore import exceptions

    text = str(error)
    match = re.search(r"status code: (\d{3})", text)
    status = int(match[1]) if match else None
    if any(word in text for word in _INSTANCE):
        return Transient("no credentials in the environment, and this machine's instance provides none")
    if "redirect without LOCATION" in text or "AuthorizationHeaderMalformed" in text:
        return _another_region(text, place)
    if isinstance(error, FileNotFoundError) or status == 404:  # listings do not raise FileNotFoundError
        what = "no such bucket" if "NoSuchBucket" in text or "NoSuchContainer" in text else "absent"
        return _problem(
            f"{place}: {what}",
            "the store holds the data folder with every file of its manifest",
            "check data.path, or copy the missing files there",
        )
    if isinstance(error, (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        rule = "the store lets this machine read the data (some answer 403 for a file that is absent, too)"
        return _problem(f"{place}: refused with status {status or 403}", rule, credentials_remedy(place))
    if isinstance(error, exceptions.NotSupportedError) or "non-partial response" in text:
        return _problem(
            f"{place}: the whole file came where a range was asked for",
            "the server answers requests for ranges",
            "serve the folder with a server that does, or copy it to this machine",
        )
    if status == 416:
        return _problem(
            f"{place}: ends before the requested bytes",
            "the file is as long as its manifest says",
            RESTORE,
        )
    if status is not None and 300 <= status < 500 and status not in (408, 429):
        remedy = f"check the address, the region (AWS_REGION) and the clock; {credentials_remedy(place)}"
        return _problem(f"{place}: refused with status {status}", "the store answers with the file", remedy)
    if status is not None:
        return Transient(f"status {status}")
    if "kind: Timeout" in text or "TimedOut" in text:
        return TooSlow("silent for too long")
    return Transient("the connection failed or broke off")


def _another_region(text: str, place: Url) -> InputError:
    """Return the error for a bucket in another region than the one signed for: S3 answers 301 without address, or 400.

    The body of a 400 names the region. A 301 names it in a header, which obstore hides; an unsigned request shows it.
    """
    region_match, address = (
        re.search(r"<Region>([a-z0-9-]{1,40})</Region>", text),
        re.search(r"Error performing \w+ (https?://[^\s?]+)", text),
    )
    region = region_match[1] if region_match else _bucket_region(address[1]) if address else None
    environment = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    seen = (
        f"{place}: the bucket is in the region {region}"
        if region
        else f"{place}: the bucket is in another region"
    )
    seen += f", AWS_REGION={environment}" if environment else ", and AWS_REGION is not set"
    remedy = f"write AWS_REGION={region or 'THE_REGION'} before the command"
    return InputError(Problem("AWS_REGION", seen, "requests are signed for the region of the bucket", remedy))


@lru_cache(maxsize=32)
def _bucket_region(address: str) -> str | None:
    """Return the region that S3 names for the bucket of ``address``, or None."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(address, method="HEAD"), timeout=5) as answer:
            headers = answer.headers
    except HTTPError as error:
        headers = error.headers
    except OSError:
        return None
    region = headers.get("x-amz-bucket-region", "")
    return region if re.fullmatch("[a-z0-9-]{1,40}", region) else None


def _problem(seen: str, rule: str, remedy: str) -> InputError:
    return InputError(Problem("data.path", seen, rule, remedy))
