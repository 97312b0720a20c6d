"""Snapshots in memory of a run that rolls back to a step before them.

    pytest tests/train/test_memory_snapshots.py

``tests/launch/test_warm_restarts.py`` restarts runs from snapshots, ``test_partner_copies.py`` those of
several nodes.
"""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.train.fakes import FakeEngine, completed_step, context_of
from toolkit.checkpoint.online.store import PendingSave
from toolkit.checkpoint.shard import Box, Shard, TensorKey
from toolkit.checkpoint_folder import committed_checkpoints, step_folders, step_name
from toolkit.testing.tiny import tiny_plan
from toolkit.train.memory_snapshots import MemorySnapshots
from toolkit.train.rank_exchange import BACKGROUND_SEND_SHARE, RankExchange, open_exchange
from toolkit.train.snapshot_restore import find_snapshot
from toolkit.train.snapshot_store import SnapshotStore
from toolkit.train.state import StateWriter


class CountingEngine(FakeEngine):
    """Its state is one number, that of the last pass over the steps."""

    number = 1.0

    def shards(self) -> list[Shard]:
        return [Shard(TensorKey("param", "weight"), (1,), Box((0,), (1,)), torch.tensor([self.number]))]


def test_rollback_removes_the_snapshots_and_repeated_steps_are_kept_again(tmp_path: Path) -> None:
    engine, stream = CountingEngine(), SimpleNamespace(fingerprint=lambda: {}, state=lambda step: {})
    memory = tmp_path / "memory"
    memory.mkdir()
    context = context_of(tiny_plan(checkpoint__memory_every=2), tmp_path)
    writer = StateWriter(context, engine, stream, lambda: None)  # type: ignore[arg-type]
    snapshots = MemorySnapshots(writer, memory, open_exchange(0, 1, 1))
    for step in range(1, 5):
        snapshots.on_step(completed_step(step))
    snapshots.on_rollback(tmp_path / "checkpoints" / "step-00000001")
    assert committed_checkpoints(memory) == {}
    engine.number = 2.0
    for step in range(2, 5):
        snapshots.on_step(completed_step(step))
    snapshots.on_end(4)
    (newest,) = committed_checkpoints(memory).values()
    (part,) = newest.glob("*.safetensors")
    assert (newest.name, load_file(part)) == ("step-00000004", {"param:weight:0": torch.tensor([2.0])})


@pytest.mark.parametrize(("nodes", "saved"), [(2, [2, 6]), (1, [2, 4, 6])])
def test_snapshot_is_left_out_while_the_one_before_is_copied_to_another_node(
    nodes: int,
    saved: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copied: dict[int, Future[float]] = {}

    def save(self: SnapshotStore, step: int, *_: object, **__: object) -> PendingSave:
        copied[step] = Future()
        if nodes == 1:
            Timer(0.1, copied[step].set_result, [0.1]).start()  # training waits for it
        return PendingSave(tmp_path, copied[step])

    monkeypatch.setattr(SnapshotStore, "save", save)
    engine, stream = CountingEngine(), SimpleNamespace(fingerprint=lambda: {}, state=lambda step: {})
    context = context_of(tiny_plan(checkpoint__memory_every=2), tmp_path)
    writer = StateWriter(context, engine, stream, lambda: None)  # type: ignore[arg-type]
    snapshots = MemorySnapshots(writer, tmp_path, RankExchange(0, nodes, 1, None))
    for step in range(1, 6):
        snapshots.on_step(completed_step(step))
    assert ("no snapshot of step 4" in caplog.text) is (nodes == 2)
    if nodes == 2:
        copied[2].set_result(0.1)
    snapshots.on_step(completed_step(6))
    assert list(copied) == saved


def test_snapshot_on_a_disk_with_read_errors_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    engine, stream = CountingEngine(), SimpleNamespace(fingerprint=lambda: {}, state=lambda step: {})
    memory = tmp_path / "memory"
    memory.mkdir()
    context = context_of(tiny_plan(checkpoint__memory_every=2), tmp_path)
    context.directory.metrics_file.write_text('{"step": 2}\n')
    exchange = open_exchange(0, 1, 1)
    snapshots = MemorySnapshots(
        StateWriter(context, engine, stream, lambda: None),  # type: ignore[arg-type]
        memory,
        exchange,
    )
    snapshots.on_step(completed_step(2))
    snapshots.on_end(2)
    find = lambda: find_snapshot(context.plan, context.directory, memory, exchange, None)  # noqa: E731
    assert find() is not None, "control"
    monkeypatch.setattr(os, "preadv", fail)
    assert find() is None
    assert "is damaged and not used: [Errno 5] Input/output error" in caplog.text


def test_copy_that_training_waits_for_is_sent_at_full_speed(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, RankExchange(0, 1, 1, None))
    assert store._send_share == BACKGROUND_SEND_SHARE
    engine, stream = CountingEngine(), SimpleNamespace(fingerprint=lambda: {}, state=lambda step: {})
    context = context_of(tiny_plan(checkpoint__memory_every=2), tmp_path)
    writer = StateWriter(context, engine, stream, lambda: None)  # type: ignore[arg-type]
    snapshots = MemorySnapshots(writer, tmp_path, open_exchange(0, 1, 1))
    snapshots.on_step(completed_step(2))
    assert snapshots._store._send_share == BACKGROUND_SEND_SHARE
    snapshots.on_end(2)
    assert snapshots._store._send_share == 1.0


def test_snapshots_after_a_step_are_removed(tmp_path: Path) -> None:
    for step in (4, 6):
        (tmp_path / step_name(step)).mkdir()
    store = SnapshotStore(tmp_path, RankExchange(0, 1, 1, None))
    store.remove_after(4)
    assert list(step_folders(tmp_path)) == [4]
    SnapshotStore(tmp_path, RankExchange(1, 2, 2, None)).remove_after(-1)
    assert list(step_folders(tmp_path)) == [4], "the first rank of a node removes"
