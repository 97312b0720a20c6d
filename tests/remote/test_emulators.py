"""Stores that other people's servers emulate: Azure (az) by Microsoft's azurite, S3 (s3) by moto.

    npm install --prefix /tmp/azurite azurite@3
    python -m venv /tmp/moto && /tmp/moto/bin/pip install 'moto[s3,server]'
    PATH=$PATH:/tmp/azurite/node_modules/.bin:/tmp/moto/bin pytest tests/remote/test_emulators.py -m full

An emulator that is not on the PATH is skipped.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from tests.checkpoint.layouts import same_bits, whole
from tests.checkpoint.uploads import UploadingRun, poll_often, state
from tests.data.local_stores import SECRETS
from tests.waiting import wait_until
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.remote.pointer import SUBJECT
from toolkit.checkpoint.verify import verify
from toolkit.errors import ConfigError, InputError
from toolkit.paths import Url
from toolkit.remote.objects import Conflict, StoreObjects
from toolkit.remote.storage import open_store
from toolkit.testing.dist import find_free_port

PROGRAMS = {"az": "azurite-blob", "s3": "moto_server"}
ACCOUNT, KEY = "account1", base64.b64encode(os.urandom(32)).decode()
BUCKET = "corpus"
PART = 5 * 2**20  # the smallest that S3 allows

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=PROGRAMS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """A scheme and the address of an emulator on 127.0.0.1 that has an empty bucket."""
    scheme: str = request.param
    program = shutil.which(PROGRAMS[scheme])
    if program is None:
        pytest.skip(f"{PROGRAMS[scheme]} is not on the PATH")
    folder, port = tmp_path_factory.mktemp(scheme), find_free_port()
    address = f"http://127.0.0.1:{port}"
    options = {
        "az": ["--blobHost", "127.0.0.1", "--blobPort", f"{port}", "--location", f"{folder}", "--silent"],
        "s3": ["-H", "127.0.0.1", "-p", f"{port}"],
    }[scheme]
    if scheme == "az":
        options.append("--disableTelemetry")
    log = folder / "output.txt"
    with log.open("wb") as output:
        emulator = subprocess.Popen(
            [program, *options],
            env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    request_bucket = {"az": container_request, "s3": bucket_request}[scheme]
    try:
        wait_until(
            lambda: answers(request_bucket(address)),
            60,
            "started",
            ended=lambda: emulator.poll() is not None,
            output=log,
        )
        yield scheme, address
    finally:
        emulator.kill()
        emulator.wait()


def container_request(address: str) -> Request:
    """Return a signed request for a container of Azure, since obstore creates none."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + 12 * "\n" + f"{named}/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    signature = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}"
    return Request(f"{address}/{ACCOUNT}/{BUCKET}?restype=container", method="PUT", headers=headers)


def bucket_request(address: str) -> Request:
    """Return a request for a bucket of S3. moto reads the service from the signature, but checks nothing."""
    signature = "AWS4-HMAC-SHA256 Credential=key/20261124/us-east-1/s3/aws4_request"
    return Request(f"{address}/{BUCKET}", method="PUT", headers={"Authorization": signature})


def answers(request: Request) -> bool:
    """Send a request. False before the server listens."""
    try:
        with urlopen(request, timeout=30):
            return True
    except URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return False
        raise


@pytest.fixture
def url(server: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An empty folder, for which the environment has credentials."""
    scheme, address = server
    azure = {"ACCOUNT_NAME": ACCOUNT, "ACCOUNT_KEY": KEY, "ENDPOINT": f"{address}/{ACCOUNT}"}
    environment = {
        "az": {f"AZURE_STORAGE_{name}": value for name, value in azure.items()},
        "s3": {**SECRETS, "AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1"},
    }[scheme]
    for name, value in {**environment, "NO_PROXY": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    return f"{scheme}://{BUCKET}/{tmp_path.name}"


def opened(url: str) -> StoreObjects:
    return StoreObjects(Url(url), SUBJECT, part_bytes=PART, parts_in_flight=2)


def test_objects_are_written_listed_read_and_removed(url: str, tmp_path: Path) -> None:
    large = np.random.default_rng(0).bytes(2 * PART + 7)
    (tmp_path / "large").write_bytes(large)
    objects = opened(url)
    sent = objects.upload("a/large", tmp_path / "large")
    objects.put("a/small", b"small")
    assert [(entry.name, entry.bytes) for entry in objects.listing("a")] == [
        ("a/large", len(large)),
        ("a/small", 5),
    ]
    assert objects.listing("b") == []
    head = objects.head("a/large")
    assert head is not None
    assert (head.bytes, head.version.e_tag) == (len(large), sent.e_tag)
    folder = open_store(Url(url))
    assert folder.read_bytes("a/large") == large
    assert bytes(folder.read_range("a/large", PART - 3, PART + 9)) == large[PART - 3 : PART + 9]
    with pytest.raises(InputError, match="ends before the requested bytes"):
        folder.read_range("a/large", len(large), len(large) + 1)
    objects.delete("a/large")
    objects.delete("a/large")  # it is absent already
    assert objects.head("a/large") is None
    assert objects.read("a/large") is None


def test_replacing_another_version_is_refused(url: str) -> None:
    one, other = opened(url), opened(url)
    first = one.replace("latest", b"one", None)
    with pytest.raises(Conflict):
        other.replace("latest", b"other", None)
    second = other.replace("latest", b"other", first)
    with pytest.raises(Conflict):
        one.replace("latest", b"late", first)
    assert one.read("latest") == (b"other", second)
    one.delete("latest")
    with pytest.raises(Conflict):
        one.replace("latest", b"late", second)


def test_an_absent_bucket_is_named(url: str) -> None:
    absent = opened(url.replace(BUCKET, "absent"))
    for access in (lambda: absent.read("latest"), lambda: absent.put("latest", b"x"), absent.listing):
        with pytest.raises(InputError, match="no such bucket"):
            access()


def test_a_wrong_key_is_explained_without_showing_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if url.startswith("s3"):
        pytest.skip("moto checks no signatures")
    wrong = base64.b64encode(bytes(32)).decode()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", wrong)
    with pytest.raises(InputError, match="refused with status 403") as caught:
        opened(url).put("latest", b"x")
    assert "AZURE_STORAGE_ACCOUNT_KEY" in caught.value.problems[0].remedy
    assert wrong not in str(caught.value)


def test_a_run_keeps_its_checkpoints_there(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)
    run = UploadingRun(tmp_path / "run", url, keep_last=1)
    for step in (1, 2):
        run.save(step)
        run.wait_until_sent()
    fresh = UploadingRun(tmp_path / "fresh", url)
    assert fresh.claimed.newest is not None
    run.save(3)
    run.close()
    with pytest.raises(ConfigError, match=r"attempt 1 of run .* has replaced the pointer"):
        raise run.uploaders[0].error or AssertionError
    assert fresh.close()
    reader = open_reader(url)
    assert reader.step == 2
    found, expected = whole(reader), state(2)
    assert all(same_bits(found[key], expected[key]) for key in expected)
    assert verify(url) == []
    folders = {entry.name.partition("/")[0] for entry in opened(url).listing()}
    assert len(folders - {"latest"}) == 2, "of step 2, and of step 3 without a manifest"
