"""Measure collectives by kind, size and group, for calibration. Every function is collective.

The groups: all ranks of each machine at the same time, one rank of every machine, and all ranks. They are
temporary.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from toolkit.estimate.measurements import CollectiveTiming, DeviceTimings, MachineTimings, slowest
from toolkit.estimate.network import Collective
from toolkit.observe.device_benchmark import measure_device

SIZES = {  # bytes of the whole tensor
    "cuda": (2**13, 2**18, 2**22, 2**26, 2**29),
    "cpu": (2**10, 2**14, 2**18, 2**20, 2**22),
}
SECONDS = 0.15  # for the repeats of one size, approximately
WARM_UP, MIN_REPEATS, MAX_REPEATS = 2, 3, 200


def measure_machine(
    device: torch.device,
    rank: int,
    ranks: int,
    ranks_per_node: int,
    advance: Callable[[], object] = lambda: None,
) -> MachineTimings:
    """Measure the devices of at least 2 ranks at the same time, as they compute in training, then the links
    between them. All ranks return the same.

    Args:
        advance: as in :func:`measure_device`.
    """
    dist.all_reduce(torch.zeros(1, device=device))  # all ranks begin together
    own = measure_device(device, advance)
    everyone: list[DeviceTimings] = [own] * ranks
    dist.all_gather_object(everyone, own)
    return MachineTimings(
        ranks_per_node=ranks_per_node,
        device=slowest(everyone),
        collectives=measure_collectives(device, rank, ranks, ranks_per_node),
    )


def measure_collectives(
    device: torch.device, rank: int, ranks: int, ranks_per_node: int
) -> tuple[CollectiveTiming, ...]:
    """Return the timings of the slowest rank; the same on all ranks. ``ranks`` is at least 2."""
    # Newer releases of torch prefer other names for the same collectives, which 2.11 does not have.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    timings: list[CollectiveTiming] = []
    for groups in groups_to_measure(ranks, ranks_per_node):
        # Every rank creates all groups, in the same order.
        process_groups = {group: dist.new_group(list(group)) for group in groups}
        own = next((group for group in groups if rank in group), None)
        per_node = max(sum(peer // ranks_per_node == node for peer in groups[0]) for node in range(ranks))
        for operation in ACTIONS:
            for size in SIZES[device.type]:
                seconds = 0.0
                if own is not None:
                    seconds = _median_seconds(operation, size, process_groups[own], device)
                # The ranks outside of all groups, which idle, take part in this.
                timings.append(
                    CollectiveTiming(
                        operation=operation.value,
                        ranks=len(groups[0]),
                        per_node=per_node,
                        size=size,
                        seconds=_maximum(seconds, device),
                    )
                )
        for group in process_groups.values():
            if own is not None and group is process_groups[own]:
                dist.destroy_process_group(group)
    return tuple(timings)


def groups_to_measure(ranks: int, ranks_per_node: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield groups of equal size that are measured at the same time."""
    everyone = tuple(range(ranks))
    nodes = ranks // ranks_per_node
    if nodes > 1 and ranks_per_node > 1:
        yield [everyone[first : first + ranks_per_node] for first in range(0, ranks, ranks_per_node)]
        yield [everyone[::ranks_per_node]]
    yield [everyone]


def _all_reduce(tensor: torch.Tensor, shard: torch.Tensor, group: ProcessGroup) -> None:
    dist.all_reduce(tensor, group=group)


def _all_gather(tensor: torch.Tensor, shard: torch.Tensor, group: ProcessGroup) -> None:
    dist.all_gather_into_tensor(tensor, shard, group=group)


def _reduce_scatter(tensor: torch.Tensor, shard: torch.Tensor, group: ProcessGroup) -> None:
    dist.reduce_scatter_tensor(shard, tensor, group=group)


def _send(tensor: torch.Tensor, shard: torch.Tensor, group: ProcessGroup) -> None:
    """Send to the next rank of a ring and receive from the previous one."""
    own, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    received = torch.empty_like(tensor)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, ranks[(own + 1) % len(ranks)], group),
            dist.P2POp(dist.irecv, received, ranks[own - 1], group),
        ]
    ):
        work.wait()


ACTIONS: dict[Collective, Callable[[torch.Tensor, torch.Tensor, ProcessGroup], None]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.ALL_GATHER: _all_gather,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.SEND: _send,
}


def _median_seconds(operation: Collective, size: int, group: ProcessGroup, device: torch.device) -> float:
    # All shards are equally large, so the tensor may be a few bytes smaller than ``size``.
    shard = torch.zeros(max(1, size // 4 // group.size()), device=device)
    tensor = torch.zeros(shard.numel() * group.size(), device=device)

    def once() -> float:
        start = time.perf_counter()
        ACTIONS[operation](tensor, shard, group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        once()
    slowest = torch.tensor([once()], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)  # all ranks need the same number of repeats
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(SECONDS / max(float(slowest), 1e-9))))
    return statistics.median(once() for _ in range(repeats))


def _maximum(seconds: float, device: torch.device) -> float:
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
