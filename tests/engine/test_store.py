"""Checkpoints in an object store, loaded by another engine and layout than saved them.

pytest tests/engine/test_store.py -m full
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.checkpoint.uploads import UploadingRun
from tests.data.local_stores import Store, environment
from tests.engine.cases import WithoutMoments
from tests.engine.hops import EACH, stretch
from toolkit.checkpoint import open_reader
from toolkit.checkpoint.planner import ReadPlanner
from toolkit.checkpoint.shard import Shard, StateReader
from toolkit.checkpoint.source import open_source
from toolkit.engine.build import build_engine
from toolkit.testing.dist import RankPool
from toolkit.testing.matrix import Cell, OptimizerCase, deepspeed, megatron
from toolkit.testing.parity import train_steps
from toolkit.train.task import text_task

ZERO3, TENSOR = deepspeed("llama", 3, data=2), megatron("llama", tensor=2)


class CountingReader:
    """Read as ``reader`` does, and count the bytes of the pieces, and of the elements, that are needed."""

    def __init__(self, reader: StateReader, planner: ReadPlanner) -> None:
        self._reader, self._planner = reader, planner
        self.needed = self.elements = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)

    def read(self, shards: Sequence[Shard]) -> None:
        for read in self._planner.plan(shards):
            self.needed += read.piece.end - read.piece.begin  # smaller than a block with one hash
            self.elements += sum(target.overlap.numel for target in read.targets) * read.piece.itemsize
        self._reader.read(shards)


def train_from_store(
    rank: int, ranks: int, variables: Mapping[str, str], cell: Cell, url: str, forget: bool
) -> tuple[list[float], int, int]:
    """Train from the checkpoint at ``url``. Returns the losses, and the bytes that this rank needs."""
    os.environ.update(variables)
    plan = cell.plan(OptimizerCase.ADAM)
    engine = build_engine(plan, text_task(plan), rank=rank, local_rank=rank)
    reader = CountingReader(open_reader(url), ReadPlanner(open_source(url).catalog))
    engine.load(WithoutMoments(reader) if forget else reader)  # type: ignore[arg-type]
    losses = [result.loss for result in train_steps(engine, plan, range(EACH, 2 * EACH), rank=rank)]
    engine.close()
    return losses, reader.needed, reader.elements


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved", "loaded"), [(ZERO3, TENSOR), (TENSOR, ZERO3)], ids=["zero3-tensor", "tensor-zero3"]
)
def test_another_layout_loads_from_a_store_as_from_disk(
    pool: RankPool, store: Store, tmp_path: Path, saved: Cell, loaded: Cell
) -> None:
    folder, url = tmp_path / "run" / "checkpoints", f"{store.s3}/run"
    pool.run(stretch, saved, 0, None, folder, False, ranks=2)
    run = UploadingRun(tmp_path / "run", url)  # sends the checkpoint that it finds
    assert run.close()
    from_disk = pool.run(stretch, loaded, EACH, folder, tmp_path / "next", False, ranks=2)
    store.forget()
    found = pool.run(train_from_store, environment(store), loaded, url, False, ranks=2)
    assert found[0][0] == [result.loss for result in from_disk[0]], "not equal to the bit"
    needed, elements = sum(rank[1] for rank in found), sum(rank[2] for rank in found)
    manifests = 2 * 2 * sum(file.stat().st_size for file in store.root.rglob("manifest.json"))
    print(f"{store.served_bytes - manifests} bytes read, {needed} needed, {elements} of elements")
    assert needed <= store.served_bytes - manifests <= 1.1 * needed
    forgetful = pool.run(train_from_store, environment(store), loaded, url, True, ranks=2)
    assert forgetful[0][0] != found[0][0], "the control: zeroed moments"
