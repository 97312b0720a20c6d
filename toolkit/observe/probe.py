"""Before the first step: latency and bandwidth of each axis, off the hot path, over the groups that training uses anyway."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from toolkit.config.schema import EngineName
from toolkit.engine.rank_sync import FlagReduce
from toolkit.files import write_whole
from toolkit.hooks import Hook
from toolkit.layout.axes import ORDER, Axes, Axis
from toolkit.monitor.link_probe import ALL_REDUCE, SEND, LinkTiming, format_probe, probe_row, unprobed_row
from toolkit.monitor.sink import Row, Sink
from toolkit.plan.types import RunPlan

SMALL_NUMBERS = 8  # fp32, of a small operation
WARM_UP, SMALL_REPEATS = 3, 30
LARGE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
LARGE_REPEATS = 5
LARGE_SECONDS = 0.25  # of all of an axis' large operations, about
NANO = 10**9


class Probe(Hook):
    """Collective in ``on_start``, which every rank calls with its state loaded: there the engines' groups are.

    Pipelines send and receive between neighbours, so that is what is measured along their axis; along the others all-reduces.

    Args:
        ask: for what ranks of other groups measured.
        file: where rank 0 writes the rows of all axes.
        take: is given how long a transfer of so many bytes takes along the pipeline axis.
    """

    def __init__(
        self,
        plan: RunPlan,
        device: torch.device,
        all_reduce_flags: FlagReduce,
        *,
        rank: int,
        file: Path,
        sink: Sink,
        take: Callable[[Callable[[int], float]], None],
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._device, self._all_reduce_flags, self._rank = plan, device, all_reduce_flags, rank
        self._file, self._sink, self._take, self._say = file, sink, take, say

    def on_start(self, step: int) -> None:
        began = time.perf_counter()
        rows = [self._row(axis) for axis in ORDER if getattr(self._plan.axes, axis) > 1]
        if self._rank != 0 or not rows:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(
            self._file,
            json.dumps({"step": step, "seconds": time.perf_counter() - began, "axes": rows}, indent=1) + "\n",
        )
        for row in rows:
            self._say(format_probe(row))
        self._sink.log_summary("probe", "\n".join(format_probe(row) for row in rows))

    def _row(self, axis: Axis) -> Row:
        peers = peers_along(self._plan.axes, axis, self._rank)
        group = find_group(peers, axis, self._device)
        if self._all_reduce_flags([group is None])[
            0
        ]:  # on no rank where it lacks on one: the others would wait for it
            return unprobed_row(axis, len(peers))
        assert group is not None
        if axis is Axis.PIPELINE:
            timed = self._time_sends(group, peers)
            self._take(timed.transfer())
        else:
            timed = time_all_reduces(group, self._device)
        return self._compare(axis, peers, timed)

    def _time_sends(self, group: ProcessGroup, peers: Sequence[int]) -> LinkTiming:
        """Over both links of a stage in the middle: the slower one."""
        # DeepSpeed sends one tensor at a time over the group of all ranks, Megatron-core batches over the pipeline's own. With NCCL those
        # are different communicators, and here is none made that training does not use.
        batched = self._plan.config.engine.name is EngineName.megatron
        if batched:  # the first call of a group is every rank's, says torch
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        place, found = peers.index(self._rank), []
        for phase in (0, 1):
            other = place + 1 if place % 2 == phase else place - 1
            if 0 <= other < len(peers):
                link = Link(
                    peers[other],
                    first=place < other,
                    group=group if batched else None,
                    batched=batched,
                    device=self._device,
                )
                found.append(link.timed(len(peers)))
        return max(found, key=lambda timed: timed.large_median)

    def _compare(self, axis: Axis, peers: Sequence[int], timed: LinkTiming) -> Row:
        p50, p99, large = (
            round(seconds * NANO) for seconds in (timed.latency_p50, timed.latency_p99, timed.large_median)
        )
        worst_p50, worst_p99, slowest, fastest = self._all_reduce_flags([p50, p99, large, -large])
        named = self._all_reduce_flags([peers[0] if large == slowest else -1])[0]
        return probe_row(
            axis,
            operation=timed.operation,
            ranks=timed.ranks,
            latency_p50=worst_p50 / NANO,
            latency_p99=worst_p99 / NANO,
            large_bytes=timed.large_bytes,
            slowest_large=slowest / NANO,
            fastest_large=-fastest / NANO,
            slowest_of=peers_along(self._plan.axes, axis, named),
        )


def peers_along(axes: Axes, axis: Axis, rank: int) -> tuple[int, ...]:
    """The ranks that differ from ``rank`` in this coordinate only, and itself."""
    return next(group for group in axes.groups(axis) if rank in group)


def find_group(ranks: Sequence[int], axis: Axis, device: torch.device) -> ProcessGroup | None:
    """A group of just these ranks, over the backend that training uses; the same one on each of them, for all make groups in one order.

    Several may have the same ranks. One that has its NCCL communicator already comes first, then one that its maker described as this
    axis', so that none is made that training would not make itself.
    """
    backend = dist.get_backend()
    fitting = [
        group
        for group, numbers in distributed_c10d._world.pg_group_ranks.items()
        if list(numbers) == list(ranks) and dist.get_backend(group) == backend
    ]

    def preference(group: ProcessGroup) -> tuple[bool, bool]:
        connected = getattr(
            group._get_backend(device), "_is_initialized", None
        )  # NCCL's; gloo connects when a group is made
        return not (connected is not None and connected()), not group.group_desc.upper().startswith(
            axis.upper()
        )

    return min(fitting, key=preference, default=None)


def time_all_reduces(group: ProcessGroup, device: torch.device) -> LinkTiming:
    small = torch.zeros(SMALL_NUMBERS, device=device)
    large = torch.zeros(LARGE_BYTES[device.type] // 4, device=device)

    def once(tensor: torch.Tensor) -> float:
        return _timed(lambda: dist.all_reduce(tensor, group=group), device)

    for _ in range(WARM_UP):
        once(small)
    small_seconds = [once(small) for _ in range(SMALL_REPEATS)]
    slowest = torch.tensor([once(large)], dtype=torch.float64, device=device)
    dist.all_reduce(
        slowest, dist.ReduceOp.MAX, group=group
    )  # ranks that counted differently would wait for each other
    large_seconds = [once(large) for _ in range(_repeats(float(slowest)))]
    return LinkTiming(
        operation=ALL_REDUCE,
        ranks=group.size(),
        small_seconds=small_seconds,
        large_bytes=large.nbytes,
        large_seconds=large_seconds,
    )


def _repeats(seconds: float) -> int:
    return max(1, min(LARGE_REPEATS, int(LARGE_SECONDS / seconds)))


class Link:
    """To one neighbour in the pipeline, ``first`` being the one that sends first. Seconds are half of there and back."""

    def __init__(
        self, peer: int, *, first: bool, group: ProcessGroup | None, batched: bool, device: torch.device
    ) -> None:
        self._peer, self._first, self._group, self._batched, self._device = (
            peer,
            first,
            group,
            batched,
            device,
        )

    def timed(self, ranks: int) -> LinkTiming:
        small = torch.zeros(SMALL_NUMBERS, device=self._device)
        large = torch.zeros(LARGE_BYTES[self._device.type] // 4, device=self._device)
        for tensor in (*[small] * WARM_UP, large):
            self._there_and_back(tensor)
        return LinkTiming(
            operation=SEND,
            ranks=ranks,
            small_seconds=[self._there_and_back(small) / 2 for _ in range(SMALL_REPEATS)],
            large_bytes=large.nbytes,
            large_seconds=[self._there_and_back(large) / 2 for _ in range(LARGE_REPEATS)],
        )

    def _there_and_back(self, tensor: torch.Tensor) -> float:
        turns = (self._send, self._receive) if self._first else (self._receive, self._send)
        return _timed(lambda: [turn(tensor) for turn in turns], self._device)

    def _send(self, tensor: torch.Tensor) -> None:
        if self._batched:
            _wait(dist.P2POp(dist.isend, tensor, self._peer, self._group))
        else:
            dist.send(tensor, self._peer, group=self._group)

    def _receive(self, tensor: torch.Tensor) -> None:
        if self._batched:
            _wait(dist.P2POp(dist.irecv, tensor, self._peer, self._group))
        else:
            dist.recv(tensor, self._peer, group=self._group)


def _wait(operation: dist.P2POp) -> None:
    for work in dist.batch_isend_irecv([operation]):
        work.wait()


def _timed(act: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
