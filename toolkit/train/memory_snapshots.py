"""Snapshots of the state in memory: ``checkpoint.memory_every``.

They are checkpoints in a folder on tmpfs (``rundir/memory.py``), written by the same code in the background.
A restart by the supervisor continues from the newest sound one if it is newer than the newest checkpoint.
They change nothing of the run's checkpoints on disk.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.checkpoint import manifest
from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.directory import load_manifest
from toolkit.checkpoint.file_reader import verify_pieces
from toolkit.checkpoint.online.store import CheckpointStore, PendingSave
from toolkit.checkpoint.planner import boxes_to_write
from toolkit.checkpoint.shard import Shard
from toolkit.checkpoint_folder import committed_checkpoints, newest_checkpoint, step_of
from toolkit.engine.rank_sync import FlagReduce
from toolkit.hooks import CompletedStep, Hook
from toolkit.plan.types import RunPlan
from toolkit.progress import quantity
from toolkit.rundir.directory import RunDirectory
from toolkit.step_parts import CHECKPOINT
from toolkit.train.nonfinite import all_finite
from toolkit.train.state import StateWriter

log = logging.getLogger(__name__)

COPIES = 2  # a snapshot is complete before the previous one is removed


class MemorySnapshots(Hook):
    """Take a snapshot every ``checkpoint.memory_every`` steps.

    They end, with a warning, if the file system has no room for two of them or if one cannot be written; the
    ranks agree on that before each snapshot. A state that is not finite is not kept.

    Args:
        folder: on tmpfs.
        on_blocked: receives the seconds for which training waited.
    """

    part = CHECKPOINT

    def __init__(
        self, writer: StateWriter, folder: Path, *, on_blocked: Callable[[float], None] = lambda seconds: None
    ) -> None:
        self._writer, self._folder, self._on_blocked = writer, folder, on_blocked
        self._context = writer.context
        self._every = writer.context.plan.config.checkpoint.memory_every
        self._store = CheckpointStore(folder, keep_last=1)
        self._pending: PendingSave | None = None
        self._fits: bool | None = None  # None: not known before the first snapshot
        self._ended = False

    def on_step(self, completed: CompletedStep) -> None:
        ends = completed.last or completed.consensus.stops  # then the state is saved on disk
        if completed.step % self._every == 0 and not ends and not self._ended:
            start = time.monotonic()
            self._take(completed.step)
            self._on_blocked(time.monotonic() - start)

    def on_rollback(self, path: Path) -> None:
        """Remove the snapshots, which are of steps that the run goes back behind."""
        self._wait()
        self._store.forget_last_save()
        # Another rank may still look for the snapshot that it has written.
        self._context.all_reduce_flags([0])
        if self._context.rank == 0:
            for folder in committed_checkpoints(self._folder).values():
                shutil.rmtree(folder)

    def on_end(self, step: int) -> None:
        self._wait()

    def _take(self, step: int) -> None:
        problem = self._wait()
        shards = self._writer.engine.shards()
        if self._fits is None:
            problem = problem or self._find_lack_of_room(shards)
            self._fits = problem is None
        failed, nonfinite = self._context.all_reduce_flags(
            [problem is not None, not all_finite(shard.data for shard in shards)]
        )
        if failed:
            self._ended = True
            if self._context.rank == 0:
                log.warning("no more snapshots in memory: %s", problem or "another rank could not write")
            return
        if not nonfinite:
            self._pending = self._writer.save(self._store, step, shards, background=True)

    def _wait(self) -> str | None:
        """Wait for the snapshot that is being written; return why it failed."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.wait()
        except Exception as error:  # noqa: BLE001  training goes on without snapshots
            return f"{type(error).__name__}: {error}"
        return None

    def _find_lack_of_room(self, shards: Sequence[Shard]) -> str | None:
        """Return why two snapshots of all ranks of this machine do not fit, or None."""
        own = sum(box.numel * shard.data.element_size() for shard in shards for box in boxes_to_write(shard))
        needed = COPIES * own * self._context.ranks
        found = os.statvfs(self._folder)
        present = sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())
        room = found.f_bavail * found.f_frsize + present
        if needed <= room:
            return None
        return (
            f"{self._folder.parent} has room for {quantity(room, 'B')}, and two snapshots of "
            f"{self._context.ranks} ranks need up to {quantity(needed, 'B')} (checkpoint.memory_every)"
        )


def find_snapshot(
    plan: RunPlan, directory: RunDirectory, memory: Path | None, rank: int, all_reduce_flags: FlagReduce
) -> Path | None:
    """Return the newest sound snapshot that is newer than the newest checkpoint; None if there is none.
    Collective.

    Ranks divide the pieces of a snapshot among themselves and verify their hashes. A damaged snapshot is
    logged.
    """
    if memory is None or plan.config.resume != "auto":
        return None
    newest = newest_checkpoint(directory.checkpoints)
    saved = -1 if newest is None else step_of(newest)
    snapshots = [
        folder for step, folder in committed_checkpoints(memory).items() if saved is not None and step > saved
    ]
    for folder in reversed(snapshots):
        damage = _find_damage(folder, rank, plan.world.ranks)
        if not all_reduce_flags([damage is not None])[0]:
            return folder
        if rank == 0:
            log.warning("the snapshot %s is damaged and not used: %s", folder, damage or "see another rank")
    return None


def _find_damage(folder: Path, rank: int, ranks: int) -> str | None:
    try:
        found = load_manifest(folder)
        manifest.check_files(folder, found.files)
        verify_pieces(folder, found.pieces[rank::ranks])
    except DamagedFile as error:
        return error.seen
    return None
