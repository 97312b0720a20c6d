"""File names from outside stay in their folder.

pytest tests/test_paths.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import HOSTILE
from toolkit.paths import UnsafePath, check_links, inside, relative_name


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_name_is_rejected(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsafePath):
        relative_name(HOSTILE[kind])
    with pytest.raises(UnsafePath):
        inside(tmp_path, HOSTILE[kind])


@pytest.mark.parametrize("name", [None, 3, ["a"], {"a": 1}, b"a"])
def test_non_text_name_is_rejected(name: object) -> None:
    with pytest.raises(UnsafePath, match="not text"):
        relative_name(name)


@pytest.mark.parametrize(
    "name", ["a", "a/b.bin", "..a", "a..b/c", "déjà vu.txt", "a b", "a" * 255, "model.layers.0.weight"]
)
def test_ordinary_name_is_accepted(name: str, tmp_path: Path) -> None:
    assert relative_name(name) == name
    assert inside(tmp_path, name) == tmp_path / name


def test_the_message_is_short_and_names_what_was_seen(tmp_path: Path) -> None:
    with pytest.raises(UnsafePath) as caught:
        relative_name("a" * 100_000)
    assert len(str(caught.value)) < 200
    with pytest.raises(UnsafePath, match=r"'\.\./x' leads out of its folder"):
        relative_name("../x")


def test_link_must_stay_in_folder(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "folder").mkdir(parents=True)
    outside.mkdir()
    (outside / "file").touch()
    (root / "folder" / "file").touch()
    (root / "good").symlink_to("folder/file")
    assert inside(root, "good") == root / "good"
    check_links(root)
    (root / "bad").symlink_to(outside / "file")
    (root / "bad folder").symlink_to(outside)
    for name in ("bad", "bad folder", "bad folder/file", "bad folder/new"):
        with pytest.raises(UnsafePath, match="is a link to"):
            inside(root, name)
    with pytest.raises(UnsafePath, match="is a link to"):
        check_links(root)
    (tmp_path / "alias").symlink_to(root)  # the folder itself may be a link: the user named it
    assert inside(tmp_path / "alias", "good") == tmp_path / "alias" / "good"


def test_hub_snapshot_may_link_to_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").touch()
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    check_links(snapshot)
    (snapshot / "config.json").symlink_to("../../../elsewhere")
    with pytest.raises(UnsafePath, match=r"config\.json"):
        check_links(snapshot)
