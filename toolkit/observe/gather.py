"""Small blocks of numbers from all ranks to rank 0, by a thread beside training: over gloo, in groups that nobody else uses.

The groups are made behind ``torch.distributed``, which gives each group of its own a thread that looks for something to do a hundred times
a second: 0.2% of a core each. These share the one that the process has.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, ProcessGroupGloo

# As long as training's own collectives wait: a rank that is stopped for minutes and comes back is no reason to lose the groups. A rank that
# died is noticed at once, by its connections.
TIMEOUT = timedelta(minutes=30)

# Those of each process group. They last as long as it, like torch's own groups: who needs one no longer would close its connections on
# those who do.
_made: WeakKeyDictionary[ProcessGroup, list[ToRankZero]] = WeakKeyDictionary()


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
        self._ranks, self._per_node = ranks, ranks_per_node
        before = _made.setdefault(dist.distributed_c10d._get_default_group(), [])
        name, node = f"gather-{len(before)}", rank // ranks_per_node
        start = node * ranks_per_node
        self._node = _group(f"{name}/node-{node}", range(start, min(start + ranks_per_node, ranks)), rank)
        firsts = range(0, ranks, ranks_per_node)
        self._firsts = _group(f"{name}/firsts", firsts, rank) if rank in firsts and len(firsts) > 1 else None
        before.append(self)

    def __call__(self, block: np.ndarray) -> np.ndarray | None:
        found = _to_first(self._node, block)
        if found is None or self._firsts is None:
            return found
        # The last node may have fewer ranks, and a gather is of equal shapes.
        whole = np.zeros((self._per_node, *block.shape), dtype=block.dtype)
        whole[: len(found)] = found
        nodes = _to_first(self._firsts, whole)
        return None if nodes is None else nodes.reshape(-1, *block.shape)[: self._ranks]


def _group(name: str, ranks: Sequence[int], rank: int) -> ProcessGroupGloo:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # it is there, as below
    options._timeout, options._threads, options._devices = TIMEOUT, 1, _devices()
    return dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), options)


def _devices() -> list[Any]:
    """What this process's gloo listens on: there is one, if only for the exchange of each step (``engine/rank_sync.py``)."""
    cpu = torch.device("cpu")
    backends: list[Any] = [
        group._get_backend(cpu) for group in dist.distributed_c10d._world.pg_map if cpu in group._device_types
    ]
    backends = [
        getattr(backend, "wrapped_pg", backend) for backend in backends
    ]  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps them
    listens: Any = next(backend for backend in backends if isinstance(backend, dist.ProcessGroupGloo))
    return list(listens.options._devices)


def _to_first(group: ProcessGroupGloo, block: np.ndarray) -> np.ndarray | None:
    """[ranks of the group, *shape] on its first rank."""
    first = group.rank() == 0
    here = torch.from_numpy(block)
    found = torch.empty((group.size() if first else 0, *block.shape), dtype=here.dtype)
    group.gather([list(found.unbind(0))] if first else [], [here], dist.GatherOptions()).wait()  # type: ignore[attr-defined]
    return found.numpy() if first else None


def gather_of(rank: int, ranks: int, ranks_per_node: int) -> Gather:
    return ToRankZero(rank, ranks, ranks_per_node) if ranks > 1 else alone
