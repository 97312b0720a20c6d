"""Find the snapshot in memory from which a restart continues, and send its files to the nodes that need them.

A node that was replaced has no files, and receives the copies that its partner has kept. Which files a node
reads depends on the layout of the engine, which may differ from that of the snapshot. So the engine is built
first, and loads twice: from a reader that only records which files it would read, and, once these files have
been sent, from the files.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from toolkit.checkpoint import manifest
from toolkit.checkpoint.catalog import DamagedFile
from toolkit.checkpoint.catalog_reader import CatalogReader
from toolkit.checkpoint.file_reader import verify_pieces
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.planner import ReadPlanner
from toolkit.checkpoint.shard import Shard, StateReader, TensorInfo, TensorKey
from toolkit.checkpoint.source import source_from_manifest
from toolkit.checkpoint_folder import TEMPORARY, committed_checkpoints, newest_checkpoint, step_name, step_of
from toolkit.data.order.skipped import SkippedSamples
from toolkit.files import write_whole
from toolkit.paths import Location
from toolkit.plan.types import RunPlan
from toolkit.progress import report_progress
from toolkit.rows import last_row
from toolkit.rundir.directory import RunDirectory
from toolkit.train.rank_exchange import FilePart, RankExchange, group_by_node
from toolkit.train.rollback import read_rollbacks
from toolkit.train.snapshot_choice import (
    FoundSnapshot,
    RunProgress,
    choose_snapshot,
    merge_rank_findings,
    plan_transfers,
)
from toolkit.train.state import DATA_STATE

log = logging.getLogger(__name__)


class SnapshotLost(RuntimeError):
    """A file of a snapshot could not be sent to a node. The snapshot is removed; a restart uses the disk."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The snapshot that a run continues from.

    Attributes:
        folder: on this node. It contains the manifest, but not necessarily all files.
        files: the intact files on each node.
    """

    folder: Path
    manifest: Manifest
    files: tuple[frozenset[str], ...]
    exchange: RankExchange

    def reader(self, plan: RunPlan) -> CatalogReader:
        """Return a reader of the files in ``folder``, which need not exist yet."""
        return source_from_manifest(self.folder, self.manifest, plan.shape).reader()

    def fetch(self, load: Callable[[StateReader], None]) -> None:
        """Receive every file that ``load`` reads and that this node does not have. Collective.

        Args:
            load: loads the state from a reader; it is called with one that leaves the tensors as they are.

        Raises:
            SnapshotLost: on all ranks, if a file could not be read or written on one.
        """
        needed = {record.file for record in self.manifest.files}
        if all(needed <= files for files in self.files):
            return
        recorder = _FileRecorder(self.manifest, self.folder)
        load(recorder)
        exchange, error = self.exchange, None
        wanted = [
            frozenset[str]().union(*of_node)
            for of_node in group_by_node(exchange.gather(recorder.files), exchange.ranks_per_node)
        ]
        sizes = {record.file: record.bytes for record in self.manifest.files}
        for number, transfer in enumerate(plan_transfers(self.files, wanted)):
            local = number % exchange.ranks_per_node
            source, target = (
                node * exchange.ranks_per_node + local for node in (transfer.source, transfer.target)
            )
            file, size = self.folder / transfer.file, sizes[transfer.file]
            report_progress(f"sending {transfer.file} of a snapshot to node {transfer.target}")
            try:
                if exchange.rank == source:
                    exchange.transfer(FilePart(file, size, target), None)
                elif exchange.rank == target:
                    partial = self.folder / f"{TEMPORARY}{transfer.file}"
                    exchange.transfer(None, FilePart(partial, size, source))
                    partial.rename(file)
            except OSError as failed:  # the other ranks continue with the next file
                error = error or f"rank {exchange.rank}: {failed}"
        failures = [failure for failure in exchange.gather(error) if failure is not None]
        if failures:
            if exchange.local_rank == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise SnapshotLost(f"the files of {self.folder.name} could not be sent to a node: {failures[0]}")


class _FileRecorder:
    """A reader that records the files that it would read."""

    def __init__(self, found: Manifest, folder: Path) -> None:
        self._catalog = found.catalog(folder)
        self._planner = ReadPlanner(self._catalog)
        self.files: set[str] = set()

    @property
    def tensors(self) -> Mapping[TensorKey, TensorInfo]:
        return self._catalog.tensors

    @property
    def scalars(self) -> Mapping[str, object]:
        return self._catalog.scalars

    def read(self, shards: Sequence[Shard]) -> None:
        self.files |= {read.piece.file for read in self._planner.plan(shards)}


def find_snapshot(
    plan: RunPlan, directory: RunDirectory, root: Path, exchange: RankExchange, stored: Location | None
) -> Snapshot | None:
    """Return the newest sound snapshot that is newer than the newest checkpoint; None if there is none.
    Collective.

    The ranks of a node divide the pieces of its files among themselves and verify their hashes. Damage is
    logged.

    Args:
        root: this node's folder for snapshots.
        stored: a checkpoint in the run's store that is later than those in its directory, if there is one.
    """
    if plan.config.resume != "auto":
        return None
    newest = stored or newest_checkpoint(directory.checkpoints)
    saved = -1 if newest is None else step_of(newest)
    found = {} if saved is None else _find_own(root, saved, exchange)
    row = last_row(directory.metrics_file)
    progress = RunProgress(
        saved=-1 if saved is None else saved,
        last_row=0 if row is None else int(row["step"]),
        skipped=tuple(rollback.skipped for rollback in read_rollbacks(directory.rollbacks_file)),
    )
    everyone = exchange.gather((list(found), progress))
    nodes = [
        merge_rank_findings(of_node)
        for of_node in group_by_node([own for own, _ in everyone], exchange.ranks_per_node)
    ]
    choice = choose_snapshot(nodes, everyone[0][1])  # all ranks take what rank 0 sees of the run
    if exchange.rank == 0:
        for step, why in choice.rejected:
            log.warning("the snapshot %s %s", root / step_name(step), why)
    if choice.chosen is None:
        return None
    loaded = {snapshot.key: own for snapshot, own in found.items()}.get(choice.chosen.key)
    return _share_manifest(root, choice.chosen.key, choice.files, nodes, loaded, exchange)


def _find_own(root: Path, saved: int, exchange: RankExchange) -> dict[FoundSnapshot, Manifest]:
    """Return the snapshots in ``root`` that are newer than step ``saved``, with this rank's findings."""
    found = {}
    for step, folder in committed_checkpoints(root).items():
        if step <= saved:
            continue
        try:
            loaded = manifest.load(folder)
        except (DamagedFile, OSError) as error:  # the other ranks wait for this one
            log.warning("the snapshot %s is damaged and not used: %s", folder, error)
            continue
        intact, damage = _verify_files(folder, loaded, exchange)
        state = loaded.scalars.get(DATA_STATE)
        skipped = SkippedSamples.from_state(state) if isinstance(state, dict) else SkippedSamples()
        described = FoundSnapshot(
            step=step,
            digest=xxhash.xxh3_128_hexdigest((folder / manifest.NAME).read_bytes()),
            needed=frozenset(record.file for record in loaded.files),
            intact=frozenset(intact),
            damage=tuple(damage),
            skipped=skipped.ranges,
        )
        found[described] = loaded
    return found


def _verify_files(folder: Path, loaded: Manifest, exchange: RankExchange) -> tuple[set[str], list[str]]:
    """Verify this rank's share of the pieces of each file in ``folder``.

    Returns:
        The files without damage, and a sentence about each damaged one.
    """
    intact, damage = set(), []
    for record in loaded.files:
        if not (folder / record.file).exists():
            continue
        pieces = [piece for piece in loaded.pieces if piece.file == record.file]
        try:
            manifest.check_files(folder, [record])
            verify_pieces(folder, pieces[exchange.local_rank :: exchange.ranks_per_node])
        except DamagedFile as error:
            damage.append(error.seen)
        except OSError as error:
            damage.append(str(error))
        else:
            intact.add(record.file)
    return intact, damage


def _share_manifest(
    root: Path,
    key: tuple[int, str],
    files: tuple[frozenset[str], ...],
    nodes: Sequence[Sequence[FoundSnapshot]],
    loaded: Manifest | None,
    exchange: RankExchange,
) -> Snapshot:
    """Write the manifest to the folder of each node that lacks it. Collective."""
    folder = root / step_name(key[0])
    have = [any(snapshot.key == key for snapshot in found) for found in nodes]
    if not all(have):
        source = have.index(True) * exchange.ranks_per_node
        loaded = exchange.broadcast(loaded, source)
        if exchange.local_rank == 0 and not have[exchange.node]:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier pass over this step
            folder.mkdir()
            write_whole(folder / manifest.NAME, manifest.encode(loaded), durable=False)
        exchange.gather(None)
    assert loaded is not None, "a node that found the snapshot has loaded its manifest on every rank"
    return Snapshot(folder, loaded, files, exchange)
