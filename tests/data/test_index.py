"""Megatron's files and the manifest: round trips, and named refusal of every damage.

pytest -m full tests/data/test_index.py      # also against megatron-core itself
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.damage import flip_byte
from tests.data.data_folders import documents, make_folder
from toolkit.data.manifest import describe_manifest, read_manifest, write_manifest
from toolkit.data.manifest_file import write_manifest_file
from toolkit.data.tokens.index import HEADER, IndexFile, encode_index, token_dtype
from toolkit.data.tokens.token_array import MappedTokens, open_split, verify_tokens
from toolkit.data.tokens.writer import SplitWriter
from toolkit.errors import InputError
from toolkit.progress import Progress


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(4096, "uint16"), (65499, "uint16"), (65500, "int32"), (128_256, "int32")]
)
def test_dtype_is_megatrons(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


def test_index_layout_byte_by_byte(tmp_path: Path) -> None:
    content = encode_index(np.dtype("<u2"), np.array([3, 1, 2], dtype=np.int32))
    expected = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 3, 4)
        + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 6, 8)
    )
    assert content == expected + struct.pack("<4q", 0, 1, 2, 3)
    (tmp_path / "a.idx").write_bytes(content)
    index = IndexFile(tmp_path / "a.idx")
    assert (index.lengths.tolist(), index.pointers.tolist(), index.documents.tolist()) == (
        [3, 1, 2],
        [0, 6, 8],
        [0, 1, 2, 3],
    )
    assert index.bin_bytes == 12
    index.check_contiguous()


@pytest.mark.parametrize("vocab_size", [300, 70_000])
def test_tokens_round_trip(tmp_path: Path, vocab_size: int) -> None:
    texts = documents(40, vocab_size)
    manifest = make_folder(tmp_path / "data", {"train": texts}, vocab_size)
    row = np.concatenate(texts)
    source = open_split(tmp_path / "data", "train")
    assert (source.tokens, source.vocab_size, source.token_bytes) == (
        len(row),
        vocab_size,
        2 if vocab_size == 300 else 4,
    )
    out = np.empty((3, 20), dtype=np.int64)
    starts = np.array([0, 7, len(row) - 20])
    source.read(starts, out)
    assert np.array_equal(out, np.stack([row[start : start + 20] for start in starts]))
    index = IndexFile(manifest.folder / "train-00000.idx")
    assert index.lengths.tolist() == [len(text) for text in texts]
    assert verify_tokens(tmp_path / "data", Progress.silent()) == manifest
    assert not list(tmp_path.rglob("*.partial*"))


@given(seed=st.integers(0, 10**6), shard_bytes=st.integers(1, 400), length=st.integers(1, 60))
@settings(max_examples=12, deadline=None)
def test_windows_over_shards(
    tmp_path_factory: pytest.TempPathFactory, seed: int, shard_bytes: int, length: int
) -> None:
    """Windows equal those of the one long row, however the tokens are split into files."""
    texts = documents(12, 300, seed)
    row = np.concatenate(texts)
    folder = tmp_path_factory.mktemp("shards") / "data"
    split = make_folder(folder, {"train": texts}, shard_bytes=shard_bytes).split("train")
    assert split.tokens == len(row)
    assert split.documents == len(texts)
    assert all(shard.documents == 1 or shard.bin.bytes <= shard_bytes for shard in split.shards)
    length = min(length, len(row))
    starts = np.random.default_rng(seed).permutation(len(row) - length + 1)
    out = np.empty((len(starts), length), dtype=np.int64)
    open_split(folder, "train").read(starts, out)
    assert np.array_equal(out, np.lib.stride_tricks.sliding_window_view(row, length)[starts])


def test_reading_past_the_end_asserts(tmp_path: Path) -> None:
    make_folder(tmp_path / "data", {"train": [np.arange(10)]})
    source = open_split(tmp_path / "data", "train")
    for start in (-1, 6):
        with pytest.raises(AssertionError):
            source.read(np.array([start]), np.empty((1, 5), dtype=np.int64))


def test_a_failed_split_leaves_no_file(tmp_path: Path) -> None:
    def write() -> None:
        with SplitWriter(tmp_path, "train", np.dtype("<u2")) as writer:
            writer.add(np.arange(5))
            raise KeyError

    with pytest.raises(KeyError):
        write()
    assert list(tmp_path.iterdir()) == []


def test_data_hash_is_of_the_tokens(tmp_path: Path) -> None:
    texts = documents(5, 300)
    first = make_folder(tmp_path / "a", {"train": texts}).split("train").data_hash
    assert first == make_folder(tmp_path / "b", {"train": texts, "other": texts[:1]}).split("train").data_hash
    assert first != make_folder(tmp_path / "c", {"train": texts[::-1]}).split("train").data_hash


def test_manifest_round_trip_above_its_files(tmp_path: Path) -> None:
    manifest = make_folder(
        tmp_path / "data" / "inner", {"train": documents(5, 300), "validation": documents(2, 300)}
    )
    write_manifest(manifest, tmp_path / "data")
    assert read_manifest(tmp_path / "data") == manifest
    assert open_split(tmp_path / "data", "validation").tokens == manifest.split("validation").tokens
    text = "\n".join(describe_manifest(manifest))
    assert "5 documents" in text
    assert manifest.tokenizer.hash in text


# ---- damage: the change to the folder, and the text of the error


def flip(name: str, at: int) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        flip_byte(folder / name, at)

    return do


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-3]) and None


def set_manifest(**changes: object) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        content.update(changes)
        write_manifest_file(folder, {key: value for key, value in content.items() if value is not None})

    return do


def replace_text(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


DAMAGE = {
    "flipped token": (flip("train-00000.bin", 100), "train-00000.bin"),
    "flipped index": (flip("train-00000.idx", 40), "train-00000.idx"),
    "flipped header": (flip("train-00000.idx", 0), "train-00000.idx"),
    "truncated tokens": (cut("train-00000.bin"), "train-00000.bin"),
    "truncated index": (cut("train-00000.idx"), "train-00000.idx"),
    "missing tokens": (lambda folder: (folder / "train-00000.bin").unlink(), "train-00000.bin"),
    "missing index": (lambda folder: (folder / "train-00000.idx").unlink(), "train-00000.idx"),
    "another tokenizer": (
        lambda folder: (folder / "tokenizer/tokenizer.json").write_text("{ }") and None,
        "tokenizer.json",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer/tokenizer.json").unlink(), "tokenizer.json"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
    "no JSON": (cut("manifest.json"), "manifest.json"),
    "newer format": (set_manifest(format_version=4), "format_version=4"),
    "a list": (lambda folder: (folder / "manifest.json").write_text("[]") and None, "manifest.json"),
    "changed by hand": (
        lambda folder: replace_text(folder / "manifest.json", '"documents": 50', '"documents": 49'),
        "manifest_xxh3_128",
    ),
    "missing field": (set_manifest(origin=None), "origin"),
    "unknown dtype": (set_manifest(dtype="float7"), "float7"),
    "other dtype": (set_manifest(dtype="int32"), "int32"),
    "missing split": (set_manifest(splits={}), "split train"),
}


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, hashed: bool
) -> None:
    """Also for a split too large to hash at opening, where flipped bytes are found by ``verify``."""
    folder = tmp_path / "data"
    make_folder(folder, {"train": documents(50, 300)})
    do, named = DAMAGE[damage]
    do(folder)
    if not hashed:
        monkeypatch.setattr("toolkit.data.tokens.token_array.HASHED_AT_OPENING_BYTES", 0)
    checks = (
        [lambda: open_split(folder, "train")]
        if hashed or damage not in ("flipped token", "flipped index")
        else []
    )
    for check in [
        *checks,
        *([lambda: verify_tokens(folder, Progress.silent())] if damage != "missing split" else []),
    ]:
        with pytest.raises(InputError) as caught:
            check()
        assert named in str(caught.value)


def test_an_index_with_gaps_is_refused(tmp_path: Path) -> None:
    content = bytearray(encode_index(np.dtype("<u2"), np.array([3, 1, 2], dtype=np.int32)))
    struct.pack_into("<q", content, HEADER.size + 3 * 4 + 8, 8)
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(InputError, match="sequence 1 starts elsewhere"):
        IndexFile(tmp_path / "a.idx").check_contiguous()


def test_opening_maps_and_does_not_read(tmp_path: Path) -> None:
    """A split is mapped and not loaded, so that ranks share the page cache."""
    manifest = make_folder(tmp_path / "data", {"train": documents(5, 300)})
    source = MappedTokens(manifest, "train")
    (view,) = source.windows(np.array([1]), 3)
    assert isinstance(view, memoryview)
    assert isinstance(np.asarray(view.obj).base, np.memmap) or isinstance(view.obj, np.memmap)


MEGATRON = """
import sys
import numpy, torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
ours, theirs = sys.argv[1:]
read = IndexedDataset(ours)
texts = [numpy.asarray(read[number]) for number in range(len(read))]
for dtype in (numpy.uint16, numpy.int32):
    builder = IndexedDatasetBuilder(f"{theirs}-{dtype.__name__}.bin", dtype=dtype)
    for text in texts:
        builder.add_document(torch.from_numpy(text.astype(numpy.int64)), [len(text)])
    builder.finalize(f"{theirs}-{dtype.__name__}.idx")
assert DType.optimal_dtype(65499) is numpy.uint16 and DType.optimal_dtype(65500) is numpy.int32
print(read.index.dtype.__name__, read.document_indices.tolist(), [text.tolist() for text in texts])
"""


@pytest.mark.full
@pytest.mark.parametrize("vocab_size", [300, 70_000])
def test_megatron_reads_and_writes_equal_files(tmp_path: Path, vocab_size: int) -> None:
    """Use megatron-core's own reader and builder in another process, since the import is slow."""
    pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")
    texts = documents(30, vocab_size)
    manifest = make_folder(tmp_path / "data", {"train": texts}, vocab_size)
    ours, theirs = tmp_path / "data" / "train-00000", tmp_path / "theirs"
    command = [sys.executable, "-c", MEGATRON, str(ours), str(theirs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    expected = f"{manifest.dtype} {list(range(len(texts) + 1))} {[text.tolist() for text in texts]}"
    assert done.stdout.splitlines()[-1] == expected
    for ending in ("bin", "idx"):
        assert (
            Path(f"{theirs}-{manifest.dtype}.{ending}").read_bytes()
            == ours.with_name(f"train-00000.{ending}").read_bytes()
        )
    for dtype in ("uint16", "int32") if vocab_size == 300 else ("int32",):
        index = IndexFile(Path(f"{theirs}-{dtype}.idx"))
        index.check_contiguous()
        assert index.lengths.tolist() == [len(text) for text in texts]
        row = np.fromfile(f"{theirs}-{dtype}.bin", index.dtype)
        assert np.array_equal(row, np.concatenate(texts))
