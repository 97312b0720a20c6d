"""Loopback stores that serve a folder as an S3 bucket or over HTTP, with configurable delays and failures.

The bucket can be written: whole and multipart uploads, conditional writes, removal.

python -m tests.data.local_stores FOLDER --port 9000        standalone
"""

from __future__ import annotations

import argparse
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape, unescape

import pytest
import xxhash

from toolkit.files import write_whole

BUCKET = "corpus"
# Secrets in a test's environment that must not appear in any output.
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "s3cr3t/do+not/show",
    "AWS_SESSION_TOKEN": "t0k3n-do-not-show",
}


@dataclass
class Faults:
    """Faults of a store: shares of its requests, chosen at random from ``seed``."""

    latency_seconds: float = 0.0
    failing: float = 0.0  # 500, 503, a reset connection or a body that breaks off, in turn
    stalled: float = 0.0  # headers and half of the body, then silence
    seed: int = 0
    forbidden: bool = False
    region: str | None = None  # of the bucket: requests that are signed for another are refused, as S3 does
    read_only: bool = False  # writing is refused
    down: bool = False  # every request is answered with 503
    unimplemented: bool = False  # every request is answered with 501
    unconditional: bool = False  # conditional writes are not implemented
    lost_answers: int = 0  # so many of the next writes take place, and their connections are reset
    no_first_byte: bool = False  # "bytes=0-0" is answered with the whole file, as some servers do
    region_status: int = 301  # or 400, of which the body names the region
    silence_seconds: float = 8.0


@dataclass
class Store:
    """A served folder, and the requests that it received."""

    root: Path
    faults: Faults = field(default_factory=Faults)
    address: str = "127.0.0.1"
    port: int = 0
    page: int = 1000  # files in an answer of a listing
    requests: Counter[str] = field(default_factory=Counter)  # by file
    faulty: Counter[str] = field(default_factory=Counter)  # by kind of fault
    served_bytes: int = 0  # of bodies that were sent whole
    received_bytes: int = 0  # of bodies that were stored
    writes: Counter[str] = field(default_factory=Counter)  # stored or removed objects, by "METHOD key"
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)  # unfinished multipart uploads
    on_write: Callable[[str], None] = lambda key: None  # called before a write takes place
    signed: int = 0  # requests with a signature
    cached: dict[Path, tuple[int, bytes, str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def http(self) -> str:
        return f"http://{self.address}:{self.port}/{BUCKET}"

    @property
    def s3(self) -> str:
        return f"s3://{BUCKET}"

    def content(self, file: Path) -> tuple[bytes, str]:
        """The bytes and their entity tag."""
        stat = file.stat()
        cached = self.cached.get(file)
        if cached is None or cached[0] != stat.st_mtime_ns:
            content = file.read_bytes()
            cached = self.cached[file] = (stat.st_mtime_ns, content, f'"{xxhash.xxh3_64_hexdigest(content)}"')
        return cached[1:]

    def forget(self) -> None:
        """Reset all counts."""
        with self.lock:
            self.requests.clear()
            self.faulty.clear()
            self.writes.clear()
            self.served_bytes = self.received_bytes = 0


def _handler(store: Store) -> type[BaseHTTPRequestHandler]:
    chance = random.Random(store.faults.seed)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # a header and a small body are one packet
        disable_nagle_algorithm = True

        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_PUT(self) -> None:
            self._write()

        def do_POST(self) -> None:
            self._write()

        def do_DELETE(self) -> None:
            self._write()

        def _write(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            faults = store.faults
            path, _, query = self.path.partition("?")
            bucket, _, key = unquote(path).lstrip("/").partition("/")
            asked = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
            with store.lock:
                store.requests[key] += 1
                dice, kind = chance.random(), chance.randrange(3)
                lost = faults.lost_answers > 0 and self.command == "PUT"
                faults.lost_answers -= lost
            if faults.forbidden or faults.read_only:
                return self._refuse(HTTPStatus.FORBIDDEN, "AccessDenied", True)
            if bucket != BUCKET:
                return self._refuse(HTTPStatus.NOT_FOUND, "NoSuchBucket", True)
            if faults.down or (dice < faults.failing and kind < 2):
                with store.lock:
                    store.faulty["503"] += 1
                return self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "SlowDown", True)
            conditional = "If-Match" in self.headers or "If-None-Match" in self.headers
            if faults.unimplemented or (faults.unconditional and conditional):
                return self._refuse(HTTPStatus.NOT_IMPLEMENTED, "NotImplemented", True)
            store.on_write(key)
            with store.lock:
                answer = self._store(key, asked, content)
                if lost or dice < faults.failing:  # it takes place, and the answer is lost
                    store.faulty["lost"] += 1
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    self.close_connection = True
                    return None
            status, tag, body = answer
            self.send_response(status)
            if tag:
                self.send_header("ETag", tag)
            if status != HTTPStatus.NO_CONTENT:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _store(
            self, key: str, asked: dict[str, str], content: bytes
        ) -> tuple[HTTPStatus, str | None, bytes]:
            """Carry out a write. Returns status, entity tag and body of the answer."""
            file, upload = store.root / key, asked.get("uploadId", "")
            if self.command == "DELETE" and upload:
                store.uploads.pop(upload, None)
                return HTTPStatus.NO_CONTENT, None, b""
            if "delete" in asked:
                keys = re.findall(r"<Key>(.*?)</Key>", content.decode())
                for one in map(unescape, keys):
                    (store.root / one).unlink(missing_ok=True)
                    store.writes[f"DELETE {one}"] += 1
                gone = "".join(f"<Deleted><Key>{one}</Key></Deleted>" for one in keys)
                return HTTPStatus.OK, None, f"<DeleteResult>{gone}</DeleteResult>".encode()
            if self.command == "DELETE":
                file.unlink(missing_ok=True)
                store.writes[f"DELETE {key}"] += 1
                return HTTPStatus.NO_CONTENT, None, b""
            if self.command == "POST" and "uploads" in asked:
                upload = f"upload-{len(store.uploads)}-{chance.randrange(10**9)}"
                store.uploads[upload] = {}
                body = (
                    f"<R><Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId></R>"
                )
                return HTTPStatus.OK, None, body.encode()
            if self.command == "PUT" and upload:
                store.uploads[upload][int(asked["partNumber"])] = content
                return HTTPStatus.OK, f'"{xxhash.xxh3_64_hexdigest(content)}"', b""
            body = b""
            if self.command == "POST":
                content = b"".join(part for _, part in sorted(store.uploads.pop(upload).items()))
            current = store.content(file)[1] if file.is_file() else None
            wanted = self.headers.get("If-Match")
            if (wanted is not None and wanted != current) or (
                self.headers.get("If-None-Match") == "*" and current is not None
            ):
                return HTTPStatus.PRECONDITION_FAILED, None, b"<Error><Code>PreconditionFailed</Code></Error>"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, content, durable=False)
            store.received_bytes += len(content)
            store.writes[f"PUT {key}"] += 1
            tag = store.content(file)[1]
            if self.command == "POST":
                named = f"<Location>x</Location><Key>{escape(key)}</Key><ETag>{escape(tag)}</ETag>"
                body = f"<R>{named}</R>".encode()
            return HTTPStatus.OK, tag, body

        def _answer(self, *, body: bool) -> None:
            faults = store.faults
            path, _, query = self.path.partition("?")
            bucket, _, key = unquote(path).lstrip("/").partition("/")
            with store.lock:
                store.requests[key] += 1
                store.signed += "Authorization" in self.headers
                dice, kind = chance.random(), chance.randrange(4)
            time.sleep(faults.latency_seconds)
            scope = self.headers.get("Authorization", "//").partition("Credential=")[2].split("/")
            if faults.region is not None and (len(scope) < 3 or scope[2] != faults.region):
                return self._elsewhere(faults.region, faults.region_status, body)
            if faults.forbidden:
                return self._refuse(HTTPStatus.FORBIDDEN, "InvalidAccessKeyId", body)
            if faults.down:
                return self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "SlowDown", body)
            if faults.unimplemented:
                return self._refuse(HTTPStatus.NOT_IMPLEMENTED, "NotImplemented", body)
            if bucket != BUCKET:
                return self._refuse(HTTPStatus.NOT_FOUND, "NoSuchBucket", body)
            if "list-type=2" in query:
                with store.lock:  # no file is being written
                    return self._list({name: values[0] for name, values in parse_qs(query).items()})
            file = store.root / key
            if not file.is_file():
                return self._refuse(HTTPStatus.NOT_FOUND, "NoSuchKey", body)
            failing, stalled = dice < faults.failing, faults.failing <= dice < faults.failing + faults.stalled
            if failing:
                with store.lock:
                    store.faulty[("500", "503", "reset", "cut")[kind]] += 1
                if kind < 2:
                    return self._refuse(
                        (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)[kind],
                        "SlowDown",
                        body,
                    )
                if kind == 2:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    self.close_connection = True
                    return None
            self._send(file, body, cut=failing, stalled=stalled)

        def _send(self, file: Path, body: bool, *, cut: bool, stalled: bool) -> None:
            content, tag = store.content(file)
            start, end, asked = 0, len(content), self.headers.get("Range")
            if asked == "bytes=0-0" and store.faults.no_first_byte:
                asked = None
            if asked:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last) + 1, end)
                if start >= len(content):
                    return self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange", body)
            self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
            self.send_header("Content-Length", str(end - start))
            self.send_header("ETag", tag)
            self.send_header("Last-Modified", "Sat, 21 Nov 2026 12:00:00 GMT")
            self.end_headers()
            if not body:
                return
            if cut or stalled:
                self.wfile.write(content[start : (start + end) // 2])
                self.wfile.flush()
                self.close_connection = True
                if stalled:
                    with store.lock:
                        store.faulty["stalled"] += 1
                    time.sleep(store.faults.silence_seconds)
                return
            with store.lock:  # counted first, because the client may check the count after the last byte
                store.served_bytes += end - start
            self.wfile.write(content[start:end])

        def _list(self, asked: dict[str, str]) -> None:
            names = sorted(
                file.relative_to(store.root).as_posix() for file in store.root.rglob("*") if file.is_file()
            )
            names = [
                name
                for name in names
                if name.startswith(asked.get("prefix", "")) and name > asked.get("continuation-token", "")
            ]
            shown, more = names[: store.page], len(names) > store.page
            entries = []
            for name in shown:
                stat = (store.root / name).stat()
                changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stat.st_mtime))
                tag = escape(store.content(store.root / name)[1])
                about = f"<LastModified>{changed}</LastModified><Size>{stat.st_size}</Size><ETag>{tag}</ETag>"
                entries.append(f"<Contents><Key>{escape(name)}</Key>{about}</Contents>")
            token = f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if more else ""
            truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            listing = f"<Name>{BUCKET}</Name>{truncated}{''.join(entries)}"
            content = f"<ListBucketResult>{listing}</ListBucketResult>".encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _elsewhere(self, region: str, status: int, body: bool) -> None:
            code = "PermanentRedirect" if status == 301 else "AuthorizationHeaderMalformed"
            named = "" if status == 301 else f"<Region>{region}</Region>"
            content = f"<Error><Code>{code}</Code>{named}</Error>".encode()
            self.send_response(status)
            self.send_header("x-amz-bucket-region", region)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def _refuse(self, status: HTTPStatus, code: str, body: bool) -> None:
            """As S3 does: the body of a refusal names the key that was used."""
            key_id = SECRETS["AWS_ACCESS_KEY_ID"]
            content = f"<Error><Code>{code}</Code><AWSAccessKeyId>{key_id}</AWSAccessKeyId></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client closed the connection after another attempt answered


@contextmanager
def served(root: Path, *, address: str = "127.0.0.1", port: int = 0, **faults: Any) -> Iterator[Store]:
    """Serve ``root`` as ``store.http`` and, with ``environment(store)``, as ``store.s3``."""
    store = Store(root, Faults(**faults), address)
    server = _Server((address, port), _handler(store))
    store.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(store: Store) -> dict[str, str]:
    """Return the environment of a process that reads ``store.s3``."""
    return {
        **SECRETS,
        "AWS_ENDPOINT_URL": f"http://{store.address}:{store.port}",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": store.address,
    }


def set_environment(monkeypatch: pytest.MonkeyPatch, store: Store, cache_home: Path) -> None:
    for name, value in environment(store).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Serve a folder as the bucket {BUCKET} of an S3.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    with served(given.folder, address=given.address, port=given.port) as store:
        print(f"{store.s3} is {store.root}, at {store.address}:{store.port}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
