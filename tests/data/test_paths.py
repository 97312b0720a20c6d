"""Names in data folders, manifests and listings stay in their folder: readers refuse every hostile name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from tests.data.data_folders import make_folder
from tests.data.local_stores import served
from tests.data.test_records import make as make_records
from tests.hostile import HOSTILE
from toolkit.config.data import DatasetConfig
from toolkit.config.prepare import PrepareConfig
from toolkit.data.dataset import source
from toolkit.data.digest import hash_file
from toolkit.data.manifest import read_manifest
from toolkit.data.manifest_file import MANIFEST_NAME, write_manifest_file
from toolkit.data.prepare import input_store as store
from toolkit.data.records.reader import open_records
from toolkit.data.tokens import tokenizer
from toolkit.data.tokens.token_array import open_split, verify_tokens
from toolkit.errors import InputError
from toolkit.progress import Progress
from toolkit.remote.storage import StoredFile, open_folder

Change = Callable[[dict[str, Any], Any], None]


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / MANIFEST_NAME).read_text())
    change(content)
    write_manifest_file(folder, content)


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def _shard(content: dict[str, Any], name: Any) -> None:
    content["splits"]["train"]["shards"][0]["name"] = name


def _tokenizer(content: dict[str, Any], name: Any) -> None:
    content["tokenizer"]["folder"] = name


def _hash(content: dict[str, Any], name: Any) -> None:
    content["tokenizer"]["hash"] = name


def _file(content: dict[str, Any], name: Any) -> None:
    content["files"] = {name: {"bytes": 1, "xxh3_128": "0" * 32}}


def _root(content: dict[str, Any], name: Any) -> None:
    content["root"] = name


FIELDS: dict[str, Change] = {
    "shard": _shard,
    "tokenizer folder": _tokenizer,
    "tokenizer hash": _hash,
    "file": _file,
    "root": _root,
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_manifest_that_names_something_outside_is_refused(kind: str, field: str, tmp_path: Path) -> None:
    make_folder(tmp_path / "data", {"train": [np.arange(100)]})
    rewrite(tmp_path / "data", lambda content: FIELDS[field](content, HOSTILE[kind]))
    with pytest.raises(InputError, match="every field of its format"):
        read_manifest(tmp_path / "data")


@pytest.mark.parametrize("field", ["tokenizer folder", "tokenizer hash"])
def test_a_remote_manifest_writes_nothing_outside_the_cache(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that the manifest points to is served with the right hash: only the check of its name
    rejects it.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_folder(tmp_path / "served" / "data", {"train": [np.arange(100)]})
    payload = tmp_path / "served" / "data" / "tokenizer" / "tokenizer.json"
    victim = tmp_path / "home"
    victim.mkdir()

    found = hash_file(payload)

    def attack(content: dict[str, Any]) -> None:
        FIELDS[field](content, str(victim))
        content["files"] = {
            f"{content['tokenizer']['folder']}/tokenizer.json": {
                "bytes": found.bytes,
                "xxh3_128": found.xxh3_128,
            }
        }

    rewrite(tmp_path / "served" / "data", attack)
    # An attacker's HTTP server answers every request with the payload.
    copy = tmp_path / "served" / "data" / str(victim).lstrip("/")
    copy.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).write_bytes(payload.with_name(name).read_bytes())
    before = files_below(tmp_path)
    with served(tmp_path / "served") as server, pytest.raises(InputError, match="every field of its format"):
        read_manifest(f"{server.http}/data")
    assert files_below(tmp_path) == before


@pytest.mark.parametrize(
    "name", ["train-00000.bin", "train-00000.idx", "tokenizer/tokenizer.json", "tokenizer"]
)
def test_a_link_out_of_a_data_folder_is_refused(name: str, tmp_path: Path) -> None:
    make_folder(tmp_path / "data", {"train": [np.arange(100)]})
    (tmp_path / "data" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "data" / name).symlink_to(tmp_path / "elsewhere")
    for read in (
        lambda: open_split(tmp_path / "data", "train"),
        lambda: verify_tokens(tmp_path / "data", Progress.silent()),
    ):
        with pytest.raises(InputError, match="is a link to"):
            read()


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_name_below_a_local_folder_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lie in it"):
        open_folder(tmp_path).read_bytes(HOSTILE[kind])


@pytest.mark.parametrize("kind", [*HOSTILE, "link"])
def test_records_stay_in_their_folder(kind: str, tmp_path: Path) -> None:
    make_records(tmp_path / "data")
    shard = next((tmp_path / "data").glob("*.records"))
    if kind == "link":
        shard.rename(tmp_path / "elsewhere")
        shard.symlink_to(tmp_path / "elsewhere")
    else:
        rewrite(tmp_path / "data", lambda content: _shard(content, HOSTILE[kind]))
    with pytest.raises(InputError, match="is a link to" if kind == "link" else "every field of its format"):
        open_records(tmp_path / "data", "train")


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind != "half a surrogate pair"])
def test_a_listing_of_a_store_stays_in_its_folder(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Folder:
        def listing(self) -> list[StoredFile]:
            return [StoredFile(HOSTILE[kind], 3, 0)]

    monkeypatch.setattr(store, "_folder", lambda place: Folder())
    monkeypatch.setattr(store, "is_hidden", lambda path: False)
    with pytest.raises(InputError, match="rename it in the store"):
        store.list_store(PrepareConfig(input="s3://bucket/texts"), tmp_path)


@pytest.mark.parametrize("where", ["data file", "split", "link"])
@pytest.mark.parametrize("kind", ["absolute", "parent", "NUL", "long name", "drive letter"])
def test_a_saved_dataset_stays_in_its_folder(kind: str, where: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(str(folder))
    state = folder / "train" / "state.json"
    if where == "data file":
        state.write_text(
            json.dumps({**json.loads(state.read_text()), "_data_files": [{"filename": HOSTILE[kind]}]})
        )
    elif where == "split":
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", HOSTILE[kind]]}))
    else:
        arrow = next((folder / "train").glob("*.arrow"))
        arrow.rename(tmp_path / "elsewhere")
        arrow.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="lie in its folder"):
        source.open_source(DatasetConfig(path=str(folder), text=["text"])).digests("train")


def test_a_tokenizer_is_not_copied_through_a_link(tmp_path: Path) -> None:
    """A tokenizer whose chat template links to another file of the user must not be copied and published."""
    (tmp_path / "secret").write_text("key")
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="is a link to"):
        tokenizer.install_tokenizer(
            str(folder), None, tmp_path / "out", key="tokenizer.path", end_key="tokenizer.end_of_text"
        )
    assert "key" not in {path.read_text() for path in files_below(tmp_path / "out")}
