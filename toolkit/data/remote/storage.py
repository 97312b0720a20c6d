"""Folders that data are read from: on this machine, or in a store by its URL (``s3://``, ``gs://``, ``az://``, ``http(s)://``).

    folder = open_folder("s3://bucket/corpus")
    folder.read_bytes("manifest.json")
    folder.read_range("train-00000.bin", 4096, 8192)

Stores are spoken to by obstore, whose credentials come from the environment or the instance. No text of this module holds what a
library or a server said: that may name keys, signatures and tokens. It holds a status, a kind of failure, and a place.
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
# A store on another port or machine may be named with http: the operator's own words in the environment, as for the AWS tools.
_TOLD = ("AWS_", "AZURE_", "GOOGLE_")
_ENDPOINTS = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
)
STAYS = "the files of a data folder stay as they are"
RESTORE = "restore the file, or put new data into a folder of its own"
_INSTANCE = ("169.254.169.254", "metadata.google.internal", "MissingAccount", "MissingCredentials")


class Url(str):
    """A folder or file in a store. ``/`` joins, as for a Path."""

    __slots__ = ()

    def __truediv__(self, name: str) -> Url:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        return Url("/".join([self.rstrip("/"), *parts]))


Place = Path | Url


class StorageError(OSError):
    """A store did not answer while training read from it. Starting again may help, so it is no mistake of the user."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A file below a folder of a store. ``modified``: nanoseconds since 1970, as the store says."""

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
    """Where files lie. Reading is safe in several threads.

    Every method raises InputError where a file is absent, may not be read or has changed since it was first seen, or is shorter than
    a range of it; and StorageError where a store does not answer.
    """

    place: Place

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Bytes of each file."""

    def size(self, name: str) -> int:
        return self.sizes([name])[0]

    def read_files(self, names: Sequence[str]) -> list[bytes]:
        """Each whole file."""

    def read_bytes(self, name: str) -> bytes:
        return self.read_files([name])[0]

    def read_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Each range, none of them empty; from a store all at once, each one request."""

    def read_range(self, name: str, start: int, end: int) -> Buffer:
        return self.read_ranges([Range(name, start, end)])[0]


def place_of(path: str | Path, key: str = "data.path") -> Place:
    """``file:///folder`` is the folder itself. Raises InputError where ``path`` is a URL that may not be written."""
    if not is_url(path) or isinstance(path, Path):
        return Path(path)
    problem = url_problem(key, path)
    if problem is not None:
        raise InputError(problem)
    return Path(unquote(urlsplit(path).path)) if path.startswith("file://") else Url(path.rstrip("/"))


def open_folder(path: str | Path, limits: Limits | None = None) -> Folder:
    """Opens nothing yet: the first reading tells whether the folder is there. Raises InputError as ``place_of`` does."""
    place, limits = place_of(path), limits or Limits()
    if isinstance(place, Path):
        return LocalFolder(place)
    told = frozenset(item for item in os.environ.items() if item[0].startswith(_TOLD))
    return StoreFolder(_store(place, limits, told), place, limits)


class LocalFolder(Folder):
    place: Path

    def __init__(self, place: Path) -> None:
        self.place = place

    def sizes(self, names: Sequence[str]) -> list[int]:
        return [self._of(name, lambda file: file.stat().st_size) for name in names]

    def read_files(self, names: Sequence[str]) -> list[bytes]:
        return [self._of(name, Path.read_bytes) for name in names]

    def read_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        return [self._of(range.name, partial(_pread, range=range)) for range in ranges]

    def _of(self, name: str, read: Any) -> Any:
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
    """A prefix of a store. Every answer's size and entity tag must be those of the first one about that file."""

    place: Url

    def __init__(
        self, store: ObjectStore, place: Url, limits: Limits, sizes: Mapping[str, int] | None = None
    ) -> None:
        """
        Args:
            store: whose root is the folder.
            sizes: what files must be. With it the folder has the patience of training: a store that is away for a while is waited for.
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
        """Files that were read before are not asked for again: every answer tells the size, and must agree."""
        new = [name for name in dict.fromkeys(names) if name not in self._seen]
        self._fetch([partial(self._head, name) for name in new])
        return [self._seen[name][0] for name in names]

    def read_files(self, names: Sequence[str]) -> list[bytes]:
        """The first request for each tells how much more there is."""
        firsts = self._fetch(
            [partial(self._get, name, 0, self.limits.part_bytes, whole=False) for name in names]
        )
        more = [
            Range(name, len(first), self._seen[name][0])
            for name, first in zip(names, firsts, strict=True)
            if len(first) < self._seen[name][0]
        ]
        rest = dict(zip((one.name for one in more), self.read_ranges(more), strict=True))
        return [b"".join([first, rest.get(name, b"")]) for name, first in zip(names, firsts, strict=True)]

    def read_ranges(self, ranges: Sequence[Range]) -> list[Buffer]:
        """A range longer than ``part_bytes`` is several requests."""
        part = self.limits.part_bytes
        cuts = [range(one.start, one.end, part) for one in ranges]
        calls = [
            partial(self._get, one.name, start, min(start + part, one.end))
            for one, starts in zip(ranges, cuts, strict=True)
            for start in starts
        ]
        contents = iter(self._fetch(calls))
        return [
            next(contents) if len(starts) == 1 else b"".join(next(contents) for _ in starts)
            for starts in cuts
        ]

    def listing(self) -> list[Listed]:
        """Every file below the folder, by name; empty where the store knows no such folder. HTTP has no listing."""
        (found,) = self._fetch([self._list])
        return found

    def _fetch(self, calls: Sequence[Any]) -> list[Any]:
        seconds = self.limits.reading_seconds if self._reading else self.limits.opening_seconds
        try:
            return fetch_all(calls, self.pace, self.limits, seconds)
        except Unanswered as error:
            seen = f"{self.place}: {error}"
        except Forked:
            rule = "a store is read by the process that opened it, or by one that was started and not forked"
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

        return self._agree(name, self._ask(name, lambda: obstore.head(self._store, name)))

    def _list(self) -> list[Listed]:
        import obstore

        def ask() -> list[Listed]:
            found = (meta for page in obstore.list(self._store) for meta in page)
            return [Listed(meta["path"], meta["size"], _nanoseconds(meta["last_modified"])) for meta in found]

        return sorted(self._ask("", ask), key=lambda file: file.name)

    def _get(self, name: str, start: int, end: int, *, whole: bool = True) -> Buffer:
        """One attempt. ``whole``: the range lies within the file."""
        import obstore

        def ask() -> tuple[Any, tuple[int, int], memoryview]:
            result = obstore.get(self._store, name, options={"range": (start, end)})
            return result.meta, result.range, memoryview(result.bytes())

        meta, seen, content = self._ask(name, ask)
        size = self._agree(name, meta)
        if whole and end > size:
            raise _problem(
                f"{self.place / name}: {size} bytes", f"it has the bytes {start} to {end}", "restore the file"
            )
        if seen != (start, min(end, size)) or len(content) != seen[1] - seen[0]:
            raise Transient(
                f"bytes {seen[0]} to {seen[0] + len(content)} came where {start} to {end} were asked for"
            )
        return content

    def _ask(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - every kind is told apart there
            judged = _judged(error, self.place / name)
        raise judged  # outside, so that it does not carry the library's error with it

    def _agree(self, name: str, meta: Any) -> int:
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
                f"{self.place / name}: {size} bytes, of {first_size} that it had or should have",
                STAYS,
                RESTORE,
            )
        return size


def _nanoseconds(time: datetime) -> int:
    return int(time.replace(microsecond=0).timestamp()) * 10**9 + time.microsecond * 1000


@lru_cache(maxsize=32)
def _store(url: Url, limits: Limits, told: frozenset[tuple[str, str]]) -> ObjectStore:
    """One for all that read a URL: its connections stay open. ``told``: what the environment says of stores; another, another store.

    Repetitions and their pauses are ours (fetch.py): obstore's own would hide how long a request takes.
    """
    from obstore.store import from_url

    plain = url.startswith("http://") or any(
        name in _ENDPOINTS and value.startswith("http://") for name, value in told
    )
    seconds = {
        "connect_timeout": limits.connect_seconds,
        "read_timeout": limits.silence_seconds,
        "timeout": limits.request_seconds,
    }
    options: Any = {name: timedelta(seconds=value) for name, value in seconds.items()} | {"allow_http": plain}
    try:
        return from_url(url, client_options=options, retry_config={"max_retries": 0})
    except Exception as error:  # noqa: BLE001 - every kind is told apart there
        judged = _judged(error, url)
    if isinstance(judged, InputError):
        raise judged
    raise _problem(
        f"{url}: {judged}", "the store can be opened with what the environment says", credentials_remedy(url)
    )


def _judged(error: Exception, place: Url) -> InputError | Transient:
    """What a failure of obstore means, in words of our own.

    obstore has one exception for most failures and tells them apart in its text only, so that is searched, never shown.
    """
    from obstore import exceptions

    text = str(error)
    found = re.search(r"status code: (\d{3})", text)
    status = int(found[1]) if found else None
    if any(word in text for word in _INSTANCE):
        return Transient("no credentials in the environment, and this machine's instance gives none")
    if "redirect without LOCATION" in text or "AuthorizationHeaderMalformed" in text:
        return _another_region(text, place)
    if isinstance(error, FileNotFoundError) or status == 404:  # of a listing it is no FileNotFoundError
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
            f"{place}: ends before the bytes that were asked for",
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
    """Of a bucket in another region than the requests are signed for: S3 answers 301 without an address, or 400.

    The body of a 400 names the region. A 301 names it in a header, which obstore does not pass on: an unsigned request shows it.
    """
    named, asked = (
        re.search(r"<Region>([a-z0-9-]{1,40})</Region>", text),
        re.search(r"Error performing \w+ (https?://[^\s?]+)", text),
    )
    region = named[1] if named else _bucket_region(asked[1]) if asked else None
    told = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    seen = (
        f"{place}: the bucket is in the region {region}"
        if region
        else f"{place}: the bucket is in another region"
    )
    seen += f", AWS_REGION={told}" if told else ", and AWS_REGION is not set"
    remedy = f"write AWS_REGION={region or 'THE_REGION'} before the command"
    return InputError(Problem("AWS_REGION", seen, "requests are signed for the region of the bucket", remedy))


@lru_cache(maxsize=32)
def _bucket_region(address: str) -> str | None:
    """That an S3 names for the bucket of ``address``; None if it does not."""
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
