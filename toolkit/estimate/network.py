"""Time of collectives on a network of two levels: fast links within a domain, network cards between domains.

A collective takes a fixed time, a latency for every step in sequence, and the bytes through the narrowest
link divided by its bandwidth (the alpha-beta model: Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005). It takes the fastest of the algorithms that NCCL,
RCCL and gloo choose from:

- Ring: ``2 (n - 1) / n`` of the tensor through every rank for an all-reduce, ``(n - 1) / n`` for an
  all-gather or reduce-scatter (nccl-tests, doc/PERFORMANCE.md). NCCL builds as many rings as a domain has
  network cards, so a group with r ranks in every domain has the bandwidth of r cards.
- Double binary tree, for all-reduces: the whole tensor twice, but only logarithmically many steps between
  domains (Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
  2009; latencies as in NCCL's src/graph/tuning.cc).
- Two levels: the collective within each domain, and between domains for each rank's share (rails).
- Within a domain whose switch can add, each rank sends the tensor once and receives the sum (NVLink SHARP).
- All-to-all: every pair of ranks exchanges its part directly, or in log n rounds (Bruck; Thakur, section 4).

The ranks of a program call a collective at the same time in all groups of an axis, so each rank has one
rank's share of the cards.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import ceil, log2

from toolkit.layout.axes import ORDER, Axes, Axis


class Collective(StrEnum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A rank's connection.

    Attributes:
        bandwidth: bytes per second in one direction that collectives reach, not that of the data sheet.
        latency: seconds of one step between two ranks.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The network of a run.

    Attributes:
        domain: number of consecutive ranks that share NVLink, xGMI or a node's PCIe.
        inside: a rank's connection to its domain.
        between: a rank's share of the network cards, between domains.
        host: a rank's connection to host memory.
        start: seconds before the first byte of a collective is sent.
        mesh: ranks of which each pair has its own link, so that a group of r of them has only
            (r - 1) / (mesh - 1) of ``inside.bandwidth``; 0: a switch connects them.
        switch_bandwidth: bytes of the tensor per second of an all-reduce that the switch of a domain computes
            (NVLink SHARP); None: it cannot.
    """

    domain: int
    inside: Link
    between: Link
    host: Link
    start: float = 0.0
    mesh: int = 0
    switch_bandwidth: float | None = None

    def inside_bandwidth(self, ranks: int) -> float:
        """Return the bytes per second of one of ``ranks`` ranks that communicate within a domain."""
        if ranks >= self.mesh or ranks == 1:
            return self.inside.bandwidth
        return self.inside.bandwidth * (ranks - 1) / (self.mesh - 1)


@dataclass(frozen=True, slots=True)
class Group:
    """A group of ``ranks`` ranks, of which ``per_domain`` are in the same domain."""

    ranks: int
    per_domain: int

    @property
    def domains(self) -> int:
        return -(-self.ranks // self.per_domain)


def collective_seconds(kind: Collective, size: float, group: Group, topology: Topology) -> float:
    """Return the seconds of a collective on all ranks of ``group``; 0 for a single rank.

    Args:
        size: bytes of the whole tensor: the gathered output of an all-gather, the input of a reduce-scatter,
            what one rank has before an all-to-all, the message of a send. A send goes to a rank of another
            domain if the group spans several.
    """
    if group.ranks == 1:
        return 0.0
    if kind is Collective.SEND:
        link = topology.inside if group.domains == 1 else topology.between
        bandwidth = topology.inside_bandwidth(2) if group.domains == 1 else link.bandwidth
        return topology.start + link.latency + size / bandwidth
    if kind is Collective.ALL_TO_ALL:
        return topology.start + _all_to_all(size, group, topology)
    if kind is Collective.ALL_REDUCE:
        return topology.start + _all_reduce(size, group, topology)
    if kind is Collective.BROADCAST:
        return topology.start + _tree(size, group, topology)
    return topology.start + min(
        _ring(size, group, topology), _all_gather_of_two_levels(size, group, topology)
    )


def _bandwidth(group: Group, topology: Topology) -> float:
    """Return the bytes per second of the rings of a group: those within a domain, or those of its network
    cards.
    """
    inside = topology.inside_bandwidth(group.per_domain)
    cards = group.per_domain * topology.between.bandwidth
    if group.domains == 1:
        return inside
    return cards if group.per_domain == 1 else min(inside, cards)


def _all_reduce(size: float, group: Group, topology: Topology) -> float:
    algorithms = [
        2 * _ring(size, group, topology),
        _tree(2 * size, group, topology),
        _two_levels(size, group, topology),
    ]
    if group.domains == 1 and topology.switch_bandwidth is not None:
        algorithms.append(2 * topology.inside.latency + size / topology.switch_bandwidth)
    return min(algorithms)


def _ring(size: float, group: Group, topology: Topology) -> float:
    """Return the seconds of one pass around the ring: an all-gather, a reduce-scatter, or half of an
    all-reduce.
    """
    steps, between = group.ranks - 1, group.domains - 1
    latency = (steps - between) * topology.inside.latency + between * topology.between.latency
    return latency + size * steps / group.ranks / _bandwidth(group, topology)


def _tree(size: float, group: Group, topology: Topology) -> float:
    """Return the seconds in which ``size`` bytes go through each rank: a chain within each domain and a tree
    between them, up and down.
    """
    latency = (group.per_domain - 1) * topology.inside.latency
    latency += ceil(log2(group.domains)) * topology.between.latency
    return 2 * latency + size / _bandwidth(group, topology)


def _two_levels(size: float, group: Group, topology: Topology) -> float:
    """Reduce-scatter in each domain, all-reduce of the shares between domains, all-gather in each domain."""
    inner, outer = Group(group.per_domain, group.per_domain), Group(group.domains, 1)
    share = size / group.per_domain
    between = min(2 * _ring(share, outer, topology), _tree(2 * share, outer, topology))
    return 2 * _ring(size, inner, topology) + between


def _all_gather_of_two_levels(size: float, group: Group, topology: Topology) -> float:
    """All-gather between domains, then within each; a reduce-scatter is the reverse."""
    inner, outer = Group(group.per_domain, group.per_domain), Group(group.domains, 1)
    return _ring(size / group.per_domain, outer, topology) + _ring(size, inner, topology)


def _all_to_all(size: float, group: Group, topology: Topology) -> float:
    """Messages within the domain and to other domains flow at the same time."""
    part, others = size / group.ranks, group.ranks - group.per_domain
    inside = (group.per_domain - 1) * part / topology.inside_bandwidth(group.per_domain)
    between = others * part / topology.between.bandwidth
    latency = (group.per_domain - 1) * topology.inside.latency + others * topology.between.latency
    direct = latency + max(inside, between)
    # Bruck's algorithm sends half of the tensor in each of log n rounds.
    slow = topology.inside if others == 0 else topology.between
    bandwidth = topology.inside_bandwidth(group.per_domain) if others == 0 else slow.bandwidth
    return min(direct, ceil(log2(group.ranks)) * (slow.latency + size / 2 / bandwidth))


def group_along(along: Collection[Axis], axes: Axes, domain: int) -> Group:
    """Return the group of ranks that differ along these axes only.

    Args:
        domain: ``Topology.domain``. Where the groups lie differently in the domains, the result is the one
            with the fewest ranks in a domain, on which the others wait.
    """
    offsets, bases = [0], [0]
    stride = 1
    for axis in ORDER:
        steps = range(0, stride * getattr(axes, axis), stride)
        if axis in along:
            offsets = [offset + step for step in steps for offset in offsets]
        else:
            bases = [base + step for step in steps for base in bases]
        stride *= getattr(axes, axis)
    return _placed(tuple(offsets), tuple(sorted({base % domain for base in bases})), domain)


def strided_group(ranks: int, stride: int, world: int, domain: int) -> Group:
    """Return a group of every ``stride``-th rank of ``world``: the experts' ranks, or those of ZeRO's
    node-local shards.
    """
    block = ranks * stride
    bases = {(first + inner) % domain for first in range(0, world, block) for inner in range(stride)}
    return _placed(tuple(range(0, block, stride)), tuple(sorted(bases)), domain)


@cache
def _placed(offsets: tuple[int, ...], bases: tuple[int, ...], domain: int) -> Group:
    """Return the group of ranks ``base + offset`` with the fewest ranks in one of its domains.

    Groups repeat from domain to domain, so ``bases`` are less than ``domain``.
    """
    fewest = len(offsets)
    for base in bases:
        counts: dict[int, int] = {}
        for offset in offsets:
            place = (base + offset) // domain
            counts[place] = counts.get(place, 0) + 1
        fewest = min(fewest, *counts.values())
    return Group(len(offsets), fewest)
