"""Gather small arrays from all ranks on rank 0 in a background thread, over dedicated gloo groups.

The groups bypass ``torch.distributed.new_group``, which starts a thread per group that polls a hundred times
a second: 0.2% of a core each. These groups share the gloo device that the process already has.
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

# As long as the time-out of training's collectives: a rank that is stopped for minutes and continues must not
# break the groups. The death of a rank is noticed at once, because its connections close.
TIMEOUT = timedelta(minutes=30)

# The gathers of each process group, which live as long as it does: closing one rank's connections early would
# break the other ranks' calls.
_gathers: WeakKeyDictionary[ProcessGroup, list[HierarchicalGather]] = WeakKeyDictionary()


class Gather(Protocol):
    def __call__(self, block: np.ndarray) -> np.ndarray | None:
        """Gather float32 blocks of one shape. All ranks call it in the same order.

        Returns:
            [ranks, *shape] on rank 0, None on the other ranks.

        Raises:
            RuntimeError: a rank is gone, or did not call within ``TIMEOUT``. Further calls raise too.
        """


def single_rank_gather(block: np.ndarray) -> np.ndarray:
    return block[np.newaxis]


class HierarchicalGather:
    """Gather to the first rank of each node, then to rank 0. Creating it is collective.

    gloo connects every pair of ranks in a group. With two levels a process connects to the ranks of its node
    and, if it is the first, to the first rank of every node: about a hundred sockets among a thousand ranks
    instead of a thousand.
    """

    def __init__(self, rank: int, ranks: int, ranks_per_node: int) -> None:
        self._ranks, self._per_node = ranks, ranks_per_node
        existing = _gathers.setdefault(dist.distributed_c10d._get_default_group(), [])
        name, node = f"gather-{len(existing)}", rank // ranks_per_node
        start = node * ranks_per_node
        self._node = _new_group(f"{name}/node-{node}", range(start, min(start + ranks_per_node, ranks)), rank)
        firsts = range(0, ranks, ranks_per_node)
        multi_node = rank in firsts and len(firsts) > 1
        self._firsts = _new_group(f"{name}/firsts", firsts, rank) if multi_node else None
        existing.append(self)

    def __call__(self, block: np.ndarray) -> np.ndarray | None:
        gathered = _gather_to_first(self._node, block)
        if gathered is None or self._firsts is None:
            return gathered
        # Pad, because the last node may have fewer ranks and a gather needs equal shapes.
        padded = np.zeros((self._per_node, *block.shape), dtype=block.dtype)
        padded[: len(gathered)] = gathered
        nodes = _gather_to_first(self._firsts, padded)
        return None if nodes is None else nodes.reshape(-1, *block.shape)[: self._ranks]


def _new_group(name: str, ranks: Sequence[int], rank: int) -> ProcessGroupGloo:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from torch's stubs
    options._timeout, options._threads, options._devices = TIMEOUT, 1, _gloo_devices()
    return dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), options)


def _gloo_devices() -> list[Any]:
    """Return the devices that this process's gloo listens on. Every process has one, for
    ``engine/rank_sync.py``.
    """
    cpu = torch.device("cpu")
    backends: list[Any] = [
        group._get_backend(cpu) for group in dist.distributed_c10d._world.pg_map if cpu in group._device_types
    ]
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backends.
    backends = [getattr(backend, "wrapped_pg", backend) for backend in backends]
    gloo: Any = next(backend for backend in backends if isinstance(backend, dist.ProcessGroupGloo))
    return list(gloo.options._devices)


def _gather_to_first(group: ProcessGroupGloo, block: np.ndarray) -> np.ndarray | None:
    """[ranks of the group, *shape] on the group's first rank, None on the others."""
    first = group.rank() == 0
    tensor = torch.from_numpy(block)
    gathered = torch.empty((group.size() if first else 0, *block.shape), dtype=tensor.dtype)
    outputs = [list(gathered.unbind(0))] if first else []
    group.gather(outputs, [tensor], dist.GatherOptions()).wait()  # type: ignore[attr-defined]
    return gathered.numpy() if first else None


def make_gather(rank: int, ranks: int, ranks_per_node: int) -> Gather:
    return HierarchicalGather(rank, ranks, ranks_per_node) if ranks > 1 else single_rank_gather
