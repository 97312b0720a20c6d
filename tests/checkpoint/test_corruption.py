"""Damaged and foreign checkpoints are rejected with their file, and the previous checkpoint is suggested.

pytest tests/checkpoint/test_corruption.py
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.layouts import LAYOUTS, NAMESPACE, save, shards_of, whole
from tests.damage import flip_byte
from toolkit.checkpoint import manifest, open_reader
from toolkit.checkpoint.shard import EXP_AVG_SQ, MASTER, WEIGHT, TensorKey
from toolkit.checkpoint.verify import verify
from toolkit.errors import CheckpointError

PART = "part-00001.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 1, 2 and 3."""
    exact = torch.randn(40, 30)
    named = {
        TensorKey(WEIGHT, "w"): exact.bfloat16(),
        TensorKey(MASTER, "w"): exact,
        TensorKey(EXP_AVG_SQ, "w"): exact**2,
    }
    for step in (1, 2, 3):
        save(tmp_path / "checkpoints", step, shards_of(named, LAYOUTS["flat"], 2), attempt=step)
    return tmp_path


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def rewrite(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        change(content)
        (folder / "manifest.json").write_text(json.dumps(content))

    return apply


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "flipped byte": (lambda folder: flip_byte(folder / PART, -5), PART, "differs from what was written"),
    "truncated file": (lambda folder: truncate(folder / PART), PART, "bytes"),
    "missing file": (lambda folder: (folder / PART).unlink(), PART, "is missing"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json", "is missing"),
    "empty manifest": (
        lambda folder: (folder / "manifest.json").write_bytes(b""),
        "manifest.json",
        "is not JSON",
    ),
    "half a manifest": (lambda folder: truncate(folder / "manifest.json"), "manifest.json", "is not JSON"),
    "binary manifest": (
        lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\x00"),
        "manifest.json",
        "is not JSON",
    ),
    "foreign manifest": (
        lambda folder: (folder / "manifest.json").write_text('{"format": 3}'),
        "manifest.json",
        "not a manifest that this",
    ),
    "a list": (
        lambda folder: (folder / "manifest.json").write_text("[1]"),
        "manifest.json",
        "not a manifest that this",
    ),
    "another version": (
        rewrite(lambda content: content.update(format_version=2)),
        "manifest.json",
        "format_version=2",
    ),
    "changed manifest": (rewrite(lambda content: content.update(step=7)), "manifest.json", "content_hash"),
    "manifest without its hash": (
        rewrite(lambda content: content.pop("content_hash")),
        "manifest.json",
        "content_hash",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_reported_with_previous_checkpoint(run: Path, name: str) -> None:
    damage, file, seen = DAMAGES[name]
    folder = run / "checkpoints" / "step-00000003"
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        whole(open_reader(folder))
    [problem] = caught.value.problems
    assert problem.key == str(folder / file)
    assert file in problem.seen
    assert seen in problem.seen
    assert problem.remedy.endswith(f"resume={run / 'checkpoints' / 'step-00000002'}")
    assert next(iter(verify(folder))).where == file
    whole(open_reader(run / "checkpoints" / "step-00000002"))
    with pytest.raises(
        CheckpointError, match="step-00000003"
    ):  # an error about the newest checkpoint is always reported
        whole(open_reader(run))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ESTALE, OSError),
        (errno.ETIMEDOUT, TimeoutError),
        (errno.EIO, OSError),
        (errno.ENOTDIR, CheckpointError),
        (errno.EACCES, CheckpointError),
    ],
)
def test_error_of_the_file_system_is_no_damage_unless_it_is_a_property_of_the_file(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    reader = open_reader(run)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(kind, match=r"step-\d{8}/part-\d{5}\.safetensors"):
        whole(reader)


def test_only_complete_checkpoints_are_suggested(run: Path) -> None:
    flip_byte(run / "checkpoints" / "step-00000003" / PART, -5)
    truncate(run / "checkpoints" / "step-00000002" / PART)
    with pytest.raises(CheckpointError, match=r"resume=.*step-00000001"):
        whole(open_reader(run))
    (run / "checkpoints" / "step-00000001" / PART).unlink()
    with pytest.raises(CheckpointError, match="no other complete checkpoint"):
        whole(open_reader(run))


def test_invalid_manifest_entry_is_rejected(run: Path) -> None:
    """A manifest with a correct hash is still validated: it might name files outside the folder."""
    folder = run / "checkpoints" / "step-00000003"
    for key, value in (
        ("file", "../step-00000002/part-00000.safetensors"),
        ("dtype", "complex7"),
        ("bytes", [0, 7]),
        ("xxh3_128", []),
    ):
        content = json.loads((folder / "manifest.json").read_text())
        content["entries"][0][key] = value
        del content["content_hash"]
        content["content_hash"] = manifest._content_hash(content)
        (folder / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match="an invalid entry"):
            open_reader(folder)


def test_other_namespace_is_rejected(run: Path) -> None:
    assert open_reader(run, namespace=NAMESPACE).namespace == NAMESPACE
    with pytest.raises(CheckpointError, match=r"namespace=test/1[\s\S]*llama/1"):
        open_reader(run, namespace="llama/1")


def test_verify_detects_every_flipped_byte(run: Path) -> None:
    """Bytes of headers, data and manifest; verify names the file."""
    folder = run / "checkpoints" / "step-00000003"
    for file in ("part-00000.safetensors", "manifest.json"):
        original = (folder / file).read_bytes()
        header = int.from_bytes(original[:8], "little") if file != "manifest.json" else 0
        for at in (*range(0, header, 3), *range(header, len(original), max(1, len(original) // 40))):
            flip_byte(folder / file, at)
            if file == "manifest.json" and _same_json(original, (folder / file).read_bytes()):
                (folder / file).write_bytes(original)
                continue
            assert {finding.where for finding in verify(folder)} == {file}, at
            (folder / file).write_bytes(original)
    assert verify(folder) == []


def _same_json(a: bytes, b: bytes) -> bool:
    try:
        return bool(json.loads(a) == json.loads(b))
    except ValueError:
        return False


def test_verify_detects_implausible_values(tmp_path: Path) -> None:
    exact = torch.randn(40, 30)
    sound = {
        TensorKey(WEIGHT, "w"): exact.bfloat16(),
        TensorKey(MASTER, "w"): exact,
        TensorKey(EXP_AVG_SQ, "w"): exact**2,
    }

    def found(number: int, state: str, at: int, value: float) -> list[str]:
        named = {key: tensor.clone() for key, tensor in sound.items()}
        named[TensorKey(state, "w")].view(-1)[at] = value
        return [
            str(finding)
            for finding in verify(save(tmp_path / str(number), 1, shards_of(named, LAYOUTS["columns"], 3)))
        ]

    assert found(0, WEIGHT, 3, float(sound[TensorKey(WEIGHT, "w")].view(-1)[3])) == []
    assert found(1, WEIGHT, 3, 9.5) == [
        "weight:w: 1 of 1200 values are not their master weights, cast to bfloat16; the first is in "
        "part-00001.safetensors"
    ]
    assert found(2, MASTER, 1199, float("nan"))[0].startswith("master:w: 1 values are not finite")
    assert found(3, EXP_AVG_SQ, 5, -1e-30)[0].startswith("exp_avg_sq:w: an average of squares is negative")
