"""Names in a checkpoint's manifest, index, pickle or pointer stay in its folder: every reader rejects hostile
names.

pytest tests/checkpoint/test_paths.py
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.tiny_run import STEP, tiny_checkpoint, tiny_shape
from tests.hostile import HOSTILE
from toolkit.checkpoint import manifest
from toolkit.checkpoint.formats.dcp.metadata import METADATA
from toolkit.checkpoint.formats.deepspeed import target as deepspeed_target
from toolkit.checkpoint.formats.huggingface import target as huggingface_target
from toolkit.checkpoint.formats.megatron import target as megatron_target
from toolkit.checkpoint.formats.universal import target as universal_target
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint_folder import POINTER, newest_checkpoint
from toolkit.config.reshard import TargetConfig, TargetFormat
from toolkit.errors import CheckpointError, InputError

VENDORS: dict[str, Callable[..., Any]] = {
    "deepspeed": deepspeed_target.lay_out,
    "universal": universal_target.lay_out,
    "megatron": megatron_target.lay_out,
    "huggingface": huggingface_target.lay_out,
}
TRACKERS = {
    "deepspeed": "latest",
    "universal": "latest_universal",
    "megatron": "latest_checkpointed_iteration.txt",
}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("native") / "checkpoints")


@pytest.fixture(scope="module")
def vendors(native: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints without this toolkit's manifest, as each vendor writes them. Tests copy them."""
    source, folders = open_source(native), {}
    for kind, lay_out in VENDORS.items():
        folders[kind] = tmp_path_factory.mktemp("vendors") / kind
        Conversion(source, lay_out(source, TargetConfig(format=TargetFormat[kind])), folders[kind]).run()
        (folders[kind] / manifest.FOREIGN_NAME).unlink()
    return folders


def folder_in(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.is_dir())


def sign(content: dict[str, Any]) -> dict[str, Any]:
    """Recompute the hash, as an attacker can: it needs no key."""
    content.pop("content_hash", None)
    return {**content, "content_hash": manifest._content_hash(content)}


@pytest.mark.parametrize("where", ["files", "entries", "copies"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_manifest_cannot_name_outside_files(kind: str, where: str, native: Path, tmp_path: Path) -> None:
    folder = tmp_path / native.name
    folder.mkdir()
    content = json.loads((native / manifest.NAME).read_text())
    content["copies"] = content["entries"][:1]
    content[where] = [{**content[where][0], "file": HOSTILE[kind]}, *content[where][1:]]
    (folder / manifest.NAME).write_text(json.dumps(sign(content)))
    with pytest.raises(CheckpointError, match=r"invalid entry.*the path"):
        open_source(folder)


@pytest.mark.parametrize(
    "kind", [kind for kind in HOSTILE if kind != "absolute"]
)  # resume=PATH writes an absolute path
def test_latest_cannot_name_outside_folder(kind: str, native: Path, tmp_path: Path) -> None:
    """A relative name of an outside checkpoint is treated like a missing one."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "outside").symlink_to(native)
    (tmp_path / "checkpoints" / POINTER).write_text(HOSTILE[kind].encode("utf-8", "replace").decode())
    assert newest_checkpoint(tmp_path / "checkpoints") is None


def test_latest_does_not_follow_outside_links(native: Path, tmp_path: Path) -> None:
    (tmp_path / native.name).symlink_to(native)
    (tmp_path / POINTER).write_text(native.name)
    with pytest.raises(CheckpointError, match="is a link to"):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize("vendor_kind", TRACKERS)
@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind not in ("half a surrogate pair", "empty")])
def test_tracker_cannot_name_outside_folder(
    kind: str, vendor_kind: str, vendors: dict[str, Path], tmp_path: Path
) -> None:
    """The outside folder is a checkpoint, so only the check of its name prevents reading it."""
    outside = shutil.copytree(vendors[vendor_kind], tmp_path / "outside")
    tag = folder_in(outside)
    here = tmp_path / "here"
    here.mkdir()
    name = {"absolute": str(tag), "parent": f"../outside/{tag.name}"}.get(kind, HOSTILE[kind])
    (here / TRACKERS[vendor_kind]).write_text(name)
    if (kind, vendor_kind) != ("absolute", "deepspeed"):  # resume=PATH writes an absolute path to `latest`
        with pytest.raises(CheckpointError, match="the path"):
            open_source(here, tiny_shape())
    (here / TRACKERS[vendor_kind]).write_text(tag.name if vendor_kind != "megatron" else str(STEP))
    (here / tag.name).symlink_to(tag)
    with pytest.raises(CheckpointError, match="is a link to"):
        open_source(here, tiny_shape())


@pytest.mark.parametrize("vendor_kind", VENDORS)
def test_vendor_checkpoint_with_outside_link_is_rejected(
    vendor_kind: str, vendors: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(vendors[vendor_kind], tmp_path / "saved")
    open_source(folder, tiny_shape())
    victim = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    victim.rename(tmp_path / "elsewhere")
    victim.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link to"):
        open_source(folder, tiny_shape())


def test_native_checkpoint_with_outside_link_is_rejected(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "checkpoints")
    shard = next(folder.glob("*.safetensors"))
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link to"):
        open_source(folder)


@pytest.mark.parametrize("where", ["index", "optimizer"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_hugging_face_index_cannot_name_outside_files(
    kind: str, where: str, vendors: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(vendors["huggingface"], tmp_path / "saved")
    if where == "index":
        (folder / "model.safetensors").rename(folder / "other.safetensors")
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "other.safetensors", "b": HOSTILE[kind]}})
        )
    else:
        (folder / "optimizer").mkdir(exist_ok=True)
        (folder / "optimizer" / "state.json").write_text(
            json.dumps(
                {
                    "format": "toolkit-optimizer",
                    "format_version": 1,
                    "scalars": {},
                    "states": {"exp_avg": [HOSTILE[kind]]},
                }
            )
        )
    with pytest.raises(CheckpointError, match=r"names? the file"):
        open_source(folder)


@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if kind != "half a surrogate pair"])
def test_dcp_metadata_cannot_name_outside_files(kind: str, vendors: dict[str, Path], tmp_path: Path) -> None:
    folder = next(
        path for path in shutil.copytree(vendors["megatron"], tmp_path / "saved").iterdir() if path.is_dir()
    )
    name = HOSTILE[kind]
    metadata = pickle.loads((folder / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        object.__setattr__(info, "relative_path", name)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="the path"):
        open_source(folder, tiny_shape())


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in HOSTILE
        if kind
        not in (
            "half a surrogate pair",
            "empty",
            "drive letter",
            "drive letter alone",
            "not normal",
            "current folder",
        )
    ],
)
def test_universal_parameter_cannot_name_outside_files(
    kind: str, vendors: dict[str, Path], tmp_path: Path
) -> None:
    folder = next(
        path for path in shutil.copytree(vendors["universal"], tmp_path / "saved").iterdir() if path.is_dir()
    )
    for path in folder.glob("*_model_states.pt"):
        content = torch.load(path, weights_only=False)
        content["param_shapes"][0][HOSTILE[kind]] = torch.Size([1])
        torch.save(content, path)
    with pytest.raises(CheckpointError, match="the path"):
        open_source(folder, tiny_shape())


def test_export_does_not_copy_linked_tokenizer(native: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="is a link to"):
        huggingface_target.export(open_source(native), tmp_path / "export", tokenizer=tokenizer)
    assert not (tmp_path / "export").exists()
