"""Small blocks of numbers from all ranks to rank 0, by a thread beside training: over gloo, in groups that nobody else uses."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# As long as training's own collectives wait: a rank that is stopped for minutes and comes back is no reason to lose the groups. A rank that
# died is noticed at once, by its connections.
TIMEOUT = timedelta(minutes=30)


class Gather(Protocol):
    def __call__(self, block: np.ndarray) -> np.ndarray | None:
        """All ranks call it in the same order with blocks of one shape, float32. [ranks, *shape] on rank 0, None on the others.

        Raises:
            RuntimeError: a rank is gone, or did not come within ``TIMEOUT``; further calls raise too.
        """


def alone(block: np.ndarray) -> np.ndarray:
    return block[np.newaxis]


class ToRankZero:
    """Within each node to its first rank, from there to rank 0.

    gloo connects every two ranks of a group. In two levels a process has a connection to each rank of its node and, where it is the first,
    to each node's first: a hundred and more sockets among a thousand ranks instead of a thousand. Making it is collective.
    """

    def __init__(self, rank: int, ranks: int, ranks_per_node: int) -> None:
        starts = range(0, ranks, ranks_per_node)
        self._ranks, self._per_node = ranks, ranks_per_node
        # Each rank makes them all: torch numbers groups by how many a process has made, its own or not.
        nodes = [_group(range(start, min(start + ranks_per_node, ranks))) for start in starts]
        self._node = nodes[rank // ranks_per_node]
        firsts = _group(starts) if len(starts) > 1 else None
        self._firsts = firsts if rank in starts else None

    def __call__(self, block: np.ndarray) -> np.ndarray | None:
        found = _to_first(self._node, block)
        if found is None or self._firsts is None:
            return found
        # The last node may have fewer ranks, and a gather is of equal shapes.
        whole = np.zeros((self._per_node, *block.shape), dtype=block.dtype)
        whole[: len(found)] = found
        nodes = _to_first(self._firsts, whole)
        return None if nodes is None else nodes.reshape(-1, *block.shape)[: self._ranks]


def _group(ranks: Sequence[int]) -> ProcessGroup:
    """On a rank that is not of it torch gives a number, which nobody may use."""
    group: ProcessGroup = dist.new_group(list(ranks), backend="gloo", timeout=TIMEOUT, group_desc="gather")
    return group


def _to_first(group: ProcessGroup, block: np.ndarray) -> np.ndarray | None:
    """[ranks of the group, *shape] on its first rank."""
    here = torch.from_numpy(block)
    if group.rank() != 0:
        dist.gather(here, group=group, group_dst=0)
        return None
    found = torch.empty((group.size(), *block.shape), dtype=here.dtype)
    dist.gather(here, list(found.unbind(0)), group=group, group_dst=0)
    return found.numpy()


def gather_of(rank: int, ranks: int, ranks_per_node: int) -> Gather:
    return ToRankZero(rank, ranks, ranks_per_node) if ranks > 1 else alone
