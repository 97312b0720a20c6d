"""Write snapshots of the state to memory or a local disk, with a copy of each file on a partner node.

Every node has its own folder (``rundir/snapshot_folder.py``). A snapshot is a checkpoint whose files
are spread over the nodes: each node has the files of its own ranks, and copies of those of the node before it
in a ring:

    node 0: step-00000120/ manifest.json, part-00000.safetensors and a copy of part-00002.safetensors
    node 1: step-00000120/ manifest.json, part-00001.safetensors and a copy of part-00000.safetensors
    node 2: step-00000120/ manifest.json, part-00002.safetensors and a copy of part-00001.safetensors

with one rank on each node. So no file is lost with a node, or with several nodes that are not neighbours in
the ring. All ranks carry out this sequence in the background:

    1. write the rank's own file, and exchange the lists of pieces
    2. send the file to the partner node, and receive that of the node before
    3. write the manifest, which is equal on all nodes, and rename the folder to its final name
    4. remove older snapshots

No rank begins a step before all ranks have completed the step before it. So a crash at any time leaves the
older snapshot, the newer one, or both, complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from toolkit import checkpoint_folder
from toolkit.checkpoint import manifest
from toolkit.checkpoint.catalog import TensorPiece
from toolkit.checkpoint.manifest import FileRecord, Manifest
from toolkit.checkpoint.online.commit import SaveFailed
from toolkit.checkpoint.online.store import PendingSave, run_in_thread
from toolkit.checkpoint.online.writing import HostSnapshot, WriteItem, items_to_write, write_data_file
from toolkit.checkpoint.planner import find_coverage_errors
from toolkit.checkpoint.shard import Shard
from toolkit.files import write_whole
from toolkit.train.rank_exchange import BACKGROUND_SEND_SHARE, FilePart, RankExchange

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank has written, and on rank 0 the other contents of the manifest."""

    record: FileRecord | None
    pieces: Sequence[TensorPiece]
    scalars: Mapping[str, Any]
    software: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """One rank's part of one snapshot. ``name`` is equal on all ranks, and different for every snapshot."""

    step: int
    namespace: str
    name: str
    items: Sequence[WriteItem]
    scalars: Mapping[str, Any]


class SnapshotStore:
    """The snapshots of one run. Only the newest one is kept. Creating the object is collective.

    Args:
        folder: this node's.
        exchange: its methods are called from the writing thread only, while a save is pending.
    """

    def __init__(self, folder: Path, exchange: RankExchange) -> None:
        self.folder, self._exchange = folder, exchange
        self._host, self._saves = HostSnapshot(), 0
        self._send_share = BACKGROUND_SEND_SHARE
        self._remove_others(None)
        exchange.gather(None)

    def save(
        self,
        step: int,
        shards: Sequence[Shard],
        scalars: Mapping[str, object],
        *,
        namespace: str,
        attempt: int,
    ) -> PendingSave:
        """Copy the state after ``step`` optimizer steps to host memory, and write it in a thread. Every rank
        calls it, after the save before has ended.

        ``PendingSave.wait`` raises SaveFailed on every rank if one could not write or copy.

        Args:
            scalars: plain JSON types; those of rank 0 are recorded.
            attempt: number of this start of the run.
        """
        self._saves += 1
        self._send_share = BACKGROUND_SEND_SHARE
        save = _Save(
            step=step,
            namespace=namespace,
            name=f"{checkpoint_folder.step_name(step)}-attempt-{attempt:03d}-{self._saves}",
            items=self._host.take(items_to_write(shards)),
            scalars=dict(scalars),
        )
        target = self.folder / checkpoint_folder.step_name(step)
        size = sum(item.data.numel() * item.data.element_size() for item in save.items)
        return PendingSave(target, run_in_thread(lambda: self._write(save), f"snapshot-{step}"), size)

    def copy_at_full_speed(self) -> None:
        """Send what the pending save still copies without pauses, because training waits for it."""
        self._send_share = 1.0

    def remove_after(self, step: int) -> None:
        """Remove this node's snapshots of later steps. No save is pending on any of its ranks."""
        if self._exchange.local_rank == 0:
            for number, folder in checkpoint_folder.step_folders(self.folder).items():
                if number > step:
                    shutil.rmtree(folder)

    def _write(self, save: _Save) -> None:
        temporary = self.folder / f"{checkpoint_folder.TEMPORARY}{save.name}"
        try:
            parts = self._agree(save, lambda: self._write_part(save, temporary))
            self._agree(save, lambda: self._copy(temporary, parts))
            self._agree(save, lambda: self._commit(save, temporary, parts))
        except SaveFailed:
            if self._exchange.local_rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        # No rank begins the next snapshot before the folders of this node have been removed.
        self._agree(save, lambda: self._remove_others(save.step))

    def _agree(self, save: _Save, work: Callable[[], T]) -> list[T]:
        """Return the results of ``work`` on all ranks. Raises SaveFailed on all if it failed on one."""
        done: T | None = None
        error: str | None = None
        try:
            done = work()
        except Exception as failed:  # noqa: BLE001  the other ranks wait for this one
            error = f"rank {self._exchange.rank}: {type(failed).__name__}: {failed}"
        outcomes = self._exchange.gather((done, error))
        failures = [error for _, error in outcomes if error is not None]
        if failures:
            raise SaveFailed(f"the snapshot of step {save.step} was not written: {failures[0]}")
        return [cast("T", done) for done, _ in outcomes]

    def _write_part(self, save: _Save, temporary: Path) -> _Part:
        temporary.mkdir(exist_ok=True)
        scalars, software = ({}, {}) if self._exchange.rank else (save.scalars, manifest.software_versions())
        if not save.items:
            return _Part(None, (), scalars, software)
        record, pieces = write_data_file(
            temporary / f"part-{self._exchange.rank:05d}.safetensors",
            save.items,
            {"format": manifest.FORMAT, "namespace": save.namespace, "step": str(save.step)},
            on_piece=lambda: None,
            on_sync=lambda: None,
        )
        return _Part(record, pieces, scalars, software)

    def _copy(self, temporary: Path, parts: Sequence[_Part]) -> None:
        """Send this rank's file to the partner node, and receive that of the node before. Collective."""
        exchange = self._exchange
        if exchange.nodes == 1:
            return
        own, other = parts[exchange.rank].record, parts[exchange.previous_rank].record
        exchange.transfer(
            None if own is None else FilePart(temporary / own.file, own.bytes, exchange.next_rank),
            None if other is None else FilePart(temporary / other.file, other.bytes, exchange.previous_rank),
            lambda: self._send_share,
        )

    def _commit(self, save: _Save, temporary: Path, parts: Sequence[_Part]) -> None:
        if self._exchange.local_rank != 0:
            return
        written = Manifest(
            namespace=save.namespace,
            step=save.step,
            ranks=self._exchange.ranks,
            scalars=parts[0].scalars,
            software=parts[0].software,
            files=tuple(part.record for part in parts if part.record is not None),
            pieces=tuple(piece for part in parts for piece in part.pieces),
        )
        wrong = find_coverage_errors(written.by_tensor())
        assert not wrong, f"inconsistent: {wrong[0]}"
        write_whole(temporary / manifest.NAME, manifest.encode(written), durable=False)
        target = self.folder / checkpoint_folder.step_name(save.step)
        if target.exists():  # from an earlier attempt, or from before a rollback
            target.rename(self.folder / f"{checkpoint_folder.REMOVED}{save.name}")
        temporary.rename(target)

    def _remove_others(self, step: int | None) -> None:
        """Remove what dead attempts left and, if ``step`` is given, the snapshots of other steps."""
        if self._exchange.local_rank != 0:
            return
        for entry in self.folder.iterdir():
            left = entry.name.startswith((checkpoint_folder.TEMPORARY, checkpoint_folder.REMOVED))
            other = step is not None and checkpoint_folder.step_of(entry) not in (None, step)
            if left or other:
                shutil.rmtree(entry, ignore_errors=True)
