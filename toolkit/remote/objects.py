"""Write, replace, list and remove objects below a URL of a store (s3, gs, az), with bounded retries.

    objects = StoreObjects(Url("s3://bucket/folder"), subject)
    objects.upload("part-00000.safetensors", Path("part-00000.safetensors"))
    content, version = objects.read("latest")
    objects.replace("latest", b"...", version)      raises Conflict if another process replaced it meanwhile

Every write is atomic: an object has its old content or its new one. Readers of large objects use
``storage.py``. Error texts never quote a library or a server: see ``errors.py``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.config.urls import credentials_remedy
from toolkit.paths import Url
from toolkit.remote.errors import Subject, names_missing_bucket, translate_error
from toolkit.remote.fetch import RequestLimits, TransientError
from toolkit.remote.storage import StorageError, make_store

if TYPE_CHECKING:
    from obstore import PutMode

T = TypeVar("T")

MAX_PARTS = 9_000  # S3 allows 10,000
# A part is sent within request_seconds; the answer may come seconds after the last byte was sent.
WRITE_LIMITS = RequestLimits(silence_seconds=30.0, request_seconds=120.0, store_retries=6)


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """Identifies the content of an object; stores use one of these or both."""

    e_tag: str | None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object in a listing. ``name`` is relative to the listed folder."""

    name: str
    bytes: int
    version: ObjectVersion


class Conflict(Exception):
    """The object has another content than its writer expects."""


class StoreObjects:
    """The objects below ``url``. May be used by several threads.

    Args:
        url: The folder.
        subject: What it holds, for errors.
        limits: Time limits of one request, its retries, and ``opening_seconds``: how long a failed operation
            is repeated.
        part_bytes, parts_in_flight: Size and number of the parts of a large object that are sent at once;
            their product bounds the memory of an upload.

    Every method raises InputError if the store refuses, and StorageError if it does not answer.
    """

    def __init__(
        self,
        url: Url,
        subject: Subject,
        limits: RequestLimits = WRITE_LIMITS,
        *,
        part_bytes: int = 16 * 2**20,
        parts_in_flight: int = 4,
    ) -> None:
        self.url, self._subject, self._limits = url, subject, limits
        self._part_bytes, self._parts_in_flight = part_bytes, parts_in_flight
        self._store = make_store(url, limits, subject)

    def upload(self, name: str, file: Path) -> ObjectVersion:
        """Write the content of ``file``; large files in several parts. OSError: it cannot be read."""
        import obstore

        part = max(self._part_bytes, -(-file.stat().st_size // MAX_PARTS))
        return self._retry(
            name,
            lambda: _version(
                obstore.put(self._store, name, file, chunk_size=part, max_concurrency=self._parts_in_flight)
            ),
        )

    def put(self, name: str, content: bytes) -> ObjectVersion:
        """Write an object, whatever it contains now."""
        return self._retry(name, lambda: self._put(name, content, "overwrite"))

    def replace(self, name: str, content: bytes, expected: ObjectVersion | None) -> ObjectVersion:
        """Write an object if it has the version ``expected`` now; None: if it is absent.

        A store without conditional writes is read first: then a write between both is not noticed here, but
        by the next ``replace`` of the other writer.

        Raises:
            Conflict: It has another version.
        """
        from obstore import exceptions

        mode: Any = "create"
        if expected is not None:
            mode = {key: value for key, value in asdict(expected).items() if value is not None}
        try:
            return self._retry(name, lambda: self._put(name, content, mode))
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError):
            pass
        except (exceptions.NotSupportedError, NotImplementedError):
            found = self.read(name)
            if (None if found is None else found[1]) == expected:
                return self.put(name, content)
        # If the answer to a successful attempt was lost, the next attempt is refused.
        found = self.read(name)
        if found is not None and found[0] == content:
            return found[1]
        raise Conflict(name)

    def read(self, name: str) -> tuple[bytes, ObjectVersion] | None:
        """Return the content of an object and its version; None if it is absent."""
        import obstore

        def request() -> tuple[bytes, ObjectVersion]:
            result = obstore.get(self._store, name)
            content = bytes(result.bytes())
            if len(content) != result.meta["size"]:
                raise TransientError("the body broke off")
            return content, _version(result.meta)

        try:
            return self._retry(name, request)
        except FileNotFoundError:
            return None

    def head(self, name: str) -> StoredObject | None:
        """Return size and version of an object; None if it is absent."""
        import obstore

        try:
            meta = self._retry(name, lambda: obstore.head(self._store, name))
        except FileNotFoundError:
            return None
        return StoredObject(name, meta["size"], _version(meta))

    def listing(self, folder: str = "") -> list[StoredObject]:
        """List the objects below ``folder`` by name, which is relative to the URL."""
        import obstore

        def request() -> list[StoredObject]:
            entries = (meta for page in obstore.list(self._store, folder or None) for meta in page)
            return [StoredObject(meta["path"], meta["size"], _version(meta)) for meta in entries]

        try:
            return sorted(self._retry(folder, request), key=lambda entry: entry.name)
        except FileNotFoundError:
            return []

    def delete(self, name: str) -> None:
        """Remove an object, if it exists."""
        import obstore

        try:
            self._retry(name, lambda: obstore.delete(self._store, name))
        except FileNotFoundError:
            return

    def _put(self, name: str, content: bytes, mode: PutMode) -> ObjectVersion:
        import obstore

        try:
            return _version(obstore.put(self._store, name, content, mode=mode, use_multipart=False))
        except Exception as error:
            if mode != "overwrite" and "status code: 501" in str(error):  # a store without conditional writes
                raise NotImplementedError(name) from None
            raise

    def _retry(self, name: str, call: Callable[[], T]) -> T:
        """Return ``call()``, repeated after failures that may pass.

        Raises:
            FileNotFoundError: The object is absent (without the library's text). Exceptions of obstore about
                conditional writes are raised as they are; ``replace`` handles them.
        """
        start, failures = time.monotonic(), 0
        while True:
            failure = self._attempt(name, call)
            if not isinstance(failure, TransientError):
                return failure
            pause = self._limits.first_backoff_seconds * 2**failures
            pause = min(self._limits.max_backoff_seconds, pause) * random.uniform(0.5, 1.0)
            failures += 1
            seconds = time.monotonic() - start
            if seconds + pause > self._limits.opening_seconds:
                raise StorageError(
                    f"{self.url / name}: {failures} attempts in {seconds:.0f} s; the last: {failure}; "
                    f"if this persists, {credentials_remedy(self.url)}"
                )
            time.sleep(pause)

    def _attempt(self, name: str, call: Callable[[], T]) -> T | TransientError:
        """Make one attempt. Errors are raised outside of the handlers, so that they do not carry the
        library's texts.
        """
        from obstore import exceptions

        expected = (
            exceptions.AlreadyExistsError,
            exceptions.NotSupportedError,
            exceptions.PreconditionError,
            NotImplementedError,
        )
        raised: Exception
        try:
            return call()
        except TransientError as error:
            return error
        except expected as error:
            raised = type(error)(name)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                raise  # a local file
            absent = FileNotFoundError(name)
            no_bucket = names_missing_bucket(str(error))
            raised = translate_error(error, self.url / name, self._subject) if no_bucket else absent
        except Exception as error:  # noqa: BLE001 - translate_error distinguishes them
            raised = translate_error(error, self.url / name, self._subject)
        if isinstance(raised, TransientError):
            return raised
        raise raised


def _version(meta: Any) -> ObjectVersion:
    return ObjectVersion(meta.get("e_tag"), meta.get("version"))
