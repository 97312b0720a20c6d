"""An input in a store is copied once and prepared like the folder that it is a copy of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.local_stores import SECRETS, Store, served, set_environment
from tests.data.sample_texts import TEXTS, files_of, prepared, write_jsonl
from toolkit.config.prepare import PrepareConfig
from toolkit.data.manifest import read_manifest
from toolkit.data.prepare import input_store as inputs
from toolkit.data.prepare import run, tokenise
from toolkit.data.prepare.run import output_folder
from toolkit.errors import InputError

URL = "s3://corpus/texts"
NAMES = ["a.jsonl", "b/c.jsonl", "empty.jsonl"]


@pytest.fixture
def bucket(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The corpus as a folder of a bucket, with a hidden file, and another folder whose name has the same
    prefix.
    """
    root = tmp_path / "bucket"
    shutil.copytree(corpus, root / "texts")
    (root / "texts" / "empty.jsonl").touch()
    (root / "texts" / ".hidden").write_text("no")
    write_jsonl(root / "texts-other" / "a.jsonl", ["of another folder"])
    with served(root) as store:
        store.page = 2  # a listing has several pages
        set_environment(monkeypatch, store, tmp_path / "cache")
        yield store


def of_store(output: Path, tokenizer: Path, url: str = URL) -> None:
    prepared(url, output, tokenizer)


def test_input_from_a_store_gives_the_same_folder(
    bucket: Store, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(bucket.root / "texts", tmp_path / "here", tokenizer)
    monkeypatch.setattr(inputs, "BATCH_BYTES", 5000)  # several ranges a file
    of_store(tmp_path / "there", tokenizer)
    here, there = files_of(tmp_path / "here"), files_of(tmp_path / "there")
    assert [name for name in here if here[name] != there[name]] == ["manifest.json"]  # which names the input
    assert here.keys() == there.keys()
    assert read_manifest(tmp_path / "there").origin.description == URL
    assert not (tmp_path / "there" / ".work").exists(), "nor is the copy"
    assert all(bucket.requests[f"texts/{name}"] for name in NAMES[:2])
    assert not bucket.requests["texts/.hidden"]
    assert bucket.signed == sum(bucket.requests.values())


def test_complete_copies_are_not_fetched_again(
    bucket: Store, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill during tokenisation complete copies stay, and a partial one is fetched again."""
    output = tmp_path / "data"
    with monkeypatch.context() as patch:
        patch.setattr(run, "ensure_tokenizer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            of_store(output, tokenizer)
    copies = output / ".work" / "input"
    assert (
        sorted(path.relative_to(copies).as_posix() for path in copies.rglob("*") if path.is_file()) == NAMES
    )
    (copies / "a.jsonl").rename(copies / ".a.jsonl.fetching")
    bucket.forget()
    of_store(output, tokenizer)
    assert bucket.requests["texts/a.jsonl"]
    assert not bucket.requests["texts/b/c.jsonl"]
    prepared(bucket.root / "texts", tmp_path / "here", tokenizer)
    assert files_of(output)["train-00000.bin"] == files_of(tmp_path / "here")["train-00000.bin"]


def interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_finished_preparation_from_a_store_refuses_changed_input(
    bucket: Store, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_store(tmp_path / "data", tokenizer)
    made = files_of(tmp_path / "data")
    bucket.forget()
    monkeypatch.setattr(tokenise, "start_tokenising", None)
    of_store(tmp_path / "data", tokenizer)
    assert not bucket.requests["texts/a.jsonl"]
    file = bucket.root / "texts" / "a.jsonl"
    later = (tmp_path / "data" / "manifest.json").stat().st_mtime + 5
    os.utime(file, (later, later))  # uploaded again: the content is compared, not the time
    of_store(tmp_path / "data", tokenizer)
    assert bucket.requests["texts/a.jsonl"]
    file.write_bytes(file.read_bytes().replace(b"river", b"RIVER"))
    os.utime(file, (later + 1, later + 1))
    with pytest.raises(InputError, match=r"a\.jsonl has different content"):
        of_store(tmp_path / "data", tokenizer)
    file.unlink()
    with pytest.raises(InputError, match=r"a\.jsonl was removed"):
        of_store(tmp_path / "data", tokenizer)
    assert files_of(tmp_path / "data") == made


def test_a_file_that_changes_while_it_is_prepared_is_fetched_and_read_again(
    bucket: Store, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run.merge, "plan_shards", interrupted)
        with pytest.raises(KeyboardInterrupt):
            of_store(tmp_path / "data", tokenizer)
    write_jsonl(bucket.root / "texts" / "a.jsonl", TEXTS[:3])
    bucket.forget()
    of_store(tmp_path / "data", tokenizer)
    assert bucket.requests["texts/a.jsonl"]
    assert not bucket.requests["texts/b/c.jsonl"]
    of_store(tmp_path / "fresh", tokenizer)
    assert files_of(tmp_path / "data") == files_of(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("s3://corpus/absent", "input=s3://corpus/absent: no file below it"),
        ("s3://other/texts", "no such bucket"),
        ("https://127.0.0.1/texts", "cannot list their files"),
        ("s3://name:secret@corpus/texts", "a URL has no user"),
        ("ftp://corpus/texts", "a folder is a path, or a URL of a supported store"),
    ],
)
def test_unusable_inputs_in_a_store_are_rejected(
    bucket: Store, tokenizer: Path, tmp_path: Path, url: str, seen: str
) -> None:
    with pytest.raises(InputError) as caught:
        of_store(tmp_path / "data", tokenizer, url)
    text = str(caught.value)
    assert seen in text
    assert all(problem.key == "input" for problem in caught.value.problems)
    assert not any(secret in text for secret in (*SECRETS.values(), "name:secret", "data.path"))
    assert not (tmp_path / "data").exists()


def test_output_folder_is_named_after_the_url() -> None:
    assert output_folder(PrepareConfig(input=URL)) == Path("data/texts")
