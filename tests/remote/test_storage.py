"""Local and remote folders give the same bytes; refusals are explained without secrets."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from tests.damage import flip_byte
from tests.data.local_stores import SECRETS, Store, environment, served, set_environment
from toolkit.config.checkpoint import CheckpointConfig
from toolkit.config.compose import compose
from toolkit.config.data import DataConfig
from toolkit.config.identity import identity
from toolkit.config.schema import RunConfig
from toolkit.config.urls import shown, url_problem
from toolkit.errors import ConfigError, InputError
from toolkit.paths import Url
from toolkit.remote.fetch import RequestLimits
from toolkit.remote.storage import (
    ByteRange,
    DataFolder,
    StorageError,
    StoreFolder,
    open_folder,
    parse_location,
)

ROOT = Path(__file__).resolve().parents[2]
QUICK = RequestLimits(
    opening_seconds=0.4, reading_seconds=0.4, silence_seconds=0.5, first_backoff_seconds=0.01
)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "served"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "small").write_bytes(b"a small file")
    (folder / "large.bin").write_bytes(np.random.default_rng(0).bytes(3_000_001))
    return folder


def opened(place: str, store: Store, limits: RequestLimits | None = None) -> DataFolder:
    return open_folder(
        {"local": str(store.root), "file": f"file://{store.root}", "s3": store.s3, "http": store.http}[place],
        limits,
    )


@pytest.mark.parametrize("place", ["local", "file", "s3", "http"])
def test_all_stores_return_the_same_bytes(
    files: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = (files / "large.bin").read_bytes()
    with served(files) as store:
        set_environment(monkeypatch, store, tmp_path)
        folder = opened(place, store)
        assert folder.read_files(["large.bin", "deep/er/small"]) == [large, b"a small file"]
        assert folder.sizes(["deep/er/small", "large.bin"]) == [12, 3_000_001]
        starts = np.random.default_rng(1).integers(0, 2_900_000, 100).tolist()
        ranges = [ByteRange("large.bin", start, start + 1 + start % 70_000) for start in starts]
        assert [bytes(one) for one in folder.read_ranges(ranges)] == [
            large[one.start : one.end] for one in ranges
        ]
        assert bytes(folder.read_range("large.bin", 0, 3_000_001)) == large  # more than one request
        with pytest.raises(InputError, match=r"large\.bin"):
            folder.read_range("large.bin", 3_000_000, 3_000_002)
        with pytest.raises(InputError, match=r"absent|No such file"):
            folder.size("missing")
        assert (store.signed > 0) == (place == "s3")


def test_memory_store_of_obstore_is_read(files: Path) -> None:
    """Any store of obstore can be used."""
    import obstore

    store = obstore.store.MemoryStore()
    obstore.put(store, "a", b"some bytes")
    folder = StoreFolder(store, Url("memory://x"), RequestLimits())
    assert folder.read_bytes("a") == b"some bytes"
    obstore.put(store, "a", b"more bytes than before")
    with pytest.raises(InputError, match="a changed while it was read"):
        folder.read_bytes("a")


# -- refusals


@pytest.mark.parametrize("place", ["s3", "http"])
def test_refused_access_is_reported_at_once(
    files: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(files, forbidden=True) as store:
        set_environment(monkeypatch, store, tmp_path)
        begin = time.monotonic()
        with pytest.raises(InputError, match=r"large\.bin: refused with status 403") as caught:
            opened(place, store).read_bytes("large.bin")
        assert time.monotonic() - begin < 5  # not repeated
        assert sum(store.requests.values()) == 1
        assert ("AWS_ACCESS_KEY_ID" in str(caught.value)) == (place == "s3")  # the variable's name


def test_missing_bucket_is_reported(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(files) as store:
        set_environment(monkeypatch, store, tmp_path)
        with pytest.raises(InputError, match=r"s3://other/deep/large\.bin: no such bucket"):
            open_folder("s3://other/deep/").read_bytes("large.bin")


@pytest.mark.parametrize("status", [301, 400])
def test_a_wrong_region_is_refused_at_once_and_the_right_one_named(
    files: Path, tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(files, region="eu-central-1", region_status=status) as store:
        set_environment(monkeypatch, store, tmp_path)
        begin = time.monotonic()
        with pytest.raises(
            InputError, match=r"the bucket is in the region eu-central-1, AWS_REGION=us-east-1"
        ) as caught:
            open_folder(store.s3).read_bytes("large.bin")
        assert time.monotonic() - begin < 5
        remedy = caught.value.problems[0].remedy
        assert "AWS_REGION=eu-central-1" in remedy
        monkeypatch.setenv("AWS_REGION", "eu-central-1")  # the remedy of the error
        assert open_folder(store.s3).read_bytes("large.bin") == (files / "large.bin").read_bytes()


def test_unreachable_store_is_refused(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(files) as store:
        set_environment(monkeypatch, store, tmp_path)
    for place in ("s3", "http"):
        with pytest.raises(
            InputError, match=r"\d+ attempts in 0 s; the last: the connection failed or broke off"
        ):
            opened(place, store, QUICK).read_bytes("large.bin")
    reading = opened("http", store, QUICK)
    assert isinstance(reading, StoreFolder)
    with pytest.raises(StorageError, match="attempts"):  # during training it is not a user error
        reading.for_reading({"large.bin": 3_000_001}).read_range("large.bin", 0, 1)


def test_missing_credentials_are_reported(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without credentials the instance is queried, here at a closed port."""
    with served(files) as store:
        set_environment(monkeypatch, store, tmp_path)
        for name in SECRETS:
            monkeypatch.delenv(name)
        with served(tmp_path) as nothing:
            monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{nothing.port}")
        with pytest.raises(InputError, match=r"give credentials in the environment: AWS_ACCESS_KEY_ID"):
            open_folder(store.s3, QUICK).read_bytes("large.bin")
        assert sum(store.requests.values()) == 0


def test_a_file_that_changes_is_refused(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(files) as store:
        set_environment(monkeypatch, store, tmp_path)
        folder = opened("s3", store)
        folder.read_range("large.bin", 0, 10)
        flip_byte(files / "large.bin", 5)
        with pytest.raises(InputError, match=r"large\.bin changed while it was read: tag"):
            folder.read_range("large.bin", 0, 10)
        assert isinstance(folder, StoreFolder)
        with pytest.raises(InputError, match=r"large\.bin: 3000001 bytes instead of 3000000"):
            folder.for_reading({"large.bin": 3_000_000}).read_range("large.bin", 0, 10)


def test_forked_process_is_refused_without_hanging(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked process has only the calling thread, so waiting for the other threads would never end."""
    with served(files) as store:
        set_environment(monkeypatch, store, tmp_path)
        opened("s3", store).size("large.bin")
        worker = get_context("fork").Process(target=_read_in_a_fork, args=(store.s3,))
        worker.start()
        worker.join(20)
        try:
            assert worker.exitcode == 7
        finally:
            worker.kill()


def _read_in_a_fork(url: str) -> None:
    try:
        open_folder(url).size("large.bin")
    except InputError as error:
        os._exit(7 if "s3://corpus in a forked process" in str(error) else 8)


# ---- failures: retries overcome them; the controls have no retries


@pytest.mark.parametrize("place", ["s3", pytest.param("http", marks=pytest.mark.full)])
def test_failing_and_stalled_requests_are_retried(
    files: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = (files / "large.bin").read_bytes()
    ranges = [ByteRange("large.bin", start, start + 4096) for start in range(0, 1_200_000, 8_000)]
    expected = [large[one.start : one.end] for one in ranges]
    with served(files, failing=0.05, stalled=0.05) as store:
        set_environment(monkeypatch, store, tmp_path)
        folder = opened(place, store)
        begin = time.monotonic()
        assert [bytes(one) for one in folder.read_ranges(ranges)] == expected
        assert time.monotonic() - begin < 30
        assert store.faulty["stalled"] > 3
        assert sum(store.faulty.values()) - store.faulty["stalled"] > 3
        # The control: one attempt each is not enough.
        once = RequestLimits(opening_seconds=0, hedge_share=0, silence_seconds=0.5)
        with pytest.raises(InputError, match="1 attempts"):
            opened(place, store, once).read_ranges(ranges)


# -- secrets


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:hunter2@bucket/folder",
        "https://user:hunter2@host/folder",
        "s3://user:hun/hunter2@bucket",
        "https://hunter2@host/folder",
        "https://host/folder?X-Amz-Signature=hunter2",
        "https://host/folder#hunter2",
        "az://container/folder?sig=hunter2",
    ],
)
def test_secrets_in_a_url_are_refused_and_not_shown(url: str) -> None:
    assert "hunter2" not in shown(url)
    problem = url_problem("data.path", url)
    assert problem is not None
    assert "hunter2" not in str(problem)
    sources = {"web": {"path": url, "weight": "wrong", "more": 1}}
    for make in (
        lambda: DataConfig(name="prepared", path=url),
        lambda: DataConfig(name="mixture", sources=sources),
        lambda: CheckpointConfig(url=url),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert "hunter2" not in str(caught.value)
    with pytest.raises(InputError) as refused:
        open_folder(url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "word",
    [
        "data.path=https://host/folder?sig=hunter2",
        "data.pth=s3://user:hunter2@bucket",
        "'s3://u:hunter2@b/x',",
        "s3://u:hunter2@b/x",
        "+data.sources.a={path: 's3://u:hunter2@b/x', weight: 1}",
    ],
)
def test_malformed_urls_are_shown_without_secrets(word: str) -> None:
    """Errors before a URL is recognised: grammar mistakes, unknown keys."""
    with pytest.raises(ConfigError) as caught:
        compose([word])
    assert "hunter2" not in str(caught.value)
    assert "***" in str(caught.value)


@pytest.mark.parametrize(
    "url", ["ftp://host/folder", "s3:///folder", "file://", "file://host/folder", "https:///folder"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"data\.path="):
        parse_location(url)


def test_parse_location_of_paths_and_urls() -> None:
    assert parse_location("file:///a/b%20c") == Path("/a/b c")
    assert parse_location("some/folder") == Path("some/folder")
    assert parse_location("s3://bucket/a/") / "./b/c" == "s3://bucket/a/b/c"
    with pytest.raises(ConfigError, match="data=stdlib is prepared on this machine"):
        DataConfig(path="s3://bucket/a")


def test_cache_settings_do_not_change_the_run_identity() -> None:
    one, other = RunConfig(), RunConfig()
    other.data.cache.folder, other.data.cache.gib = "/tmp/elsewhere", 3.0
    assert identity(one) == identity(other)
    other.data.shuffle_seed = 1  # the control
    assert identity(one) != identity(other)


READ = """
import logging, sys, warnings
logging.basicConfig(level=logging.DEBUG)
warnings.simplefilter("always")
from toolkit.remote.fetch import RequestLimits
from toolkit.remote.storage import open_folder
folder = open_folder(sys.argv[1], RequestLimits(opening_seconds=0.3, silence_seconds=0.5))
print(folder, repr(folder), vars(folder))
folder.read_files(["large.bin"])
"""


@pytest.mark.parametrize(
    "faults",
    [{}, {"forbidden": True}, {"failing": 1.0}, {"stalled": 1.0}],
    ids=lambda one: next(iter(one), "well"),
)
def test_nothing_secret_is_printed(files: Path, tmp_path: Path, faults: dict[str, float]) -> None:
    """All output of a process, tracebacks included, in the worst cases: refusals whose body names the
    key.
    """
    with served(files, silence_seconds=2, **faults) as store:
        ended = subprocess.run(
            [sys.executable, "-c", READ, store.s3],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **environment(store), "RUST_LOG": "trace"},
        )
    message = ended.stdout + ended.stderr
    assert ended.returncode == (1 if faults else 0), message
    assert "Traceback" in message or not faults
    assert not [name for name, secret in SECRETS.items() if secret in message]


def test_control_library_errors_contain_a_key(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the test above: the suppressed text contains the key."""
    import obstore
    from obstore.store import from_url

    with served(files, forbidden=True) as store:
        set_environment(monkeypatch, store, tmp_path)
        theirs = from_url(store.s3, client_options={"allow_http": True}, retry_config={"max_retries": 0})
        with pytest.raises(obstore.exceptions.PermissionDeniedError) as caught:
            obstore.get(theirs, "large.bin", options={"range": (0, 1)})
        assert SECRETS["AWS_ACCESS_KEY_ID"] in str(caught.value)
        with pytest.raises(InputError) as ours:
            open_folder(store.s3).read_bytes("large.bin")
        assert SECRETS["AWS_ACCESS_KEY_ID"] not in "".join(traceback.format_exception(ours.value))
        assert ours.value.__context__ is None
