"""Tensors and files at sizes where formats change: empty, one element, over 4 GiB, more records than a zip
counts in 16 bits.

pytest tests/checkpoint/test_convert_sizes.py
pytest tests/checkpoint/test_convert_sizes.py -m full      checksums over 4 GiB too
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.layouts import LAYOUTS, save, shards_of, whole
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.catalog import TensorPiece
from toolkit.checkpoint.formats import native, torch_zip
from toolkit.checkpoint.formats.stored_tensor import Storage, StoredTensor
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.shard import WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint.target import CheckpointTarget
from toolkit.checkpoint.verify import verify

GIB_4 = 2**32
A, B = TensorKey(WEIGHT, "a"), TensorKey(WEIGHT, "b")
VALUES = {
    A: torch.arange(1, 13, dtype=torch.int32).reshape(3, 4),
    B: torch.arange(100, 107, dtype=torch.int32),
}
RECORDS_BESIDE = 3  # data.pkl, byteorder, version


def converted(folder: Path, storages: list[Storage], tensors: dict[TensorKey, StoredTensor]) -> Path:
    """Write a torch.save file with these storages, zero except ``VALUES``. The file is sparse on disk."""
    source = open_source(save(folder / "source", 1, shards_of(VALUES, LAYOUTS["flat"], 2)))
    layout = torch_zip.lay_out("x.pt", {key.name: tensor for key, tensor in tensors.items()}, storages)
    pieces, infos = {}, {}
    for key, tensor in tensors.items():
        begin = layout.storages[tensor.storage.key] + 4 * tensor.offset
        pieces[key] = [
            TensorPiece(
                key, "int32", tensor.shape, Box.whole(tensor.shape), "x.pt", begin, begin + 4 * tensor.numel
            )
        ]
        infos[key] = TensorInfo("int32", tensor.shape)
    target = CheckpointTarget(
        format="test",
        namespace="test/1",
        step=1,
        tensors=infos,
        pieces=pieces,
        files=[layout.file],
        identity="x",
        manifest="m.json",
    )
    Conversion(source, target, folder / "t").run()
    return folder / "t" / "x.pt"


# The storage of ``a`` ends at a 32-bit size or beyond; that of ``b`` starts beyond.
@pytest.mark.parametrize("numbytes", [GIB_4 - 8, GIB_4 - 4, GIB_4, GIB_4 + 400])
def test_storages_beyond_4_gib_use_zip64(tmp_path: Path, numbytes: int) -> None:
    big, small = Storage("0", "int32", numbytes // 4), Storage("1", "int32", 9)
    tensors = {A: StoredTensor(big, big.numel - 12, (3, 4), (4, 1)), B: StoredTensor(small, 2, (7,), (1,))}
    path = converted(tmp_path, [big, small], tensors)
    assert path.stat().st_size > numbytes
    assert 512 * path.stat().st_blocks < 2**20, "sparse"
    found = torch.load(path, mmap=True, weights_only=True)
    stored = torch_zip.load(path.parent, "x.pt")
    for key, tensor in VALUES.items():
        assert torch.equal(found[key.name], tensor)
        assert found[key.name].untyped_storage().nbytes() == 4 * tensors[key].storage.numel
        [piece] = torch_zip.tensor_pieces(stored[key.name], key, tuple(tensor.shape), Box.whole(tensor.shape))
        with path.open("rb") as file:
            file.seek(piece.begin)
            assert file.read(piece.end - piece.begin) == tensor.numpy().tobytes()
    with zipfile.ZipFile(path) as archive:
        assert {info.file_size for info in archive.infolist()} >= {numbytes, 36}


@pytest.mark.full
def test_checksums_beyond_4_gib(tmp_path: Path) -> None:
    big = Storage("0", "int32", GIB_4 // 4 + 100)
    path = converted(
        tmp_path,
        [big],
        {A: StoredTensor(big, big.numel - 12, (3, 4), (4, 1)), B: StoredTensor(big, 5, (7,), (1,))},
    )
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@pytest.mark.full
@pytest.mark.parametrize("records", [0xFFFF - 1, 0xFFFF, 70_000])
def test_more_records_than_a_zip_counts_in_16_bits(tmp_path: Path, records: int) -> None:
    count = records - RECORDS_BESIDE
    storages = [Storage(str(number), "int32", 12) for number in range(count)]
    tensors = {A: StoredTensor.whole(storages[-1], (3, 4)), B: StoredTensor(storages[7], 5, (7,), (1,))}
    path = converted(tmp_path, storages, tensors)
    with zipfile.ZipFile(path) as archive:
        assert len(archive.infolist()) == records
        assert archive.read(f"archive/data/{count - 1}") == VALUES[A].numpy().tobytes()
    found, stored = torch.load(path, weights_only=True), torch_zip.load(path.parent, "x.pt")
    for key, tensor in VALUES.items():
        assert torch.equal(found[key.name], tensor)
        assert stored[key.name].shape == tuple(tensor.shape)


SHAPES = ((0,), (0, 5), (5, 0, 3), (), (1,), (1, 1, 1), (2, 3))


@pytest.mark.parametrize("layout", ["columns", "replicated"])
def test_empty_and_one_element_tensors(tmp_path: Path, layout: str) -> None:
    named = {TensorKey(WEIGHT, f"t{number}"): torch.randn(shape) for number, shape in enumerate(SHAPES)}
    source = open_source(save(tmp_path / "s", 1, shards_of(named, LAYOUTS[layout], 3)))
    for name, info in (
        ("native", dict(source.catalog.tensors)),
        ("halves", {key: TensorInfo("bfloat16", tuple(value.shape)) for key, value in named.items()}),
    ):
        target = native.lay_out(source, info)
        Conversion(source, target, tmp_path / name).run()
        assert verify(tmp_path / name) == []
        found = whole(open_reader(tmp_path / name))
        assert {key: tensor.shape for key, tensor in found.items()} == {
            key: tensor.shape for key, tensor in named.items()
        }
        assert all(torch.equal(found[key], tensor.to(found[key].dtype)) for key, tensor in named.items())
        stored = load_file(tmp_path / name / "part-00000.safetensors")
        assert sorted(tuple(tensor.shape) for tensor in stored.values()) == sorted(SHAPES)


def test_empty_and_one_element_tensors_in_torch_save(tmp_path: Path) -> None:
    named = {TensorKey(WEIGHT, f"t{number}"): torch.randn(shape) for number, shape in enumerate(SHAPES)}
    source = open_source(save(tmp_path / "s", 1, shards_of(named, LAYOUTS["replicated"], 2)))
    stored = {
        key: StoredTensor.whole(Storage(str(number), "float32", tensor.numel()), tuple(tensor.shape))
        for number, (key, tensor) in enumerate(named.items())
    }
    layout = torch_zip.lay_out(
        "x.pt",
        {key.name: tensor for key, tensor in stored.items()},
        [tensor.storage for tensor in stored.values()],
    )
    pieces = {}
    for key, tensor in stored.items():
        begin = layout.storages[tensor.storage.key]
        pieces[key] = [
            TensorPiece(
                key, "float32", tensor.shape, Box.whole(tensor.shape), "x.pt", begin, begin + 4 * tensor.numel
            )
        ]
    target = CheckpointTarget(
        format="test",
        namespace="test/1",
        step=1,
        tensors=dict(source.catalog.tensors),
        pieces=pieces,
        files=[layout.file],
        identity="x",
        manifest="m.json",
    )
    Conversion(source, target, tmp_path / "t").run()
    with zipfile.ZipFile(tmp_path / "t" / "x.pt") as archive:
        assert archive.testzip() is None
    found = torch.load(tmp_path / "t" / "x.pt", weights_only=True)
    assert all(torch.equal(found[key.name], tensor) for key, tensor in named.items())
