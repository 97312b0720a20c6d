"""Stores of Azure (az), served by Microsoft's emulator. Skipped without it.

npm install --prefix /tmp/azurite azurite@3
PATH=$PATH:/tmp/azurite/node_modules/.bin pytest tests/remote/test_azurite.py -m full
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
from tests.waiting import wait_until
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.remote.pointer import SUBJECT
from toolkit.checkpoint.verify import verify
from toolkit.errors import ConfigError, InputError
from toolkit.paths import Url
from toolkit.remote.objects import Conflict, StoreObjects
from toolkit.remote.storage import open_store
from toolkit.testing.dist import find_free_port

EMULATOR = shutil.which("azurite-blob")
ACCOUNT, KEY = "account1", base64.b64encode(os.urandom(32)).decode()
CONTAINER = "corpus"
PART = 5 * 2**20

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(EMULATOR is None, reason="azurite-blob is not on the PATH"),
]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an account with an empty container, on 127.0.0.1."""
    assert EMULATOR is not None
    folder, port = tmp_path_factory.mktemp("azurite"), find_free_port()
    url = f"http://127.0.0.1:{port}/{ACCOUNT}"
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    with (folder / "output.txt").open("wb") as output:
        emulator = subprocess.Popen(
            [EMULATOR, *options, "--disableTelemetry"],
            env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: container_created(url),
            60,
            "started",
            ended=lambda: emulator.poll() is not None,
            output=folder / "output.txt",
        )
        yield url
    finally:
        emulator.kill()
        emulator.wait()


def container_created(url: str) -> bool:
    """Create the container, which obstore cannot. False before the emulator listens."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "\n".join(f"{name}:{value}" for name, value in headers.items())
    resource = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    signed = hmac.new(
        base64.b64decode(KEY), ("PUT" + 12 * "\n" + f"{named}\n{resource}").encode(), hashlib.sha256
    )
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signed.digest()).decode()}"
    try:
        with urlopen(
            Request(f"{url}/{CONTAINER}?restype=container", method="PUT", headers=headers)
        ) as answer:
            return bool(answer.status == 201)
    except URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return False
        raise


@pytest.fixture
def url(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An empty folder, for which the environment has credentials."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return f"az://{CONTAINER}/{tmp_path.name}"


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
    assert (head.bytes, head.version) == (len(large), sent)
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


def test_refusals_are_explained_without_secrets(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = opened("az://absent/folder")
    for access in (lambda: absent.read("latest"), lambda: absent.put("latest", b"x"), absent.listing):
        with pytest.raises(InputError, match="no such bucket"):
            access()
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
