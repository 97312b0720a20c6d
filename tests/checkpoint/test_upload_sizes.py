"""Uploads and reads at sizes at which the parts of an upload and the blocks of a hash matter.

pytest tests/checkpoint/test_upload_sizes.py -m "full or not full" -s
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

from tests.checkpoint.layouts import LAYOUTS, ReplicaBox, shards_of, slice_box, whole
from tests.checkpoint.uploads import RANKS, SECONDS, UploadingRun, poll_often, upload_large_file
from tests.data.local_stores import Store, environment
from tests.waiting import wait_until
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.shard import EXP_AVG, WEIGHT, Box, Shard, TensorKey, flat_boxes
from toolkit.checkpoint.verify import verify

PREFIX = "runs/mine"


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)


def test_a_kill_between_the_parts_of_a_file_leaves_the_earlier_checkpoint(
    store: Store, tmp_path: Path, forks: ForkServerContext
) -> None:
    """The parts that arrived stay in the store: no name leads to them, and no listing shows them."""
    folder, url = tmp_path / "run", f"{store.s3}/{PREFIX}"
    tensor = torch.arange(10_000_000.0)
    numbers, gone = count(1), threading.Event()

    def hold_third_part(key: str) -> None:
        if (
            "step-00000002" in key and "part-00000" in key and next(numbers) > 3
        ):  # the first starts the upload
            gone.wait(SECONDS)
            raise ConnectionAbortedError

    store.on_write = hold_third_part
    process = forks.Process(target=upload_large_file, args=(folder, url, environment(store), tensor))
    process.start()
    wait_until(lambda: [len(parts) for parts in store.uploads.values()] == [2], SECONDS, "two parts sent")
    process.kill()
    process.join(SECONDS)
    gone.set()
    assert process.exitcode == -9
    assert open_reader(url).step == 1
    assert verify(url) == []
    store.forget()
    store.on_write = lambda key: None
    again = UploadingRun(folder, url, 2, keep_last=1)
    assert again.close()
    reader = open_reader(url)
    assert reader.step == 2
    assert torch.equal(whole(reader)[TensorKey(WEIGHT, "a")], tensor)
    sent = [key for key in store.writes if key.startswith("PUT") and "part-00000" in key]
    assert len(sent) == 1, "the whole file"
    assert store.received_bytes > tensor.nbytes
    assert [len(parts) for parts in store.uploads.values()] == [2], "a lifecycle rule removes what is left"


# ---- bytes that the ranks read, as a multiple of the bytes of their tensors

Tensors = Mapping[TensorKey, torch.Tensor]
Split = Callable[[Tensors, int], list[list[Shard]]]  # tensors over a number of ranks


def zero(tensors: Tensors, ranks: int) -> list[list[Shard]]:
    """Return what ZeRO gives each rank: an equal range of all tensors of a state, one after the other."""
    shards: list[list[Shard]] = [[] for _ in range(ranks)]
    for state in {key.state for key in tensors}:
        own = {key: tensor for key, tensor in tensors.items() if key.state == state}
        each, begin = -(-sum(tensor.numel() for tensor in own.values()) // ranks), 0
        for key, tensor in own.items():
            for rank in range(ranks):
                ends = [min(max(at * each - begin, 0), tensor.numel()) for at in (rank, rank + 1)]
                for box in flat_boxes(tensor.shape, *ends):
                    shards[rank].append(Shard(key, tuple(tensor.shape), box, slice_box(tensor, box)))
            begin += tensor.numel()
    return shards


def tensor_parallel(dim: int) -> Split:
    """Return the split that gives each rank an equal part of every tensor along ``dim``."""

    def boxes(shape: Sequence[int], ranks: int) -> list[list[ReplicaBox]]:
        size = shape[dim] // ranks
        parts = []
        for rank in range(ranks):
            offset, extent = [0] * len(shape), list(shape)
            offset[dim], extent[dim] = rank * size, size
            parts.append([ReplicaBox(Box(tuple(offset), tuple(extent)))])
        return parts

    return lambda tensors, ranks: shards_of(tensors, boxes, ranks)


def one_rank(tensors: Tensors, ranks: int) -> list[list[Shard]]:
    return shards_of(tensors, LAYOUTS["first_only"], ranks)


def tensors_of(*rows: int) -> Tensors:
    """Return a weight and a moment of tensors with so many rows of 4 KiB."""
    generator = torch.Generator().manual_seed(1)
    return {
        TensorKey(state, str(number)): torch.randn(size, 1024, generator=generator)
        for state in (WEIGHT, EXP_AVG)
        for number, size in enumerate(rows)
    }


MODEL = (5120, 1024, 1024, 512)  # rows of an embedding of 20 MiB and smaller matrices, 60 MiB in all
MATRIX = (15360,)  # 60 MiB, 120 in all


@pytest.mark.parametrize(
    ("rows", "before", "after", "ranks", "times"),
    [
        pytest.param(MODEL, zero, zero, 2, 1.0, id="same-layout"),
        pytest.param(MODEL, zero, zero, 3, 1.5, id="zero-2-to-3"),
        pytest.param(MODEL, zero, zero, 4, 1.634, id="zero-2-to-4", marks=pytest.mark.full),
        pytest.param(MODEL, one_rank, tensor_parallel(0), 2, 1.867, id="rows", marks=pytest.mark.full),
        pytest.param(MATRIX, one_rank, tensor_parallel(0), 2, 1.267, id="large-rows", marks=pytest.mark.full),
        pytest.param(MODEL, one_rank, tensor_parallel(1), 2, 2.0, id="columns", marks=pytest.mark.full),
    ],
)
def test_ranks_read_each_block_with_a_byte_of_theirs_once(
    store: Store, tmp_path: Path, rows: Sequence[int], before: Split, after: Split, ranks: int, times: float
) -> None:
    """``times``: bytes of every body that the store sends (pointer, manifest, blocks) over the bytes of the
    ranks' tensors. More than 1 because a hash is of a whole block; docs/results.md quotes it.
    """
    tensors, url = tensors_of(*rows), f"{store.s3}/{PREFIX}"
    run = UploadingRun(tmp_path / "run", url)
    run.save(1, before(tensors, RANKS))
    assert run.close()
    needed = served = 0
    for expected in after(tensors, ranks):
        shards = [replace(shard, data=torch.full_like(shard.data, 7)) for shard in expected]
        store.forget()
        open_reader(url).read(shards)
        assert all(torch.equal(a.data, b.data) for a, b in zip(shards, expected, strict=True))
        needed += sum(shard.data.nbytes for shard in shards)
        served += store.served_bytes
    print(f"{served / needed:.4f} times the {needed / 2**20:.0f} MiB that {ranks} ranks need")
    assert served / needed == pytest.approx(times, abs=1e-3)
