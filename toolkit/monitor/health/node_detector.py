"""Detect faults of a node from its samples (``monitor/system/sampler.py``).

An alert is returned for every sample while the condition holds; ``AlertLimiter`` decides how often it is
shown. Not detected: a node whose GPUs are all equally slow (``Straggler`` and the report compare nodes), a
bad cable that retransmits without an error event, and memory errors that ECC misses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.gpu_faults import (
    LASTING_SAMPLES,
    gpus,
    lasts,
    lost_gpu,
    memory_errors,
    slow_clock,
    throttled_gpu,
)
from toolkit.monitor.health.memory import GrowthEstimate, GrowthTracker
from toolkit.monitor.sink import Row
from toolkit.progress import duration, quantity

MEMORY_SHARE = 0.03  # of the host's memory, or of its limit, that should be free
# Free space of the run's disk: the smaller of the two, and room for one checkpoint.
DISK_SHARE, DISK_BYTES = 0.03, 50e9
SILENT_SECONDS = 60.0
# samples with training progress before memory is judged, because loading a model grows steadily too
MIN_STEPPED_SAMPLES = 3


def memory_low(rows: Sequence[Row], node: int) -> Alert | None:
    def total(row: Row) -> float:
        return float(row.get("host/memory_limit_bytes", row.get("host/memory_total_bytes", 0.0)))

    if not lasts(
        rows, lambda row: row.get("host/memory_available_bytes", float("inf")) < MEMORY_SHARE * total(row)
    ):
        return None
    row = rows[-1]
    kind = "of the limit of its control group" if "host/memory_limit_bytes" in row else "of the host's memory"
    ranks = {name.split("/")[1]: size for name, size in row.items() if name.startswith("rank/")}
    largest = max(ranks, key=lambda rank: ranks[rank], default=None)
    most = f"; rank {largest} uses most: {_bytes(ranks[largest])}" if largest is not None else ""
    return Alert(
        name="host-fault",
        fault="memory-low",
        level=Level.ERROR,
        step=row["step"],
        where=f"node {node}",
        cause=f"the memory of node {node} is nearly full: the kernel is about to kill a process",
        evidence=f"{_bytes(row['host/memory_available_bytes'])} {kind}, {_bytes(total(row))}, are "
        f"available, page cache included (alert below {MEMORY_SHARE:.0%}){most}",
        next_step="use fewer data workers or keep less in host memory (offloaded parameters or optimizer "
        "states), or end other processes on the node: ps aux --sort -rss | head",
    )


def disk_low(rows: Sequence[Row], node: int, checkpoint_bytes: float) -> Alert | None:
    def least(row: Row) -> float:
        return max(checkpoint_bytes, min(DISK_SHARE * row.get("disk/total_bytes", 0.0), DISK_BYTES))

    if not lasts(rows, lambda row: row.get("disk/free_bytes", float("inf")) < least(row)):
        return None
    row = rows[-1]
    room = f"; a checkpoint of this run takes about {_bytes(checkpoint_bytes)}" if checkpoint_bytes else ""
    return Alert(
        name="host-fault",
        fault="disk-low",
        level=Level.WARNING,
        step=row["step"],
        where=f"node {node}",
        cause="the disk of the run's directory is nearly full",
        evidence=f"{_bytes(row['disk/free_bytes'])} of {_bytes(row['disk/total_bytes'])} are free on node "
        f"{node} (alert below {_bytes(least(row))}){room}",
        next_step="free space before the next checkpoint, which fails otherwise: checkpoint.keep_last "
        "keeps fewer, du -sh RUN_DIR/* lists what is large",
    )


def silent_source(row: Row, source: str, node: int) -> Alert | None:
    """Detect a source of metrics that no longer answers."""
    seconds = row.get(f"{source}/silent_seconds", 0.0)
    if seconds < SILENT_SECONDS:
        return None
    gpu = source == "gpu"
    return Alert(
        name="host-fault",
        fault="sampling-stalled",
        level=Level.WARNING,
        step=row["step"],
        where=f"node {node}, {source}",
        cause=f"the GPU driver of node {node} does not answer"
        if gpu
        else f"node {node} cannot be sampled: a file system hangs",
        evidence=f"a call to {'NVML' if gpu else 'the operating system'} has not returned for {seconds:g} s",
        next_step="nvidia-smi and dmesg | grep -i -e xid -e nvrm on that node: a driver in this state "
        "often ends in XID 119"
        if gpu
        else "df on that node, with a timeout: an unreachable network file system blocks every process "
        "that reads its free space",
    )


def growing_rank_memory(row: Row, rank: int, node: int, growth: GrowthEstimate, available: float) -> Alert:
    seconds_left, bytes_per_hour = available / growth.per_second, 3600 * growth.per_second
    return Alert(
        name="memory-growth",
        fault="rank-memory",
        level=Level.WARNING,
        step=row["step"],
        where=f"rank {rank}",
        cause=f"the memory of rank {rank} on node {node}, with its data workers, grows steadily",
        evidence=f"from {_bytes(growth.first)} to {_bytes(growth.last)} in {duration(growth.seconds)}, "
        f"{_bytes(bytes_per_hour)} an hour; {_bytes(available)} are available: full in "
        f"{duration(seconds_left)}",
        next_step="find what keeps it: a list of losses or batches in a hook or dataset, an unbounded "
        "cache: python -X tracemalloc=10; try fewer data workers to see whether they are the "
        "cause",
    )


class NodeDetector:
    """Detect the faults of one node, from all its samples in order.

    Args:
        checkpoint_bytes: the size of one checkpoint of the run; 0 if unknown.
    """

    def __init__(self, node: int, checkpoint_bytes: float = 0.0) -> None:
        self._node, self._checkpoint_bytes = node, checkpoint_bytes
        self._rows: deque[Row] = deque(maxlen=LASTING_SAMPLES)
        self._last_values: dict[str, object] = {}  # of each figure, because a sample may lack some
        self._growth: dict[int, GrowthTracker] = {}
        self._stepped_samples = 0

    def check(self, row: Row) -> list[Alert]:
        """Return what is wrong after this sample. Rows come in order and with all their figures."""
        node, previous = self._node, dict(self._last_values)
        self._stepped_samples += "step" in previous and row["step"] != previous["step"]
        self._rows.append(row)
        self._last_values |= row
        rows = tuple(self._rows)
        alerts: list[Alert | None] = [memory_low(rows, node), disk_low(rows, node, self._checkpoint_bytes)]
        alerts += [silent_source(row, source, node) for source in ("gpu", "host")]
        for gpu in gpus(row):
            throttled = throttled_gpu(rows, gpu, node)
            alerts += [throttled or slow_clock(rows, gpu, node), lost_gpu(previous, row, gpu, node)]
            alerts += memory_errors(previous, row, gpu, node)
        if self._stepped_samples >= MIN_STEPPED_SAMPLES:
            alerts += self._growing_ranks(row)
        return [alert for alert in alerts if alert is not None]

    def _growing_ranks(self, row: Row) -> Iterator[Alert]:
        # The maximum over recent samples, because memory that another process used briefly is no measure of
        # growth.
        available = max(
            (
                sample["host/memory_available_bytes"]
                for sample in self._rows
                if "host/memory_available_bytes" in sample
            ),
            default=0.0,
        )
        for name, size in row.items():
            if name.startswith("rank/") and name.endswith("/private_bytes"):
                rank = int(name.split("/")[1])
                growth = self._growth.setdefault(rank, GrowthTracker()).add(row["time"], size, available)
                if growth is not None:
                    yield growing_rank_memory(row, rank, self._node, growth, available)


def _bytes(size: float) -> str:
    return quantity(size, "B")
