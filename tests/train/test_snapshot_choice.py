"""Which snapshot in memory a restart continues from, and which node sends which file.

pytest tests/train/test_snapshot_choice.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from toolkit.train.snapshot_choice import (
    FoundSnapshot,
    RunProgress,
    Transfer,
    choose_snapshot,
    merge_rank_findings,
    plan_transfers,
)

FILES = ("a", "b", "c")  # of the nodes 0, 1 and 2
PROGRESS = RunProgress(saved=90, last_row=125, skipped=())


def found(step: int, files: Collection[str], digest: str = "x") -> FoundSnapshot:
    return FoundSnapshot(step=step, digest=digest, needed=frozenset(FILES), intact=frozenset(files))


def ring(step: int, digest: str = "x") -> list[list[FoundSnapshot]]:
    """Three nodes, each with its own file and that of the node before it."""
    return [[found(step, (FILES[node], FILES[node - 1]), digest)] for node in range(3)]


def chosen_step(nodes: Sequence[Sequence[FoundSnapshot]], progress: RunProgress = PROGRESS) -> int | None:
    chosen = choose_snapshot(nodes, progress).chosen
    return None if chosen is None else chosen.step


def test_any_one_node_may_be_lost_and_its_files_come_from_the_partner() -> None:
    for lost in range(3):
        nodes = ring(120)
        nodes[lost] = []
        choice = choose_snapshot(nodes, PROGRESS)
        assert choice.chosen is not None
        assert choice.files[lost] == frozenset()
        wanted = [{FILES[node]} for node in range(3)]
        assert plan_transfers(choice.files, wanted) == (Transfer(FILES[lost], (lost + 1) % 3, lost),)


def test_two_neighbours_lost_mean_the_disk() -> None:
    nodes = ring(120)
    nodes[0], nodes[1] = [], []
    choice = choose_snapshot(nodes, PROGRESS)
    assert choice.chosen is None
    assert choice.rejected == ((120, "is not used: no node has its file a"),)


def test_damaged_copy_means_the_older_snapshot_or_the_disk() -> None:
    damaged = replace(found(120, "b"), damage=("part b differs",))
    nodes = [[], [damaged, found(110, "ab")], [found(120, "c"), found(110, "bc")]]
    choice = choose_snapshot(nodes, PROGRESS)
    assert choice.chosen is not None
    assert choice.chosen.step == 110
    assert choice.rejected == ((120, "is damaged and not used: part b differs"),)
    assert chosen_step([[], [damaged], [found(120, "c")]]) is None


def test_snapshot_is_newer_than_the_newest_checkpoint() -> None:
    assert chosen_step(ring(120)) == 120
    assert chosen_step(ring(120), replace(PROGRESS, saved=120)) is None
    assert chosen_step(ring(120), replace(PROGRESS, saved=-1)) == 120


def test_newest_snapshot_that_all_nodes_completed_is_chosen() -> None:
    """A crash between the two agreements: node 2 has not renamed the newer one."""
    nodes = ring(110)
    for node in (0, 1):
        nodes[node].append(found(120, (FILES[node],)))
    assert chosen_step(nodes) == 110
    nodes[2].append(found(120, "c"))
    assert chosen_step(nodes) == 120


def test_files_of_two_passes_over_a_step_are_not_mixed() -> None:
    first, second = ring(120, "first"), ring(120, "second")
    assert chosen_step([first[0], second[1], []]) is None
    assert chosen_step([first[0], second[1], first[2]]) == 120


def test_node_that_was_away_does_not_bring_back_steps_that_the_run_does_not_have() -> None:
    """It has all files of step 120; meanwhile the others went back to the disk and made 5 steps."""
    choice = choose_snapshot([[found(120, FILES)], []], replace(PROGRESS, last_row=95))
    assert choice.chosen is None
    assert choice.rejected == ((120, "is not used: the metrics of the run end at step 95"),)


def test_snapshot_from_before_a_rollback_is_not_used() -> None:
    after = replace(PROGRESS, skipped=((400, 420),))
    assert chosen_step(ring(120), after) is None
    skipped = [[replace(each, skipped=((100, 110), (400, 420))) for each in node] for node in ring(120)]
    assert chosen_step(skipped, after) == 120


def test_file_is_intact_on_a_node_if_every_rank_found_its_share_intact() -> None:
    whole, part = found(120, "ab"), replace(found(120, "a"), damage=("part b differs",))
    (merged,) = merge_rank_findings([[whole], [part]])
    assert (merged.intact, merged.damage) == (frozenset("a"), ("part b differs",))
    (unverified,) = merge_rank_findings([[whole], []])
    assert unverified.intact == frozenset()


def test_nodes_share_the_sending() -> None:
    files = [frozenset("abcd"), frozenset("abcd"), frozenset()]
    transfers = plan_transfers(files, [(), (), "abcd"])
    assert [(each.file, each.source) for each in transfers] == [("a", 0), ("b", 1), ("c", 0), ("d", 1)]
    assert plan_transfers(files, ["ab", "cd", ""]) == ()
