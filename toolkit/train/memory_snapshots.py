"""Snapshots of the state in memory: ``checkpoint.memory_every``.

They are checkpoints in folders of the nodes (``rundir/snapshot_folder.py``), written in the background
(``train/snapshot_store.py``), with a copy of each file on another node if there are several. A restart
continues from the newest sound one if it is newer than the newest checkpoint (``train/snapshot_restore.py``).
They do not affect the run's checkpoints on disk.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.checkpoint.online.store import PendingSave
from toolkit.checkpoint.planner import boxes_to_write
from toolkit.checkpoint.shard import Shard
from toolkit.hooks import CompletedStep, Hook
from toolkit.plan.saves import snapshot_copies
from toolkit.progress import quantity
from toolkit.step_parts import CHECKPOINT
from toolkit.train.nonfinite import all_finite
from toolkit.train.rank_exchange import RankExchange
from toolkit.train.snapshot_store import SnapshotStore
from toolkit.train.state import StateWriter, namespace

log = logging.getLogger(__name__)


class MemorySnapshots(Hook):
    """Take a snapshot every ``checkpoint.memory_every`` steps.

    If a node has no room for them, or if one cannot be written, a warning is logged and no more are taken;
    the ranks agree on that before each snapshot. No snapshot is taken of a state that is not finite. On
    several nodes a snapshot is skipped while the previous one is still being copied; on one node training
    waits.

    Args:
        folder: this node's.
        on_blocked: receives the seconds for which training waited.
    """

    part = CHECKPOINT

    def __init__(
        self,
        writer: StateWriter,
        folder: Path,
        exchange: RankExchange,
        *,
        on_blocked: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._writer, self._exchange, self._on_blocked = writer, exchange, on_blocked
        self._context = writer.context
        self._every = writer.context.plan.config.checkpoint.memory_every
        self._store = SnapshotStore(folder, exchange)
        self._pending: PendingSave | None = None
        self._fits: bool | None = None  # None: not known before the first snapshot
        self._ended = self._warned = False

    def on_step(self, completed: CompletedStep) -> None:
        ends = completed.last or completed.consensus.stops  # then the state is saved on disk
        if completed.step % self._every == 0 and not ends and not self._ended:
            start = time.monotonic()
            self._take(completed.step)
            self._on_blocked(time.monotonic() - start)

    def on_rollback(self, path: Path) -> None:
        """Remove the snapshots, which were taken after the checkpoint to which the run goes back."""
        self._wait()
        # Another rank of this node may still write to the folder.
        self._context.all_reduce_flags([0])
        self._store.remove_after(-1)

    def on_end(self, step: int) -> None:
        self._wait()

    def remove_after(self, step: int) -> None:
        """Remove the snapshots of later steps from all nodes, after ``on_end``. Collective."""
        self._store.remove_after(step)
        self._context.all_reduce_flags([0])

    def _take(self, step: int) -> None:
        busy = self._exchange.nodes > 1 and self._pending is not None and not self._pending.done()
        problem = None if busy else self._wait()
        shards = self._writer.engine.shards()
        if self._fits is None:
            problem = problem or self._find_lack_of_room(shards)
            self._fits = problem is None
        taken = problem is None and not busy
        own_nonfinite = taken and not all_finite(shard.data for shard in shards)
        failed, nonfinite, delayed = self._context.all_reduce_flags(
            [problem is not None, own_nonfinite, busy]
        )
        if failed:
            self._ended = True
            if self._context.rank == 0:
                log.warning("no more snapshots in memory: %s", problem or "another rank could not write")
        elif delayed:
            if self._context.rank == 0 and not self._warned:
                log.warning(
                    "no snapshot of step %d in memory: the one before is still being copied to the other "
                    "nodes; a larger checkpoint.memory_every leaves more time (reported once)",
                    step,
                )
            self._warned = True
        elif not nonfinite:
            self._pending = self._store.save(
                step,
                shards,
                self._writer.collect_scalars(step),
                namespace=namespace(self._context.plan),
                attempt=self._context.attempt,
            )

    def _wait(self) -> str | None:
        """Wait for the snapshot that is being written; return why it failed."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                self._store.copy_at_full_speed()
                pending.wait()
        except Exception as error:  # noqa: BLE001  training continues without snapshots
            return f"{type(error).__name__}: {error}"
        return None

    def _find_lack_of_room(self, shards: Sequence[Shard]) -> str | None:
        """Return why the snapshots of this node's ranks, and its copies of another node's, do not fit; None
        if they fit.
        """
        own = sum(box.numel * shard.data.element_size() for shard in shards for box in boxes_to_write(shard))
        exchange, folder = self._exchange, self._store.folder
        ranks = min(exchange.ranks, exchange.ranks_per_node)
        needed = snapshot_copies(exchange.nodes) * own * ranks
        found = os.statvfs(folder)
        present = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        room = found.f_bavail * found.f_frsize + present
        if needed <= room:
            return None
        copies = "" if exchange.nodes == 1 else " with copies of those of another node"
        return (
            f"{folder.parent} has room for {quantity(room, 'B')}, and two snapshots of {ranks} ranks{copies} "
            f"need up to {quantity(needed, 'B')} (checkpoint.memory_every)"
        )
