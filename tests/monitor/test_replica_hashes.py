"""Differing replicas are found from hashes.

pytest tests/monitor/test_replica_hashes.py
"""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.monitor.alert import Level
from toolkit.monitor.replica_hashes import (
    ReplicaDetector,
    TensorSet,
    find_differences,
    hash_block,
    hash_row,
    pack_names,
    unpack_names,
)

NAMES = tuple(f"layers.{number}.weight" for number in range(1000))


def world(ranks: int, groups: int = 1, tensors: int = 1000) -> tuple[list[TensorSet], list[np.ndarray]]:
    """Build ``groups`` sets of replicas on neighbouring ranks, with hashes that are equal within a set."""
    random = np.random.default_rng(0)
    size = ranks // groups
    hashes = [random.integers(-(2**63), 2**63 - 1, tensors) for _ in range(groups)]
    sets = [TensorSet("weights", rank // size * size, NAMES[:tensors]) for rank in range(ranks)]
    return sets, [hashes[rank // size].copy() for rank in range(ranks)]


def gathered(sets: list[TensorSet], hashes: list[np.ndarray], slots: int = 3) -> np.ndarray:
    return np.stack(
        [hash_block([hash_row(found, values)], slots) for found, values in zip(sets, hashes, strict=True)]
    )


@pytest.mark.parametrize("number", [0, 1, 511, 999])
@pytest.mark.parametrize("rank", [0, 5, 7])
def test_differing_rank_and_tensor_are_named(rank: int, number: int) -> None:
    sets, hashes = world(8, groups=2)
    detector = ReplicaDetector(ranks_per_node=4)
    detector.add_sets([sets[0], sets[4]])
    assert detector.check(100, gathered(sets, hashes)) == []
    hashes[rank][number] ^= 1 << 40
    (alert,) = detector.check(200, gathered(sets, hashes))
    assert alert.level is Level.ERROR
    assert alert.where == f"rank {rank}"
    assert (
        alert.cause == f"weights of rank {rank} differ from those of the other 3 ranks that should be equal: "
        f"layers.{number}.weight"
    )
    assert "equal after step 100" in alert.evidence
    assert "resume=RUN_DIR/checkpoints/step-N of a checkpoint before step 101" in alert.next_step
    assert f"node {rank // 4} GPU {rank % 4}" in alert.next_step


def test_two_replicas_have_no_majority() -> None:
    sets, hashes = world(2)
    hashes[1][3] += 1
    (found,) = find_differences(gathered(sets, hashes))
    assert (found.odd, found.majority, found.number) == ((0, 1), False, 3)


def test_several_differing_tensors_and_ranks() -> None:
    sets, hashes = world(5)
    hashes[1][3] += 1
    hashes[4][3] += 5
    (found,) = find_differences(gathered(sets, hashes))
    assert (found.odd, found.majority, found.number) == ((1, 4), True, 3)
    hashes[4][9] += 1
    (found,) = find_differences(gathered(sets, hashes))
    assert found.number is None


def test_ranks_may_have_several_sets_or_none() -> None:
    rows = [
        hash_row(TensorSet("weights", 0, ("a", "b")), np.array([1, 2])),
        hash_row(TensorSet("tied weights", 0, ("c",)), np.array([3])),
    ]
    other = hash_row(TensorSet("tied weights", 0, ("c",)), np.array([4]))
    blocks = np.stack(
        [hash_block(rows, 2), hash_block([rows[0]], 2), hash_block([other], 2), hash_block([], 2)]
    )
    (found,) = find_differences(blocks)
    assert found.ranks == (0, 2)
    detector = ReplicaDetector(1)
    detector.add_sets([TensorSet("weights", 0, ("a", "b")), TensorSet("tied weights", 0, ("c",))])
    (alert,) = detector.check(7, blocks)
    assert alert.where == "ranks 0, 2"
    assert "no majority" in alert.cause


def test_packed_names_may_be_padded() -> None:
    sets = [TensorSet("weights", 3, NAMES), TensorSet("tied weights", 0, ("c",))]
    assert unpack_names(pack_names(sets, 3) + b"\0" * 50, 3) == [sets[0]]
    assert pack_names(sets, 2) == b""
    assert unpack_names(b"\0" * 10, 2) == []


def test_thousand_ranks_are_compared_in_milliseconds() -> None:
    sets, hashes = world(1024, groups=8, tensors=500)
    hashes[777][42] ^= 1
    (found,) = find_differences(gathered(sets, hashes))
    assert (found.odd, found.number) == ((777,), 42)
