"""Latency and bandwidth of each axis, measured before the first step over training's process groups."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from toolkit.config.schema import EngineName
from toolkit.engine.rank_sync import FlagReduce, make_flag_reduce
from toolkit.files import write_whole
from toolkit.hooks import Hook
from toolkit.layout.axes import ALL, ORDER, Axes, Axis
from toolkit.monitor.comm_benchmark_rows import (
    ALL_REDUCE,
    SEND,
    LinkTiming,
    format_probe,
    probe_row,
    unprobed_row,
)
from toolkit.monitor.sink import Row, Sink
from toolkit.plan.types import RunPlan

log = logging.getLogger(__name__)

SMALL_ELEMENTS = 8  # fp32 elements of a small operation
WARM_UP, SMALL_REPEATS = 3, 30
LARGE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
LARGE_REPEATS = 5
LARGE_SECONDS = 0.25  # for all large operations of an axis, approximately
NANO = 10**9


class CommBenchmark(Hook):
    """Measure every axis in ``on_start``, when the engine's process groups exist. Collective.

    Pipelines send and receive between neighbours, so these are measured along the pipeline axis; all-reduces
    along the other axes.

    Args:
        all_reduce_flags: exchanges what ranks of other groups measured.
        file: where rank 0 writes the rows of all axes.
        set_transfer_time: receives a function from bytes to seconds of a transfer along the pipeline axis.
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
        set_transfer_time: Callable[[Callable[[int], float]], None],
    ) -> None:
        self._plan, self._device, self._all_reduce_flags, self._rank = plan, device, all_reduce_flags, rank
        self._file, self._sink, self._set_transfer_time = file, sink, set_transfer_time

    def on_start(self, step: int) -> None:
        start = time.perf_counter()
        rows = [self._measure(axis) for axis in ORDER if getattr(self._plan.axes, axis) > 1]
        if self._rank != 0 or not rows:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        content = {"step": step, "seconds": time.perf_counter() - start, "axes": rows}
        write_whole(self._file, json.dumps(content, indent=1) + "\n")
        for row in rows:
            log.info(format_probe(row))
        self._sink.log_summary("probe", "\n".join(format_probe(row) for row in rows))

    def _measure(self, axis: Axis) -> Row:
        peers = peers_along(self._plan.axes, axis, self._rank)
        group = find_group(peers, axis, self._device)
        if self._all_reduce_flags([group is None])[0]:  # skip it on all ranks, because the others would wait
            return unprobed_row(axis, len(peers))
        assert group is not None
        if axis is Axis.PIPELINE:
            timed = self._time_sends(group, peers)
            self._set_transfer_time(timed.transfer())
        else:
            timed = time_all_reduces(group, self._device)

        def slowest_group(first_rank: int) -> tuple[int, ...]:
            return peers_along(self._plan.axes, axis, first_rank)

        return _combine(axis, timed, peers[0], slowest_group, self._all_reduce_flags)

    def _time_sends(self, group: ProcessGroup, peers: Sequence[int]) -> LinkTiming:
        """Time the links of this stage and return the slower one."""
        # DeepSpeed sends single tensors over the group of all ranks, Megatron-core batches over the
        # pipeline's group. With NCCL these are different communicators, and the benchmark creates none that
        # training does not use.
        batched = self._plan.config.engine.name is EngineName.megatron
        if batched:  # torch requires that all ranks of a group take part in its first call
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        own, links = peers.index(self._rank), []
        for phase in (0, 1):
            other = own + 1 if own % 2 == phase else own - 1
            if 0 <= other < len(peers):
                link = PipelineLink(
                    peers[other],
                    first=own < other,
                    group=group if batched else None,
                    batched=batched,
                    device=self._device,
                )
                links.append(link.measure(len(peers)))
        return max(links, key=lambda timed: timed.large_median)


def measure_links(axes: Axes | None, device: torch.device, rank: int, ranks: int) -> list[Row]:
    """Time all-reduces along each axis and over all ranks, without an engine. Collective.

    The process groups are temporary.

    Args:
        axes: None without a plan: only all ranks are measured.

    Returns:
        Rows as in ``monitor/comm_benchmark_rows.py``.
    """
    all_reduce_flags = make_flag_reduce(ranks)
    rows: list[Row] = []
    for name, groups in _groups_along(axes, ranks):
        # Every rank creates all groups, in the same order.
        process_groups = {group: dist.new_group(list(group)) for group in groups}
        own = next(group for group in groups if rank in group)
        timed = time_all_reduces(process_groups[own], device)

        def slowest_group(first_rank: int, groups: list[tuple[int, ...]] = groups) -> tuple[int, ...]:
            return next(group for group in groups if first_rank in group)

        rows.append(_combine(name, timed, own[0], slowest_group, all_reduce_flags))
        dist.destroy_process_group(process_groups[own])
    return rows


def _groups_along(axes: Axes | None, ranks: int) -> Sequence[tuple[str, list[tuple[int, ...]]]]:
    everyone = [tuple(range(ranks))]
    if axes is None:
        return [(ALL, everyone)]
    single = next((axis.value for axis in ORDER if getattr(axes, axis) == ranks), None)
    if single is not None:
        return [(single, everyone)]
    partial = [(axis.value, list(axes.groups(axis))) for axis in ORDER if 1 < getattr(axes, axis) < ranks]
    return [*partial, (ALL, everyone)]


def _combine(
    axis: str,
    timed: LinkTiming,
    first_rank: int,
    slowest_group: Callable[[int], tuple[int, ...]],
    all_reduce_flags: FlagReduce,
) -> Row:
    """Compare the groups of an axis. Collective.

    Args:
        first_rank: of this rank's group.
        slowest_group: returns the group that a rank belongs to.
    """
    p50, p99, large = (
        round(seconds * NANO) for seconds in (timed.latency_p50, timed.latency_p99, timed.large_median)
    )
    worst_p50, worst_p99, slowest, fastest = all_reduce_flags([p50, p99, large, -large])
    slowest_rank = all_reduce_flags([first_rank if large == slowest else -1])[0]
    return probe_row(
        axis,
        operation=timed.operation,
        ranks=timed.ranks,
        latency_p50=worst_p50 / NANO,
        latency_p99=worst_p99 / NANO,
        large_bytes=timed.large_bytes,
        slowest_large=slowest / NANO,
        fastest_large=-fastest / NANO,
        slowest_of=slowest_group(slowest_rank),
    )


def peers_along(axes: Axes, axis: Axis, rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from ``rank`` in this coordinate only, including ``rank``."""
    return next(group for group in axes.groups(axis) if rank in group)


def find_group(ranks: Sequence[int], axis: Axis, device: torch.device) -> ProcessGroup | None:
    """Find an existing group of exactly these ranks with training's backend; all of them find the same group.

    If several groups have these ranks, prefer one whose NCCL communicator exists, then one described as this
    axis, so that the benchmark creates no communicator that training would not create.
    """
    backend = dist.get_backend()
    fitting = [
        group
        for group, numbers in distributed_c10d._world.pg_group_ranks.items()
        if list(numbers) == list(ranks) and dist.get_backend(group) == backend
    ]

    def preference(group: ProcessGroup) -> tuple[bool, bool]:
        connected = getattr(group._get_backend(device), "_is_initialized", None)  # only NCCL connects lazily
        return not (connected is not None and connected()), not group.group_desc.upper().startswith(
            axis.upper()
        )

    return min(fitting, key=preference, default=None)


def time_all_reduces(group: ProcessGroup, device: torch.device) -> LinkTiming:
    """Time small and large all-reduces over ``group``. Collective."""
    small = torch.zeros(SMALL_ELEMENTS, device=device)
    large = torch.zeros(LARGE_BYTES[device.type] // 4, device=device)

    def once(tensor: torch.Tensor) -> float:
        return _time(lambda: dist.all_reduce(tensor, group=group), device)

    for _ in range(WARM_UP):
        once(small)
    small_seconds = [once(small) for _ in range(SMALL_REPEATS)]
    slowest = torch.tensor([once(large)], dtype=torch.float64, device=device)
    # All ranks need the same number of repeats.
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
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


class PipelineLink:
    """Time transfers to one pipeline neighbour: half of a round trip. The side with ``first`` sends first."""

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

    def measure(self, ranks: int) -> LinkTiming:
        small = torch.zeros(SMALL_ELEMENTS, device=self._device)
        large = torch.zeros(LARGE_BYTES[self._device.type] // 4, device=self._device)
        for tensor in (*[small] * WARM_UP, large):
            self._round_trip(tensor)
        return LinkTiming(
            operation=SEND,
            ranks=ranks,
            small_seconds=[self._round_trip(small) / 2 for _ in range(SMALL_REPEATS)],
            large_bytes=large.nbytes,
            large_seconds=[self._round_trip(large) / 2 for _ in range(LARGE_REPEATS)],
        )

    def _round_trip(self, tensor: torch.Tensor) -> float:
        turns = (self._send, self._receive) if self._first else (self._receive, self._send)
        return _time(lambda: [turn(tensor) for turn in turns], self._device)

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


def _time(action: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
