"""Times of collectives: textbook formulas, the choice of algorithm, and where groups lie in the network.

pytest tests/estimate/test_network.py
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.config.cluster import ClusterConfig, NetworkConfig
from toolkit.config.compose import compose
from toolkit.config.identity import identity
from toolkit.errors import ConfigError
from toolkit.estimate.interconnects import INTERCONNECTS, topology_of
from toolkit.estimate.network import (
    Collective,
    Group,
    Link,
    Topology,
    collective_seconds,
    group_along,
    strided_group,
)
from toolkit.layout.axes import ORDER, Axes, Axis
from toolkit.plan.devices import GPUS
from toolkit.plan.types import Device, World

GB = 1e9
FAST = Link(bandwidth=100 * GB, latency=0.0)
SLOW = Link(bandwidth=10 * GB, latency=0.0)
BYTES = Topology(domain=8, inside=FAST, between=SLOW, host=FAST)  # no latency
REAL = Topology(
    domain=8,
    inside=Link(bandwidth=100 * GB, latency=2e-6),
    between=Link(bandwidth=10 * GB, latency=4e-6),
    host=FAST,
    start=10e-6,
)
GROUPS = st.tuples(st.integers(1, 8), st.integers(1, 64)).map(
    lambda sizes: Group(sizes[0] * sizes[1], sizes[0])
)
WORLD = World(ranks=64, ranks_per_node=8, device=Device.CUDA, gpu="h100")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bytes_of_a_ring_within_a_domain(ranks: int) -> None:
    group, size = Group(ranks, ranks), 1e9
    for kind, factor in (
        (Collective.ALL_REDUCE, 2),
        (Collective.ALL_GATHER, 1),
        (Collective.REDUCE_SCATTER, 1),
    ):
        expected = factor * (ranks - 1) / ranks * size / FAST.bandwidth
        assert collective_seconds(kind, size, group, BYTES) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("domains", [2, 3, 16])
@pytest.mark.parametrize("rails", [1, 4])
def test_ring_uses_a_card_for_each_rank_of_a_domain(domains: int, rails: int) -> None:
    group = Group(rails * domains, rails)
    expected = (group.ranks - 1) / group.ranks * 1e9 / (rails * SLOW.bandwidth)
    cards = Topology(domain=8, inside=Link(bandwidth=1e15, latency=0.0), between=SLOW, host=FAST)
    assert collective_seconds(Collective.ALL_GATHER, 1e9, group, cards) <= expected
    ring_only = Group(domains, 1)
    assert collective_seconds(Collective.ALL_GATHER, 1e9, ring_only, cards) == pytest.approx(
        (domains - 1) / domains * 1e9 / SLOW.bandwidth
    )


@given(GROUPS, st.floats(1, 1e10), st.sampled_from(list(Collective)))
def test_time_rises_with_size_and_a_single_rank_takes_none(
    group: Group, size: float, kind: Collective
) -> None:
    seconds = collective_seconds(kind, size, group, REAL)
    if group.ranks == 1:
        assert seconds == 0
    else:
        assert REAL.start < seconds < collective_seconds(kind, 2 * size, group, REAL) < 3 * seconds


@given(GROUPS.filter(lambda group: group.ranks > 1), st.floats(1, 1e10))
def test_no_algorithm_is_slower_than_the_ring(group: Group, size: float) -> None:
    bandwidth = (
        FAST.bandwidth if group.domains == 1 else min(FAST.bandwidth, group.per_domain * SLOW.bandwidth)
    )
    between = group.domains - 1
    latency = (group.ranks - 1 - between) * REAL.inside.latency + between * REAL.between.latency
    ring = latency + (group.ranks - 1) / group.ranks * size / bandwidth
    bound = 1 + 1e-9
    assert collective_seconds(Collective.ALL_GATHER, size, group, REAL) <= bound * (REAL.start + ring)
    assert collective_seconds(Collective.ALL_REDUCE, size, group, REAL) <= bound * (REAL.start + 2 * ring)


def test_small_all_reduces_take_logarithmically_many_steps() -> None:
    times = [
        collective_seconds(Collective.ALL_REDUCE, 8, Group(domains, 1), REAL) - REAL.start
        for domains in (16, 256)
    ]
    assert times == pytest.approx([2 * 4 * 4e-6, 2 * 8 * 4e-6], rel=1e-3)
    large = collective_seconds(Collective.ALL_REDUCE, 1e10, Group(256, 1), REAL)
    assert large == pytest.approx(2 * 255 / 256 * 1e10 / SLOW.bandwidth, rel=0.01)


def test_published_bus_bandwidth_of_eight_h100() -> None:
    """NVIDIA/nccl-tests issue 212: 370 GB/s, and 480 GB/s of all-reduces in NVSwitch."""
    topology, group, size = topology_of(ClusterConfig(), WORLD), Group(8, 8), 8e9
    gather = 7 / 8 * size / collective_seconds(Collective.ALL_GATHER, size, group, topology)
    reduce = 2 * 7 / 8 * size / collective_seconds(Collective.ALL_REDUCE, size, group, topology)
    assert gather / GB == pytest.approx(370, rel=0.02)
    assert reduce / GB == pytest.approx(480, rel=0.02)


def test_all_to_all_is_bounded_by_the_slower_level() -> None:
    group = Group(16, 8)  # half of the tensor leaves the domain
    assert collective_seconds(Collective.ALL_TO_ALL, 16e9, group, BYTES) == pytest.approx(
        8e9 / SLOW.bandwidth
    )
    assert collective_seconds(Collective.ALL_TO_ALL, 8e9, Group(8, 8), BYTES) == pytest.approx(
        7e9 / FAST.bandwidth
    )


def test_a_part_of_a_mesh_has_a_part_of_its_links() -> None:
    mesh = topology_of(ClusterConfig(), World(ranks=8, ranks_per_node=8, device=Device.CUDA, gpu="mi300x"))
    pair, whole = (
        collective_seconds(Collective.ALL_GATHER, 8e9, Group(ranks, ranks), mesh) for ranks in (2, 8)
    )
    assert pair == pytest.approx(8e9 / 2 / (48 * GB), rel=0.01)  # one link of 48 GB/s
    assert whole == pytest.approx(8e9 * 7 / 8 / (7 * 48 * GB), rel=0.01)


AXES = (
    Axes(data=2, tensor=8, pipeline=4),
    Axes(data=16, tensor=2, pipeline=2),
    Axes(data=4, tensor=2, context=2, pipeline=4, expert=4),
    Axes(data=3, tensor=6, context=2, expert=3),
    Axes(data=64),
)


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("domain", [4, 8, 72])
def test_groups_lie_where_the_ranks_of_the_layout_are(axes: Axes, domain: int) -> None:
    for along in (*((axis,) for axis in ORDER), (Axis.CONTEXT, Axis.DATA), ORDER):
        members = [axes.peers(rank, along) for rank in range(axes.size)]
        fewest = min(min(Counter(rank // domain for rank in group).values()) for group in members)
        assert group_along(along, axes, domain) == Group(len(members[0]), fewest)


def test_groups_of_experts() -> None:
    assert strided_group(8, 1, 64, 8) == Group(8, 8)
    assert strided_group(8, 2, 64, 8) == Group(8, 4)
    assert strided_group(4, 16, 64, 8) == Group(4, 1)


def test_every_gpu_of_the_plan_has_links() -> None:
    assert INTERCONNECTS.keys() == GPUS.keys()


def test_the_configuration_replaces_the_usual_links() -> None:
    usual = topology_of(ClusterConfig(), WORLD)
    assert (usual.domain, round(usual.between.bandwidth / GB)) == (8, 47)
    given = topology_of(ClusterConfig(network=NetworkConfig(nic_gbit_per_gpu=50)), WORLD)
    assert given.between.bandwidth == usual.between.bandwidth / 8
    plain = topology_of(ClusterConfig(network=NetworkConfig(nvlink_gpus=1)), WORLD)
    assert plain.domain == 8
    assert plain.inside.bandwidth == plain.host.bandwidth < usual.inside.bandwidth / 5
    rack = World(ranks=144, ranks_per_node=4, device=Device.CUDA, gpu="gb200")
    assert topology_of(ClusterConfig(), rack).domain == 72
    pairs = World(ranks=4, ranks_per_node=4, device=Device.CUDA, gpu="h100-nvl")
    bridged = topology_of(ClusterConfig(), pairs)
    assert (bridged.domain, bridged.between.bandwidth) == (2, bridged.host.bandwidth)


@pytest.mark.parametrize("value", ["nvlink_gpus=0", "nic_gbit_per_gpu=0"])
def test_impossible_links_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.network.{value.split('=')[0]}"):
        compose([f"cluster.network.{value}"])


def test_links_do_not_change_the_identity_of_a_run() -> None:
    other = compose(["cluster.network.nvlink_gpus=72", "cluster.network.nic_gbit_per_gpu=800"])
    assert identity(other) == identity(compose([]))
