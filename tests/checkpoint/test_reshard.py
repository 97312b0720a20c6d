"""Any layout loads what any other saved, bitwise.

pytest tests/checkpoint/test_reshard.py
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.layouts import LAYOUTS, same_bits, save, shards_of, slice_box, whole
from toolkit.checkpoint import catalog, file_reader, open_reader, piece_reader, planner
from toolkit.checkpoint.online import writing
from toolkit.checkpoint.shard import EXP_AVG, MASTER, WEIGHT, Box, Shard, TensorKey, flat_shards
from toolkit.checkpoint.verify import compute_digest, verify
from toolkit.errors import CheckpointError

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of 64 bytes and split from 32, so that small tensors take every code path."""
    for module in (catalog, file_reader, piece_reader, writing):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    monkeypatch.setattr(planner, "SPLIT_BYTES", 32)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=4)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    tensors=tensors,
    source=st.sampled_from(sorted(LAYOUTS)),
    ranks=st.integers(1, 4),
    target=st.sampled_from(sorted(LAYOUTS)),
    target_ranks=st.integers(1, 5),
    contiguous=st.booleans(),
)
def test_any_layout_loads_any_other(
    tensors: list[tuple[tuple[int, ...], torch.dtype]],
    source: str,
    ranks: int,
    target: str,
    target_ranks: int,
    contiguous: bool,
    small_blocks: None,
) -> None:
    named = {
        TensorKey(WEIGHT, f"t{n}.w"): random_tensor(shape, dtype, n)
        for n, (shape, dtype) in enumerate(tensors)
    }
    held = shards_of(named, LAYOUTS[source], ranks)
    if contiguous:
        held = [
            [Shard(s.key, s.global_shape, s.box, s.data.contiguous(), s.replica, s.replicas) for s in rank]
            for rank in held
        ]
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), 3, held)
        reader = open_reader(path)
        for rank in shards_of(named, LAYOUTS[target], target_ranks, empty=True):
            reader.read(rank)
            for shard in rank:
                assert same_bits(shard.data, slice_box(named[shard.key], shard.box)), shard
        assert {key: info.shape for key, info in reader.tensors.items()} == {
            key: tuple(tensor.shape) for key, tensor in named.items()
        }
        assert verify(path) == []


@pytest.mark.parametrize("target", sorted(LAYOUTS))
def test_digest_is_independent_of_layout(tmp_path: Path, small_blocks: None, target: str) -> None:
    named = {
        TensorKey(state, name): random_tensor((13, 11), torch.float32, seed)
        for seed, (state, name) in enumerate(itertools.product((WEIGHT, EXP_AVG), "ab"))
    }
    first = open_reader(save(tmp_path / "first", 1, shards_of(named, LAYOUTS["flat"], 3)))
    room = {key: torch.empty_like(tensor) for key, tensor in named.items()}
    for rank in shards_of(room, LAYOUTS[target], 4):
        first.read(rank)  # into views of ``room``, that are not contiguous
    second = open_reader(save(tmp_path / "second", 2, shards_of(room, LAYOUTS[target], 4)))
    assert compute_digest(first) == compute_digest(second)
    next(iter(room.values()))[0, 0] += 1
    changed = compute_digest(open_reader(save(tmp_path / "third", 2, shards_of(room, LAYOUTS[target], 4))))
    assert changed.overall != compute_digest(first).overall
    assert (
        len({key for key, one in changed.tensors.items() if one != compute_digest(first).tensors[key]}) == 1
    )


def test_tensors_larger_than_a_block(tmp_path: Path) -> None:
    """More than three blocks, replicated and split by columns, at the real block size."""
    key = TensorKey(WEIGHT, "w")
    named = {
        key: random_tensor((1031, 6143), torch.bfloat16, 5),
        TensorKey(WEIGHT, "v"): random_tensor((3001, 4099), torch.float32, 6),
    }
    for source, target in (("replicated", "columns"), ("columns", "flat")):
        reader = open_reader(save(tmp_path / source, 1, shards_of(named, LAYOUTS[source], 2)))
        for rank in shards_of(named, LAYOUTS[target], 3, empty=True):
            reader.read(rank)
            assert all(same_bits(shard.data, slice_box(named[shard.key], shard.box)) for shard in rank)


def test_replicas_share_writing(tmp_path: Path, small_blocks: None) -> None:
    named = {TensorKey(WEIGHT, f"{n}"): random_tensor((4 + n, 5), torch.float32, n) for n in range(8)}
    named |= {TensorKey(WEIGHT, f"scalar{n}"): random_tensor((), torch.float32, n) for n in range(32)}
    path = save(tmp_path, 1, shards_of(named, LAYOUTS["replicated"], 4))
    content = json.loads((path / "manifest.json").read_text())
    sizes = [record["bytes"] - record["header_bytes"] for record in content["files"]]
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes), sizes
    assert len(content["entries"]) == 8 * 4 + 32, "a holder's part of a matrix is whole rows: one piece"


def test_read_touches_only_required_bytes(
    tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = TensorKey(WEIGHT, "w")
    tensor = random_tensor((1000,), torch.float32, 0)
    reader = open_reader(save(tmp_path, 1, shards_of({key: tensor}, LAYOUTS["flat"], 2)))
    read: list[int] = []
    fill = file_reader.CheckpointFiles.read_into

    def counted(self: file_reader.CheckpointFiles, file: str, begin: int, buffer: memoryview) -> None:
        read.append(len(buffer))
        fill(self, file, begin, buffer)

    monkeypatch.setattr(file_reader.CheckpointFiles, "read_into", counted)
    shards = flat_shards(key, (1000,), 490, torch.empty(20))
    reader.read(shards)
    assert torch.equal(shards[0].data, tensor[490:510])
    assert sum(read) <= 64 + 16 + 64  # the ends of two pieces


def test_missing_states_are_derived(tmp_path: Path) -> None:
    weight, master, moment = TensorKey(WEIGHT, "w"), TensorKey(MASTER, "w"), TensorKey(EXP_AVG, "w")
    exact = random_tensor((5, 3), torch.float32, 1)

    def read(stored: dict[TensorKey, torch.Tensor], key: TensorKey, dtype: torch.dtype) -> torch.Tensor:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        room = torch.empty(5, 3, dtype=dtype)
        open_reader(save(folder, 1, shards_of(stored, LAYOUTS["flat"], 2))).read(
            [Shard(key, (5, 3), Box.whole((5, 3)), room)]
        )
        return room

    mixed = {weight: exact.bfloat16(), master: exact}
    assert torch.equal(read({weight: exact}, master, torch.float32), exact)
    assert torch.equal(read({weight: exact.bfloat16()}, master, torch.float32), exact.bfloat16().float())
    assert torch.equal(read({master: exact}, weight, torch.bfloat16), exact.bfloat16())
    assert torch.equal(
        read(mixed, weight, torch.float32), exact
    )  # wider than what is stored: from the master
    assert torch.equal(read(mixed, weight, torch.bfloat16), exact.bfloat16())
    assert torch.equal(read(mixed, master, torch.float64), exact.double())
    with pytest.raises(CheckpointError, match=r"no exp_avg of w.*its states: master, weight"):
        read(mixed, moment, torch.float32)


def test_all_wrong_names_and_shapes_are_reported(tmp_path: Path) -> None:
    stored = {TensorKey(WEIGHT, name): torch.zeros(4, 2) for name in ("a", "b")}
    reader = open_reader(save(tmp_path, 1, shards_of(stored, LAYOUTS["flat"], 2)))
    asked = {
        TensorKey(WEIGHT, "a"): torch.zeros(4, 3),
        TensorKey(WEIGHT, "c"): torch.zeros(1),
        TensorKey(WEIGHT, "d"): torch.zeros(1),
    }
    with pytest.raises(CheckpointError) as caught:
        reader.read(shards_of(asked, LAYOUTS["first_only"], 1)[0])
    text = str(caught.value)
    assert "weight:a has shape (4, 2)" in text
    assert "(4, 3) in the requested model" in text
    assert "no weight of c, d" in text
    assert "remedy" in text


def test_safetensors_opens_data_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weight, master = TensorKey(WEIGHT, "a"), TensorKey(MASTER, "a")
    named = {
        weight: random_tensor((3, 4), torch.bfloat16, 1),
        master: random_tensor((3, 4), torch.float32, 2),
    }
    path = save(tmp_path, 1, shards_of(named, LAYOUTS["rows"], 2))
    found = {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    assert sorted(found) == [
        "master:a:0,0",
        "weight:a:0,0",
    ]  # the second rank's rows begin at 0: its part is unequal
    assert same_bits(found["weight:a:0,0"], named[weight])


def test_incomplete_save_is_not_committed(tmp_path: Path) -> None:
    key = TensorKey(WEIGHT, "w")
    tensor = torch.arange(12.0).view(4, 3)

    def half(low: int, high: int) -> list[Shard]:
        return [Shard(key, (4, 3), Box((low, 0), (high - low, 3)), tensor[low:high])]

    doubles = [Shard(key, (4, 3), Box((2, 0), (2, 3)), tensor[2:].double())]
    wrong = {
        "9 of 12 elements": [half(0, 2), half(3, 4)],
        "both contain": [half(0, 3), half(2, 4)],
        "float64": [half(0, 2), doubles],
    }
    for attempt, (reason, ranks) in enumerate(wrong.items()):
        with pytest.raises(CheckpointError, match=reason):
            save(tmp_path, 1, ranks, attempt=attempt)
        assert not (tmp_path / "step-00000001").exists()
    assert (
        whole(open_reader(save(tmp_path, 1, [half(0, 2), half(2, 4)], attempt=9)))[key].tolist()
        == tensor.tolist()
    )
