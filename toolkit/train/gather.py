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
    to each node's first: a hundred sockets in a thousand ranks instead of a thousand. Making it is collective.
    """

    def __init__(self, rank: int, ranks: int, ranks_per_node: int) -> None:
        first = rank - rank % ranks_per_node
        firsts = range(0, ranks, ranks_per_node)
        self._ranks, self._per_node = ranks, ranks_per_node
        self._node = _group(range(first, min(first + ranks_per_node, ranks)))
        self._leads = rank == first
        self._firsts: ProcessGroup | None = _group(firsts) if self._leads and len(firsts) > 1 else None

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
    """Its members alone make it: with a thousand ranks there are a hundred of them. torch names such a group by its ranks and by how many
    groups the process has, so all ranks must have made equally many; a node of one rank has a group for that reason."""
    made = dist.new_group(list(ranks), backend="gloo", timeout=TIMEOUT, use_local_synchronization=True, group_desc="ledger")
    assert isinstance(made, dist.ProcessGroup), "made by its members only"
    return made


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
