"""Conversions of any pieces to any pieces, with hashes and checksums, in tiles.

pytest tests/checkpoint/test_convert.py
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint import fabricate
from tests.checkpoint.layouts import LAYOUTS, same_bits, save, shards_of, whole
from toolkit.checkpoint import catalog, file_reader, open_reader, piece_reader, planner
from toolkit.checkpoint.catalog import DamagedFile, TensorPiece
from toolkit.checkpoint.formats import native, torch_zip
from toolkit.checkpoint.formats.stored_tensor import Storage, StoredTensor
from toolkit.checkpoint.offline import unit_writer
from toolkit.checkpoint.offline.convert import Conversion
from toolkit.checkpoint.offline.output import combine_checksums
from toolkit.checkpoint.online import writing
from toolkit.checkpoint.shard import EXP_AVG_SQ, MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.target import CheckpointTarget
from toolkit.checkpoint.tile_reader import element_offset, split_into_tiles
from toolkit.checkpoint.verify import compute_digest, verify
from toolkit.errors import CheckpointError, Problem


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (catalog, file_reader, piece_reader, writing):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    monkeypatch.setattr("toolkit.checkpoint.offline.output.BLOCK_BYTES", 64)
    monkeypatch.setattr(planner, "SPLIT_BYTES", 32)
    monkeypatch.setattr(unit_writer, "TILE_BYTES", 96)


def damage_error(folder: Path, damage: DamagedFile) -> CheckpointError:
    return CheckpointError(Problem(damage.file, damage.seen, damage.rule, "none"))


def values_of(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(source: CheckpointSource, target: CheckpointTarget, path: Path, **kwargs: Any) -> Conversion:
    conversion = Conversion(source, target, path, **kwargs)
    conversion.run()
    return conversion


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 7), max_size=4).map(tuple),
    most=st.integers(1, 40),
    columns=st.booleans(),
    data=st.data(),
)
def test_tiles_cover_tensor_in_order(shape: tuple[int, ...], most: int, columns: bool, data: Any) -> None:
    columns = columns and len(shape) > 1
    cut = list(split_into_tiles(shape, most, by_columns=columns))
    seen = np.zeros(shape, int)
    for tile in cut:
        seen[file_reader.box_slices(tile)] += 1
        assert tile.numel <= most
    assert (seen == 1).all()
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    outer = Box(
        tuple(low), tuple(data.draw(st.integers(1, size - a)) for a, size in zip(low, shape, strict=True))
    )
    at = 0
    for tile in cut:
        common = outer.intersect(tile)
        if common is not None:
            assert element_offset(outer, common, transposed=columns) == at
            at += common.numel
    assert at == outer.numel


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_convert_native_to_native(tmp_path: Path, small_blocks: None, layout: str) -> None:
    shapes = [(13, 11), (7,), (), (3, 5, 4), (1, 40)]
    named = {TensorKey(WEIGHT, f"t{n}"): values_of(shape, n) for n, shape in enumerate(shapes)}
    named |= {
        TensorKey(EXP_AVG_SQ, f"t{n}"): values_of(shape, n + 9).square() for n, shape in enumerate(shapes)
    }
    source = open_source(save(tmp_path / "a", 3, shards_of(named, LAYOUTS[layout], 3)))
    done: list[int] = []
    made = run(
        source,
        native.lay_out(source, dict(source.catalog.tensors), file_bytes=300),
        tmp_path / "b",
        advance=done.append,
    )
    assert sum(done) == made.source_bytes == sum(tensor.nbytes for tensor in named.values())
    assert verify(tmp_path / "b") == []
    assert compute_digest(open_reader(tmp_path / "b")) == compute_digest(source.reader())
    names = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert names == ["manifest.json", *(f"part-{number:05d}.safetensors" for number in range(len(names) - 1))]
    assert len(names) > 4, "several files"
    assert not made.temporary.exists()


def test_casts_match_torch(tmp_path: Path, small_blocks: None) -> None:
    """bfloat16 rounds to even, and fp32 is preserved if both are written."""
    tensor = torch.cat(
        [values_of((300,), 1), torch.tensor([0.0, -0.0, 1e-40, 65520.0, 3.3895e38, 1.00390625, 1.01171875])]
    )
    source = open_source(
        save(tmp_path / "a", 1, shards_of({TensorKey(MASTER, "w"): tensor}, LAYOUTS["flat"], 2))
    )
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        wanted = {
            TensorKey(WEIGHT, "w"): TensorInfo(name, shape),
            TensorKey(MASTER, "w"): TensorInfo("float32", shape),
        }
        run(source, native.lay_out(source, wanted), tmp_path / name, examine=False)
        found = whole(open_reader(tmp_path / name))
        assert same_bits(found[TensorKey(WEIGHT, "w")], tensor.to(dtype))
        assert same_bits(found[TensorKey(MASTER, "w")], tensor)


def test_other_16_bit_dtype_is_cast_from_master(tmp_path: Path) -> None:
    """A cast from the stored bfloat16 would lose three bits of each value."""
    master, weight = TensorKey(MASTER, "w"), TensorKey(WEIGHT, "w")
    tensor = values_of((300,), 1)
    named = {master: tensor, weight: tensor.bfloat16()}
    source = open_source(save(tmp_path / "a", 1, shards_of(named, LAYOUTS["flat"], 2)))
    run(source, native.lay_out(source, {weight: TensorInfo("float16", (300,))}), tmp_path / "b")
    found = whole(open_reader(tmp_path / "b"))[weight]
    assert same_bits(found, tensor.half())
    assert not same_bits(found, tensor.bfloat16().half()), "the control"


def test_incomplete_target_is_never_written(tmp_path: Path) -> None:
    key = TensorKey(WEIGHT, "w")
    source = open_source(save(tmp_path / "a", 1, shards_of({key: values_of((4, 5), 1)}, LAYOUTS["flat"], 2)))
    target = native.lay_out(source, dict(source.catalog.tensors))
    (piece,) = target.pieces[key]
    short = replace(piece, box=Box((0, 0), (3, 5)), end=piece.begin + 60)
    with pytest.raises(AssertionError, match="15 of 20 elements"):
        run(source, replace(target, pieces={key: [short]}), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_unrepresentable_values_are_rejected(tmp_path: Path) -> None:
    key, tensor = TensorKey(WEIGHT, "w"), values_of((50,), 1)
    tensor[3] = 65520.0  # rounds up to 65536, which float16 does not have
    source = open_source(save(tmp_path / "a", 1, shards_of({key: tensor}, LAYOUTS["flat"], 2)))
    with pytest.raises(CheckpointError, match="cannot represent"):
        run(source, native.lay_out(source, {key: TensorInfo("float16", (50,))}), tmp_path / "b")


@pytest.mark.parametrize(
    ("key", "spoil"),
    [
        (TensorKey(WEIGHT, "w"), float("nan")),
        (TensorKey(WEIGHT, "w"), float("inf")),
        (TensorKey(EXP_AVG_SQ, "w"), -1e-30),
    ],
)
def test_implausible_values_are_rejected(tmp_path: Path, key: TensorKey, spoil: float) -> None:
    named = {TensorKey(state, "w"): values_of((50,), 1).square() for state in (WEIGHT, EXP_AVG_SQ)}
    named[key][17] = spoil
    source = open_source(save(tmp_path / "a", 1, shards_of(named, LAYOUTS["flat"], 2)))
    target = native.lay_out(source, dict(source.catalog.tensors))
    with pytest.raises(CheckpointError, match="corrupt"):
        run(source, target, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    run(source, target, tmp_path / "b", examine=False)


def test_weight_that_differs_from_master_is_rejected(tmp_path: Path) -> None:
    master = values_of((5, 40), 1)
    named = {TensorKey(MASTER, "w"): master, TensorKey(WEIGHT, "w"): master.bfloat16()}
    named[TensorKey(WEIGHT, "w")][3, 2] *= 1.01
    source = open_source(save(tmp_path / "a", 1, shards_of(named, LAYOUTS["rows"], 2)))
    with pytest.raises(CheckpointError, match=r"1 of 200 values .* are not their master"):
        run(source, native.lay_out(source, dict(source.catalog.tensors)), tmp_path / "b")


def a_file() -> CheckpointTarget:
    """Lay out a torch.save file with a storage that two tensors share, one of them transposed, and padding
    after them.
    """
    key, other = TensorKey(WEIGHT, "a"), TensorKey(WEIGHT, "b")
    storage = Storage("0", "float32", 13 * 11 + 7 + 6)
    empty = Storage("1", "int64", 0)
    tensors = {
        "flat": StoredTensor.whole(storage, (storage.numel,)),
        "a": StoredTensor(storage, 0, (11, 13), (13, 1)),
        "b": StoredTensor(storage, 143, (7,), (1,)),
        "none": StoredTensor.whole(empty, (0,)),
        "step": 3,
    }
    layout = torch_zip.lay_out("x.pt", tensors, [storage, empty])
    at = layout.storages["0"]
    pieces = {
        key: [
            TensorPiece(key, "float32", (13, 11), Box.whole((13, 11)), "x.pt", at, at + 572, transposed=True)
        ],
        other: [TensorPiece(other, "float32", (7,), Box.whole((7,)), "x.pt", at + 572, at + 600)],
    }
    infos = {key: TensorInfo("float32", (13, 11)), other: TensorInfo("float32", (7,))}
    return CheckpointTarget(
        format="test",
        namespace="test/1",
        step=1,
        tensors=infos,
        pieces=pieces,
        files=[layout.file],
        identity="x",
        manifest="m.json",
    )


def test_torch_loads_laid_out_file(tmp_path: Path, small_blocks: None) -> None:
    named = {TensorKey(WEIGHT, "a"): values_of((13, 11), 1), TensorKey(WEIGHT, "b"): values_of((7,), 2)}
    source = open_source(save(tmp_path / "s", 1, shards_of(named, LAYOUTS["columns"], 2)))
    run(source, a_file(), tmp_path / "t")
    with zipfile.ZipFile(tmp_path / "t" / "x.pt") as archive:
        assert archive.testzip() is None, "checksums are right"
    found = torch.load(tmp_path / "t" / "x.pt", weights_only=True)
    a, b = named.values()
    assert same_bits(found["a"], a.T.contiguous())
    assert same_bits(found["b"], b)
    assert torch.equal(found["flat"], torch.cat([a.T.reshape(-1), b, torch.zeros(6)]))
    assert found["a"].untyped_storage().data_ptr() == found["flat"].untyped_storage().data_ptr()
    assert (found["step"], found["none"].shape, found["none"].dtype) == (3, (0,), torch.int64)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
def test_torch_save_tensors_are_located_without_reading(tmp_path: Path, dtype: torch.dtype) -> None:
    base = (torch.arange(1000) % 7).to(dtype).reshape(10, 100)
    saved = {
        "plain": base,
        "view": base[2:5],
        "columns": base[:, 10:30],
        "transposed": base.T,
        "every": base[::3, 5],
        "scalar": base[3, 4],
        "stacked": base.reshape(10, 10, 10).transpose(1, 2),
        "none": base[:0],
        "parameter": torch.nn.Parameter(base[1].clone(), requires_grad=False),
    }
    torch.save(saved, tmp_path / "x.pt")
    found = torch_zip.load(tmp_path, "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    for name, tensor in saved.items():
        key, shape = TensorKey(WEIGHT, name), tuple(tensor.shape)
        pieces = torch_zip.tensor_pieces(found[name], key, shape, Box.whole(shape))
        assert sum(piece.box.numel for piece in pieces) == tensor.numel()
        for piece in pieces:
            values = torch.frombuffer(bytearray(data[piece.begin : piece.end]), dtype=dtype).reshape(
                piece.shape_in_file
            )
            values = values.swapaxes(-1, -2) if piece.transposed else values
            assert torch.equal(values, file_reader.view_box(tensor.detach(), piece.box)), name
        assert len(pieces) == {"columns": 10, "every": 4, "none": 0}.get(name, 1)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("this must not be called",)


def test_pickle_never_calls_named_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"evil": Evil(), "tensor": torch.ones(3)}, tmp_path / "x.pt")
    found = torch_zip.load(tmp_path, "x.pt")
    assert capsys.readouterr().out == ""
    assert found["evil"].name == "builtins.print"
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert "must not be called" in capsys.readouterr().out, "the control: torch calls it"


def test_other_files_are_rejected_as_torch_save(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(100)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "short.pt").write_bytes(data[:-50])
    (tmp_path / "text.pt").write_text("nothing")
    for name in ("short.pt", "text.pt", "absent.pt"):
        with pytest.raises(DamagedFile, match=name):
            torch_zip.load(tmp_path, name)


def test_checksums_of_ranges_combine_to_whole() -> None:
    data = bytearray(5000)
    segments = []
    for begin, length in ((10, 90), (300, 1), (301, 2000), (4000, 700)):
        data[begin : begin + length] = (
            np.random.default_rng(begin).integers(0, 256, length, np.uint8).tobytes()
        )
        segments.append((begin, length, zlib.crc32(data[begin : begin + length])))
    assert combine_checksums(0, 5000, segments) == zlib.crc32(data)


def test_differing_copy_is_rejected(tmp_path: Path, small_blocks: None) -> None:
    """Copies are replicated over ranks, tied, or a weight that is its own master and stored as both."""
    key, other = TensorKey(WEIGHT, "w"), TensorKey(WEIGHT, "norm")
    named = {key: values_of((40, 3), 1), other: values_of((50,), 2)}
    source = fabricate.write_rank_files(tmp_path / "a", named, replicated=["norm"])
    target = native.lay_out(source, dict(source.catalog.tensors))
    run(source, target, tmp_path / "sound")
    fabricate.overwrite_element(source, other, 37, values_of((1,), 3).numpy().tobytes(), copy=True)
    with pytest.raises(CheckpointError, match=r"1 of .* differ in rank1\.pt"):
        run(source, target, tmp_path / "b")
    run(source, target, tmp_path / "unseen", examine=False)


@pytest.mark.parametrize("layout", ["columns", "flat", "rows"])
def test_conversion_reads_each_byte_once(
    tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Tiles end inside blocks, and each tile needs a small part of every piece that is cut by columns."""
    named = {TensorKey(WEIGHT, name): values_of((37, 90), seed) for seed, name in enumerate("ab")}
    source = open_source(save(tmp_path / "a", 3, shards_of(named, LAYOUTS[layout], 4)))
    lengths: list[int] = []
    fill_once = file_reader.CheckpointFiles.read_into

    def counted(files: file_reader.CheckpointFiles, file: str, begin: int, buffer: memoryview) -> None:
        lengths.append(len(buffer))
        fill_once(files, file, begin, buffer)

    monkeypatch.setattr(file_reader.CheckpointFiles, "read_into", counted)
    run(source, native.lay_out(source, dict(source.catalog.tensors)), tmp_path / "b")
    assert sum(lengths) == sum(tensor.nbytes for tensor in named.values())
    assert len(lengths) > 100, "in many steps"
