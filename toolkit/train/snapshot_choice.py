"""Decide which snapshot in memory a restart continues from, and which node sends which file to which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from toolkit.data.order.skipped import SkippedSamples

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSnapshot:
    """A snapshot in the folder of a node, as one rank or the whole node has verified it.

    Attributes:
        digest: hash of its manifest, which is equal on all nodes.
        needed: the files that the manifest names.
        intact: those of them that are in this folder, and in which no damage was found.
        damage: a sentence for each damaged file.
        skipped: the ranges of positions that the run had skipped when the snapshot was taken.
    """

    step: int
    digest: str
    needed: frozenset[str]
    intact: frozenset[str]
    damage: tuple[str, ...] = ()
    skipped: tuple[Range, ...] = ()

    @property
    def key(self) -> tuple[int, str]:
        return self.step, self.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The progress that the run's files record. It limits which snapshots may be used.

    Attributes:
        saved: step of the newest checkpoint; -1: there is none.
        last_row: step of the last row of metrics. The rows up to a snapshot are written before it, so a
            snapshot of a later step is obsolete: the run has since gone back, and a node that was not part of
            it at that time still has the snapshot.
        skipped: the ranges of positions that rollbacks skip. A snapshot that has not skipped them was taken
            before the rollback, and is obsolete.
    """

    saved: int
    last_row: int
    skipped: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class SnapshotChoice:
    """The snapshot to continue from, and why newer ones were rejected.

    Attributes:
        chosen: one of the nodes' descriptions of the snapshot; None: the checkpoint on disk is used.
        files: the intact files of the chosen snapshot on each node.
        rejected: the step of each newer snapshot that cannot be used, and the reason, which completes the
            sentence "the snapshot of step N ...".
    """

    chosen: FoundSnapshot | None
    files: tuple[frozenset[str], ...] = ()
    rejected: tuple[tuple[int, str], ...] = ()


def merge_rank_findings(found: Sequence[Sequence[FoundSnapshot]]) -> list[FoundSnapshot]:
    """Combine what the ranks of one node found; each of them has verified a share of every file.

    Args:
        found: the findings of each rank.
    """
    by_key: dict[tuple[int, str], list[FoundSnapshot]] = {}
    for of_rank in found:
        for snapshot in of_rank:
            by_key.setdefault(snapshot.key, []).append(snapshot)
    return [
        FoundSnapshot(
            step=same[0].step,
            digest=same[0].digest,
            needed=same[0].needed,
            # A rank that did not find the snapshot has verified nothing of it.
            intact=frozenset.intersection(*(each.intact for each in same))
            if len(same) == len(found)
            else frozenset(),
            damage=tuple(sentence for each in same for sentence in each.damage),
            skipped=same[0].skipped,
        )
        for same in by_key.values()
    ]


def choose_snapshot(nodes: Sequence[Sequence[FoundSnapshot]], progress: RunProgress) -> SnapshotChoice:
    """Choose the newest snapshot that belongs to the run and of which every file is intact on some node.

    Args:
        nodes: the snapshots of each node.
    """
    candidates = {snapshot.key: snapshot for found in nodes for snapshot in found}
    rejected: list[tuple[int, str]] = []
    for key in sorted(candidates, reverse=True):
        snapshot = candidates[key]
        if snapshot.step <= progress.saved:
            break
        if (obsolete := _why_obsolete(snapshot, progress)) is not None:
            rejected.append((snapshot.step, f"is not used: {obsolete}"))
            continue
        same = [next((each for each in found if each.key == key), None) for found in nodes]
        files = tuple(frozenset() if each is None else each.intact for each in same)
        lacking = sorted(snapshot.needed.difference(*files))
        if not lacking:
            return SnapshotChoice(snapshot, files, tuple(rejected))
        damage = [sentence for each in same if each is not None for sentence in each.damage]
        if damage:
            rejected.append((snapshot.step, f"is damaged and not used: {damage[0]}"))
        else:
            rejected.append((snapshot.step, f"is not used: no node has its file {lacking[0]}"))
    return SnapshotChoice(None, rejected=tuple(rejected))


def _why_obsolete(snapshot: FoundSnapshot, progress: RunProgress) -> str | None:
    """Return why a snapshot does not belong to the run, as a clause; None if it does."""
    if snapshot.step > progress.last_row:
        return f"the metrics of the run end at step {progress.last_row}"
    skipped = SkippedSamples().add(snapshot.skipped)
    if skipped.add(progress.skipped) != skipped:
        return "it was taken before a rollback"
    return None


@dataclass(frozen=True, slots=True)
class Transfer:
    """A file that one node sends to another."""

    file: str
    source: int
    target: int


def plan_transfers(
    files: Sequence[Collection[str]], wanted: Sequence[Collection[str]]
) -> tuple[Transfer, ...]:
    """Return the transfers that bring each node the files that it wants and does not have. If several nodes
    have a file, the one that has sent the fewest files so far sends it.

    Args:
        files, wanted: of each node. Every wanted file is on some node.
    """
    transfers, sent = [], Counter[int]()
    for target, names in enumerate(wanted):
        for name in sorted(set(names) - set(files[target])):
            source = min((node for node, own in enumerate(files) if name in own), key=lambda n: (sent[n], n))
            sent[source] += 1
            transfers.append(Transfer(name, source, target))
    return tuple(transfers)
