"""verify reports every kind of silent corruption; undetectable damage is asserted too.

pytest tests/checkpoint/test_verify.py
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.fabricate import overwrite_element, read_element, write_rank_files
from tests.checkpoint.huggingface_folders import converted, model_of, tiny
from tests.checkpoint.layouts import LAYOUTS, save, shards_of
from toolkit.checkpoint import manifest, tile_reader
from toolkit.checkpoint.shard import EXP_AVG, EXP_AVG_SQ, MASTER, WEIGHT, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.verify import verify, verify_source
from toolkit.errors import CheckpointError

STATES = (WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small tiles, so that a tensor has several."""
    monkeypatch.setattr(tile_reader, "TILE_BYTES", 256)


def sound(names: tuple[str, ...] = ("w", "norm")) -> dict[TensorKey, torch.Tensor]:
    """A bf16 run with Adam: ``w`` [12, 10], ``norm`` [12]."""
    named: dict[TensorKey, torch.Tensor] = {}
    for number, name in enumerate(names):
        generator = torch.Generator().manual_seed(number)
        master, average = (
            torch.randn((12,) if name == "norm" else (12, 10), generator=generator) for _ in range(2)
        )
        of_name = {WEIGHT: master.bfloat16(), MASTER: master, EXP_AVG: average, EXP_AVG_SQ: average**2}
        named |= {TensorKey(state, name): tensor for state, tensor in of_name.items()}
    return named


def of_vendor(folder: Path) -> CheckpointSource:
    return write_rank_files(folder, sound(), replicated=("norm",))


def describe_findings(source: CheckpointSource, workers: int = 2) -> list[str]:
    return [str(finding) for finding in verify_source(source, workers=workers)]


def test_intact_checkpoint_has_no_findings(tmp_path: Path) -> None:
    named = sound()
    for source in (
        of_vendor(tmp_path / "vendor"),
        write_rank_files(tmp_path / "transposed", named, replicated=("norm",), transposed=("w",)),
        open_source(save(tmp_path / "native", 1, shards_of(named, LAYOUTS["columns"], 3))),
    ):
        progress: list[tuple[int, int]] = []
        assert (
            verify_source(
                source, advance=lambda done, total, progress=progress: progress.append((done, total))
            )
            == []
        )
        copies = sum(piece.end - piece.begin for of_key in source.catalog.copies.values() for piece in of_key)
        assert (
            {total for _, total in progress}
            == {sum(done for done, _ in progress)}
            == {sum(t.nbytes for t in named.values()) + copies}
        )


# ---- values


@pytest.mark.parametrize("transposed", [(), ("w",)])
def test_verify_detects_weight_that_differs_from_master(tmp_path: Path, transposed: tuple[str, ...]) -> None:
    """megatron-core 0.16.1 wrote this with several buckets: another parameter's optimizer state."""
    source = write_rank_files(tmp_path / "a", sound(), replicated=("norm",), transposed=transposed)
    overwrite_element(source, TensorKey(MASTER, "w"), 77, struct.pack("<f", 3.0))
    overwrite_element(source, TensorKey(WEIGHT, "w"), 119, b"\x00\x3f")
    assert describe_findings(source) == [
        "weight:w: 2 of 120 values are not their master weights, cast to bfloat16; the first is in rank1.pt"
    ]


def test_verify_detects_other_parameters_state(tmp_path: Path) -> None:
    named = sound(("a", "b", "c"))
    for state in (MASTER, EXP_AVG, EXP_AVG_SQ):
        named[TensorKey(state, "a")], named[TensorKey(state, "b")] = (
            named[TensorKey(state, "b")],
            named[TensorKey(state, "a")],
        )
    found = verify_source(write_rank_files(tmp_path / "a", named))
    assert [finding.where for finding in found] == ["weight:a", "weight:b"]


@pytest.mark.parametrize(
    ("state", "raw", "seen"),
    [
        (EXP_AVG_SQ, struct.pack("<f", -1e-30), "an average of squares is negative, in rank1.pt"),
        (EXP_AVG_SQ, struct.pack("<f", float("nan")), "1 values are not finite, in rank1.pt"),
        (EXP_AVG, struct.pack("<f", float("inf")), "1 values are not finite, in rank1.pt"),
        (WEIGHT, b"\x80\x7f", "1 values are not finite, in rank1.pt"),
    ],
)
def test_verify_detects_nonfinite_and_negative_values(
    tmp_path: Path, state: str, raw: bytes, seen: str
) -> None:
    source = of_vendor(tmp_path / "a")
    overwrite_element(source, TensorKey(state, "w"), 100, raw)
    assert describe_findings(source) == [f"{state}:w: {seen}"]


def test_verify_detects_differing_replica(tmp_path: Path) -> None:
    for transposed in ((), ("w",)):
        source = write_rank_files(
            tmp_path / f"{len(transposed)}", sound(), ranks=3, replicated=("w", "norm"), transposed=transposed
        )
        overwrite_element(source, TensorKey(EXP_AVG, "norm"), 5, struct.pack("<f", 1.25), copy=True)
        overwrite_element(source, TensorKey(WEIGHT, "w"), 11, b"\x00\x3e", copy=True)
        assert describe_findings(source) == [
            "weight:w: 1 of 120 values differ between rank0.pt and rank1.pt",
            "exp_avg:norm: 1 of 12 values differ between rank0.pt and rank1.pt",
        ]


def test_verify_reports_file_of_invalid_copy(tmp_path: Path) -> None:
    source = of_vendor(tmp_path / "a")
    overwrite_element(source, TensorKey(EXP_AVG_SQ, "norm"), 5, struct.pack("<f", -1.0), copy=True)
    assert describe_findings(source) == ["exp_avg_sq:norm: an average of squares is negative, in rank1.pt"]


def test_verify_detects_differing_tied_tensors(tmp_path: Path) -> None:
    shape = tiny("llama", tie_word_embeddings=True)
    model_of(shape).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    assert verify(tmp_path) == []
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, file, {"format": "pt"})
    assert [str(finding) for finding in verify(tmp_path)] == [
        "weight:model.embed_tokens.weight: 1 of 2144 values differ between model.safetensors and "
        "model.safetensors"
    ]


# ---- steps


@pytest.mark.parametrize(
    ("scalars", "seen"),
    [
        ({"step": 1, "optimizer_step": 1}, []),
        ({"step": 2}, ["steps disagree: the checkpoint is of step 1, its scalars are of step 2"]),
        ({"step": 1, "optimizer_step": 2}, ["steps disagree: the optimizer counts 2 of 1"]),
    ],
)
def test_verify_detects_disagreeing_steps(
    tmp_path: Path, scalars: dict[str, object], seen: list[str]
) -> None:
    assert [
        finding.what for finding in verify_source(write_rank_files(tmp_path / "a", sound(), scalars=scalars))
    ] == seen
    folder = save(tmp_path / "native", 1, shards_of(sound(), LAYOUTS["flat"], 2), scalars=scalars)
    assert [finding.what.split(",")[0] for finding in verify(folder)] == [
        sentence.split(",")[0] for sentence in seen
    ]


def test_verify_detects_wrong_folder_step(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, shards_of(sound(), LAYOUTS["flat"], 2))
    folder.rename(tmp_path / "step-00000005")
    assert [finding.what for finding in verify(tmp_path / "step-00000005")] == [
        "steps disagree: the checkpoint is of step 1, its scalars are of step 1, its folder's name is of "
        "step 5"
    ]


# ---- places


def test_verify_detects_missing_and_duplicate_elements(tmp_path: Path) -> None:
    source = of_vendor(tmp_path / "a")
    key, other, third = TensorKey(WEIGHT, "w"), TensorKey(EXP_AVG, "w"), TensorKey(MASTER, "w")
    pieces = dict(source.catalog.pieces)
    pieces[key] = pieces[key][:1]
    pieces[other] = (*pieces[other], pieces[other][0])
    pieces[third] = ()
    assert describe_findings(replace(source, catalog=replace(source.catalog, pieces=pieces))) == [
        "weight:w: 60 of 120 elements are stored",
        "master:w: no file contains it",
        "exp_avg:w: rank0.pt and rank0.pt both contain Box(offset=(0, 0), shape=(6, 10))",
    ]


def test_verify_detects_different_shapes(tmp_path: Path) -> None:
    named = {TensorKey(WEIGHT, "w"): torch.ones(4, 5), TensorKey(MASTER, "w"): torch.ones(4, 6)}
    assert describe_findings(write_rank_files(tmp_path / "a", named)) == [
        "weight:w: its states differ in shape: weight (4, 5), master (4, 6)"
    ]


def test_verify_detects_truncated_and_missing_files(tmp_path: Path) -> None:
    source = of_vendor(tmp_path / "a")
    (source.folder / "rank1.pt").write_bytes((source.folder / "rank1.pt").read_bytes()[:1000])
    assert {finding.where for finding in verify_source(source)} == {"rank1.pt"}
    (source.folder / "rank1.pt").unlink()
    assert {finding.where for finding in verify_source(source)} == {"rank1.pt"}
    model_of(tiny("llama")).save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    [finding] = verify(tmp_path / "hub")
    assert finding.where == "model.safetensors"
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        verify(tmp_path)


def test_findings_are_independent_of_threads(tmp_path: Path) -> None:
    source = write_rank_files(tmp_path / "a", sound(tuple("abcdefgh")))
    for number, name in enumerate("abcdefgh"):
        overwrite_element(source, TensorKey(MASTER, name), 13 * number, struct.pack("<f", 100.0))
    assert describe_findings(source, 1) == describe_findings(source, 5)
    assert len(describe_findings(source, 1)) == 8


# ---- one flipped bit: what is found with hashes, and what without


def flipped(source: CheckpointSource, key: TensorKey, element: int) -> int:
    """Return how many flipped bits of one element are detected, one at a time."""
    raw = read_element(source, key, element)
    found = 0
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        piece = overwrite_element(source, key, element, bytes(changed))
        findings = verify_source(source, workers=1)
        assert all(finding.where in (piece.file, str(key), f"weight:{key.name}") for finding in findings)
        found += bool(findings)
    overwrite_element(source, key, element, raw)
    return found


def test_verify_flipped_bits(tmp_path: Path) -> None:
    """With hashes or checksums every bit is detected. Without, in bf16 with Adam: all bits of a weight,
    the upper half of its master, the sign of a second moment, and the bit that makes a number of 1..2
    infinite.
    """
    named = {TensorKey(state, "w"): torch.full((4, 3), 1.0) for state in STATES}
    named[TensorKey(WEIGHT, "w")] = named[TensorKey(WEIGHT, "w")].bfloat16()
    of_vendor = write_rank_files(tmp_path / "vendor", named)
    native = open_source(save(tmp_path / "native", 1, shards_of(named, LAYOUTS["flat"], 2)))
    bits = {WEIGHT: 16, MASTER: 32, EXP_AVG: 32, EXP_AVG_SQ: 32}
    assert {state: flipped(of_vendor, TensorKey(state, "w"), 7) for state in STATES} == {
        WEIGHT: 16,
        MASTER: 16,
        EXP_AVG: 1,
        EXP_AVG_SQ: 2,
    }
    archives = write_rank_files(tmp_path / "archives", named, checksums=True)
    assert {state: flipped(archives, TensorKey(state, "w"), 7) for state in STATES} == bits
    for state, count in bits.items():
        piece = native.catalog.pieces[TensorKey(state, "w")][0]
        file = native.folder / piece.file
        original = file.read_bytes()
        for bit in range(count):
            data = bytearray(original)
            data[piece.begin + bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)
            [finding] = verify_source(native)
            assert finding.where == piece.file
            assert "differs from what was written" in finding.what
        file.write_bytes(original)
    assert verify_source(native) == []


def test_a_target_of_another_format_is_verified_by_its_manifest(tmp_path: Path) -> None:
    """Only a hash detects a first moment's lowest bit."""
    folder = converted(tmp_path, "llama")
    assert verify(folder) == []
    found = manifest.load(folder, manifest.FOREIGN_NAME)
    piece = next(piece for piece in found.pieces if piece.key.state == EXP_AVG)
    with (folder / piece.file).open("r+b") as file:
        file.seek(piece.begin)
        low = file.read(1)[0]
        file.seek(piece.begin)
        file.write(bytes([low ^ 1]))
    assert [finding.where for finding in verify(folder)] == [piece.file]
    (folder / manifest.FOREIGN_NAME).unlink()
    assert verify(folder) == [], "the control: without hashes it is a possible value"
    state = json.loads((folder / "optimizer" / "state.json").read_text())
    (folder / "optimizer" / "state.json").write_text(json.dumps(state | {"format_version": 2}))
    assert [finding.where for finding in verify(folder)] == ["optimizer/state.json"]


def test_empty_tensors_are_valid(tmp_path: Path) -> None:
    source = write_rank_files(
        tmp_path / "a",
        {TensorKey(WEIGHT, "w"): torch.ones(4, 5), TensorKey(WEIGHT, "none"): torch.ones(0, 5)},
    )
    assert source.catalog.tensors[TensorKey(WEIGHT, "none")] == TensorInfo("float32", (0, 5))
    assert describe_findings(source) == []
