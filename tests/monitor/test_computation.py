"""The rank that computes wrong values is found from hashes of two forward passes.

pytest tests/monitor/test_computation.py
"""

from __future__ import annotations

import pytest

from toolkit.monitor.alert import Level
from toolkit.monitor.computation import RankForward, find_difference, make_alert

MODULES = ("embed", "layers.0", "layers.1", "loss")
PLACE = (0, 0, 0)


def forward(rank: int, *wrong: tuple[int, str, int], place: tuple[int, int, int] = PLACE) -> RankForward:
    """What a rank computed.

    Args:
        wrong: a pass, the first module whose output is wrong in it, and the number that makes it so.
    """
    passes = [{name: number for number, name in enumerate(MODULES)} for _ in range(2)]
    for which, first, change in wrong:
        for name in MODULES[MODULES.index(first) :]:
            passes[which][name] += change
    return RankForward(rank, place, f"node{rank // 2}", f"cuda:{rank % 2}", (passes[0], passes[1]))


def always(first: str, change: int = 100) -> tuple[tuple[int, str, int], ...]:
    return (0, first, change), (1, first, change)


def test_equal_ranks_have_no_difference() -> None:
    assert find_difference([forward(rank) for rank in range(3)]) is None
    assert find_difference([forward(0)]) is None


@pytest.mark.parametrize("faulty", range(3))
def test_third_rank_decides_which_is_wrong(faulty: int) -> None:
    forwards = [forward(rank, *(always("layers.1") if rank == faulty else ())) for rank in range(3)]
    found = find_difference(forwards)
    assert found is not None
    assert (found.module, found.faulty, found.unstable) == ("layers.1", (forwards[faulty],), ())
    alert = make_alert(20, found, 10)
    assert (alert.name, alert.fault, alert.level) == ("replicas-differ", "computation", Level.ERROR)
    assert alert.where == f"rank {faulty}"
    one, other = (rank for rank in range(3) if rank != faulty)
    assert alert.cause == (
        f"rank {faulty} (node{faulty // 2}, cuda:{faulty % 2}) computed another output of layers.1 from one "
        f"micro-batch than rank {one} (node{one // 2}, cuda:{one % 2}), "
        f"rank {other} (node{other // 2}, cuda:{other % 2})"
    )
    assert f"cluster.slurm.exclude=node{faulty // 2})" in alert.next_step
    assert "a checkpoint before step 11" in alert.next_step
    assert found.confirmed_faulty_hosts == (f"node{faulty // 2}",)


def test_rank_without_peers_does_not_show_whether_its_host_or_its_kernels_are_wrong() -> None:
    found = find_difference([forward(0, (0, "embed", 1))])
    assert found is not None
    assert found.faulty
    assert found.confirmed_faulty_hosts == ()


def test_two_ranks_that_always_differ_do_not_show_which_is_wrong() -> None:
    found = find_difference([forward(0), forward(1, *always("embed"))])
    assert found is not None
    assert found.confirmed_faulty_hosts == ()
    assert found.faulty == ()
    alert = make_alert(20, found, None)
    assert alert.where == "ranks 0, 1"
    assert alert.cause.endswith("one of them is wrong")
    assert "without node0 (Slurm: cluster.slurm.exclude=node0)" in alert.next_step
    assert "from before the fault" in alert.next_step


def test_remedy_excludes_all_suspected_hosts_in_one_word() -> None:
    found = find_difference([forward(1), forward(2, *always("embed"))])
    assert found is not None
    next_step = make_alert(20, found, None).next_step
    assert """without node0, node1 (Slurm: 'cluster.slurm.exclude="node0,node1"')""" in next_step


@pytest.mark.parametrize("which", [0, 1])
def test_of_two_ranks_the_one_that_disagrees_with_itself_is_wrong(which: int) -> None:
    found = find_difference([forward(0), forward(1, (which, "layers.0", 7))])
    assert found is not None
    assert [peer.rank for peer in found.faulty] == [1]
    assert (
        "rank 1 (node0, cuda:1) computed two different outputs of layers.0" in make_alert(1, found, 0).cause
    )


def test_single_rank_that_disagrees_with_itself_is_wrong() -> None:
    found = find_difference([forward(0, (1, "layers.0", 7))])
    assert found is not None
    assert [peer.rank for peer in found.faulty] == [0]


def test_ranks_that_all_disagree_with_themselves_have_nondeterministic_kernels() -> None:
    found = find_difference([forward(rank, (1, "layers.0", 7 + rank)) for rank in range(3)])
    assert found is not None
    assert found.faulty == ()
    assert "kernels are not deterministic" in make_alert(5, found, 0).cause


def test_majority_is_more_than_half() -> None:
    pairs = [forward(rank, *(always("layers.0") if rank > 1 else ())) for rank in range(4)]
    found = find_difference(pairs)
    assert found is not None
    assert found.faulty == ()


def test_rank_is_the_one_at_whose_place_the_first_difference_is() -> None:
    """A wrong value on tensor rank 1 reaches tensor rank 0 through the next all-reduce."""
    found = find_difference(
        [
            *(forward(rank, place=(0, 0, 0)) for rank in (0, 2)),
            *(forward(rank, place=(0, 0, 1)) for rank in (1, 3)),
            forward(4, *always("layers.1"), place=(0, 0, 0)),
            forward(5, *always("layers.0"), place=(0, 0, 1)),
            *(forward(rank, *always("embed"), place=(1, 0, 0)) for rank in (7,)),
            *(forward(rank, place=(1, 0, 0)) for rank in (6, 8)),
        ]
    )
    assert found is not None
    assert found.module == "layers.0 of pipeline stage 0", "not a later stage"
    assert [peer.rank for peer in found.faulty] == [5]


def test_module_that_only_one_rank_called_is_a_difference() -> None:
    wrong = forward(1)
    fewer = {name: value for name, value in wrong.passes[0].items() if name != "layers.1"}
    found = find_difference([forward(0), forward(2), RankForward(1, PLACE, "n", "cpu", (fewer, fewer))])
    assert found is not None
    assert (found.module, [peer.rank for peer in found.faulty]) == ("layers.1", [1])
