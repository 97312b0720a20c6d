"""Objects of a store are written whole, replaced conditionally and removed, whatever the store does.

pytest tests/remote/test_objects.py
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.data.local_stores import SECRETS, Store
from toolkit.checkpoint.remote.pointer import SUBJECT
from toolkit.errors import InputError
from toolkit.paths import Url
from toolkit.remote.fetch import RequestLimits
from toolkit.remote.objects import Conflict, StoreObjects
from toolkit.remote.storage import StorageError

QUICK = RequestLimits(
    store_retries=2,
    opening_seconds=20.0,
    first_backoff_seconds=0.01,
    max_backoff_seconds=0.1,
    silence_seconds=20.0,
)
ONCE = replace(QUICK, store_retries=0, opening_seconds=0.0)
PART = 5 * 2**20  # the smallest that S3 allows


def opened(store: Store, limits: RequestLimits = QUICK) -> StoreObjects:
    return StoreObjects(Url(f"{store.s3}/folder"), SUBJECT, limits, part_bytes=PART, parts_in_flight=2)


def test_objects_are_written_listed_read_and_removed(store: Store, tmp_path: Path) -> None:
    large = np.random.default_rng(0).bytes(2 * PART + 7)
    (tmp_path / "large").write_bytes(large)
    objects = opened(store)
    sent = objects.upload("a/large", tmp_path / "large")
    small = objects.put("a/small", b"small")
    assert (store.root / "folder/a/large").read_bytes() == large
    assert not store.uploads, "the multipart upload is complete"
    assert [(entry.name, entry.bytes, entry.version) for entry in objects.listing("a")] == [
        ("a/large", len(large), sent),
        ("a/small", 5, small),
    ]
    assert objects.listing("b") == []
    assert objects.read("a/small") == (b"small", small)
    head = objects.head("a/large")
    assert head is not None
    assert (head.bytes, head.version) == (len(large), sent)
    objects.delete("a/large")
    objects.delete("a/large")  # it is absent already
    assert objects.head("a/large") is None
    assert objects.read("a/large") is None


@pytest.mark.parametrize("conditional", [True, False], ids=["conditional", "fallback"])
def test_replacing_another_version_is_refused(store: Store, conditional: bool) -> None:
    store.faults.unconditional = not conditional
    one, other = opened(store), opened(store)
    first = one.replace("latest", b"one", None)
    with pytest.raises(Conflict):
        other.replace("latest", b"other", None)
    second = other.replace("latest", b"other", first)
    with pytest.raises(Conflict):
        one.replace("latest", b"late", first)
    assert one.read("latest") == (b"other", second)


def test_a_write_whose_answer_is_lost_counts(store: Store) -> None:
    """The repeated attempt is refused, because the first one took place."""
    objects = opened(store, replace(QUICK, store_retries=0))
    store.faults.lost_answers = 1
    first = objects.replace("latest", b"one", None)
    store.faults.lost_answers = 1
    objects.replace("latest", b"two", first)
    assert (store.root / "folder/latest").read_bytes() == b"two"
    assert store.faulty["lost"] == 2


def test_requests_to_a_failing_store_are_repeated(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(PART + 1))
    store.faults.failing = 0.3
    objects = opened(store)
    for number in range(10):
        objects.upload(f"{number}/file", tmp_path / "file")
        assert objects.read(f"{number}/file") is not None
    assert store.faulty.total() > 5
    assert len(objects.listing()) == 10
    once = opened(store, ONCE)  # the control: one attempt each is not enough
    with pytest.raises(StorageError, match="1 attempts"):
        list(map(partial(once.put, content=b"x"), map(str, range(100))))


def test_refusals_are_explained_without_secrets(store: Store) -> None:
    objects = opened(store)
    store.faults.read_only = True
    with pytest.raises(InputError, match=r"latest: refused with status 403") as caught:
        objects.put("latest", b"x")
    assert "AWS_ACCESS_KEY_ID" in str(caught.value)
    store.faults.forbidden = True
    with pytest.raises(InputError, match="refused with status 403") as read:
        objects.read("latest")
    assert not [secret for secret in SECRETS.values() if secret in f"{caught.value}{read.value}"]
    other = StoreObjects(Url("s3://absent/folder"), SUBJECT, QUICK)
    store.faults.forbidden = store.faults.read_only = False
    for access in (lambda: other.read("latest"), lambda: other.put("latest", b"x")):
        with pytest.raises(InputError, match="no such bucket") as missing:
            access()
        assert missing.value.problems[0].key == "checkpoint.url"


def test_an_outage_ends_with_an_error_that_a_restart_may_overcome(store: Store) -> None:
    store.faults.down = True
    with pytest.raises(StorageError, match=r"the last: status 503"):
        opened(store, ONCE).put("latest", b"x")
    timer = threading.Timer(0.3, lambda: setattr(store.faults, "down", False))
    timer.start()
    opened(store).put("latest", b"x")  # the control: it waits
    timer.join()


def test_a_store_that_does_not_know_a_request_is_reported(store: Store) -> None:
    """Only a conditional write has a fallback."""
    store.faults.unimplemented = True
    objects = opened(store, ONCE)
    for access in (
        objects.listing,
        lambda: objects.read("latest"),
        lambda: objects.put("latest", b"x"),
        lambda: objects.replace("latest", b"x", None),
    ):
        with pytest.raises(StorageError, match="status 501"):
            access()
