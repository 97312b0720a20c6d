"""Detect faults of a node from its samples (``monitor/system/sampler.py``).

A condition must hold for three samples, so that spikes give no alert. An alert is returned for every sample
while the condition holds; ``AlertLimiter`` decides how often it is shown. Not detected: a node whose GPUs are
all equally slow (``straggler`` and the report compare nodes), a bad cable that retransmits without an error
event, and memory errors that ECC misses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.memory import GrowthEstimate, GrowthTracker
from toolkit.monitor.sink import Row
from toolkit.monitor.system.gpu_codes import HARMFUL, xid_info
from toolkit.progress import duration, quantity

LASTING_SAMPLES = 3
THROTTLED_PERCENT = 20.0  # of the time; the hardware halves the clock, so this loses 10%
BUSY_PERCENT = 50.0  # utilization of GPUs whose clocks are compared: an idle GPU lowers its clock
SLOW_CLOCK = 0.8  # of the median of the others; GPUs at the same power limit differ by less than 10%
MEMORY_SHARE = 0.03  # of the host's memory, or of its limit, that should be free
DISK_SHARE, DISK_BYTES = (
    0.03,
    50e9,
)  # free space of the run's disk: the smaller of the two, and room for one checkpoint
SILENT_SECONDS = 60.0
# samples with training progress before memory is judged, because loading a model grows steadily too
MIN_STEPPED_SAMPLES = 3


# ---- one GPU


def throttled_gpu(rows: Sequence[Row], gpu: int, node: int) -> Alert | None:
    """Detect a GPU whose clocks are lowered by heat or power supply in all of ``rows``."""

    def harmful(row: Row) -> bool:
        return (
            bool(row.get(f"gpu/{gpu}/throttled"))
            or row.get(f"gpu/{gpu}/throttled_percent", 0.0) >= THROTTLED_PERCENT
        )

    if not _lasts(rows, harmful):
        return None
    row = rows[-1]
    known = dict.fromkeys(
        name
        for one in rows
        for name in str(one.get(f"gpu/{gpu}/throttle_reasons", "")).split("+")
        if name in HARMFUL
    )
    reasons = " and ".join(known) or "heat or power supply"
    evidence = [f"in {len(rows)} consecutive samples", *_clock(row, gpu)]
    evidence += [f"{row[key]:g} °C" for key in (f"gpu/{gpu}/temperature_celsius",) if key in row]
    evidence += [
        f"memory at {row[key]:g} °C" for key in (f"gpu/{gpu}/memory_temperature_celsius",) if key in row
    ]
    evidence += [
        f"{row[key]:g} % of the time since the previous sample"
        for key in (f"gpu/{gpu}/throttled_percent",)
        if key in row
    ]
    by_power = set(known) and set(known) <= {"power-brake"}
    remedy = (
        "have the node's power supplies and its rack's power limit checked"
        if by_power
        else ("have fans, dust, inlet temperature and the seat of the heat sink checked")
    )
    return Alert(
        name="gpu-slow",
        fault="throttled",
        level=Level.WARNING,
        step=row["step"],
        where=_gpu(node, gpu),
        cause=f"the clock of GPU {gpu} of node {node} is throttled: {reasons}",
        evidence=", ".join(evidence),
        next_step=f"{remedy}; nvidia-smi -i {_index(row, gpu)} -q -d PERFORMANCE,TEMPERATURE,POWER on that "
        "node; if it persists, exclude the node: all ranks wait for the slowest",
    )


def slow_clock(rows: Sequence[Row], gpu: int, node: int) -> Alert | None:
    """Detect a busy GPU whose clock is far below that of the other busy GPUs of its node in all of
    ``rows``.
    """

    def peers(row: Row) -> list[float]:
        return [
            row[f"gpu/{other}/sm_clock_ratio"] for other in gpus(row) if other != gpu and _busy(row, other)
        ]

    def slow(row: Row) -> bool:
        others = peers(row)
        return (
            bool(others)
            and _busy(row, gpu)
            and row[f"gpu/{gpu}/sm_clock_ratio"] < SLOW_CLOCK * median(others)
        )

    if not _lasts(rows, slow):
        return None
    row = rows[-1]
    reasons = row.get(f"gpu/{gpu}/throttle_reasons", "unknown")
    return Alert(
        name="gpu-slow",
        fault="slow-clock",
        level=Level.WARNING,
        step=row["step"],
        where=_gpu(node, gpu),
        cause=f"GPU {gpu} of node {node} runs at a much lower clock than the other GPUs of the node",
        evidence=f"{', '.join(_clock(row, gpu))}; the others' median {median(peers(row)):.0%}, alert below "
        f"{SLOW_CLOCK:.0%} of it; throttle reasons of its driver: {reasons}",
        next_step=f"compare limits and set clocks: nvidia-smi -i {_index(row, gpu)} -q -d "
        f"CLOCK,POWER,PERFORMANCE; nvidia-smi --reset-gpu-clocks -i {_index(row, gpu)} reverts a "
        "forgotten setting",
    )


def memory_errors(before: Row, row: Row, gpu: int, node: int) -> Iterator[Alert]:
    """Yield alerts for new uncorrectable errors and for row remappings that are pending or failed.

    Args:
        before: the last known value of each figure.
    """

    def alert(level: Level, fault: str, cause: str, evidence: str, next_step: str) -> Alert:
        return Alert(
            name="gpu-fault",
            fault=fault,
            level=level,
            step=row["step"],
            where=_gpu(node, gpu),
            cause=cause,
            evidence=evidence,
            next_step=next_step,
        )

    index = _index({**before, **row}, gpu)
    reset = (
        f"exclude the node from the run and reset the GPU (nvidia-smi --gpu-reset -i {index}); test "
        "it: dcgmi diag -r 3"
    )
    errors = f"gpu/{gpu}/ecc_uncorrected_errors"
    if errors in row and errors in before and row[errors] > before[errors]:
        yield alert(
            Level.ERROR,
            "memory-error",
            f"the memory of GPU {gpu} of node {node} had errors that ECC cannot correct",
            f"{row[errors] - before[errors]:g} since the previous sample, {row[errors]:g} since the driver "
            "was loaded",
            f"if the run continues, results since the last checkpoint are in doubt; {reset}",
        )
    if _begins(before, row, f"gpu/{gpu}/row_remap_failed"):
        yield alert(
            Level.ERROR,
            "row-remap-failed",
            f"a bad memory row of GPU {gpu} of node {node} could not be remapped",
            _remapped(row, gpu),
            "retire the node: NVIDIA replaces GPUs in this state",
        )
    if _begins(before, row, f"gpu/{gpu}/row_remap_pending"):
        yield alert(
            Level.WARNING,
            "row-remap-pending",
            f"a bad memory row of GPU {gpu} of node {node} is waiting to be remapped",
            _remapped(row, gpu),
            f"the run may continue; afterwards {reset}",
        )


def lost_gpu(before: Row, row: Row, gpu: int, node: int) -> Alert | None:
    if not _begins(before, row, f"gpu/{gpu}/lost"):
        return None
    return Alert(
        name="gpu-fault",
        fault="lost",
        level=Level.ERROR,
        step=row["step"],
        where=_gpu(node, gpu),
        cause=f"GPU {gpu} of node {node} is lost: its driver cannot reach it any more",
        evidence=f"NVML answers GPU_IS_LOST for {before.get(f'gpu/{gpu}/name', 'the GPU')} "
        f"{before.get(f'gpu/{gpu}/uuid', '')}".rstrip(),
        next_step="the run ends or hangs; restart it without this node, and restart the node: dmesg | grep "
        "-i -e xid -e nvrm has details",
    )


def xid_alert(number: int, gpu: int | None, node: int, step: int, uuid: str = "") -> Alert:
    """Build the alert for an XID event of the driver. ``gpu`` is None for a GPU that the run does not use."""
    known = xid_info(number)
    whose = f"GPU {gpu} of node {node}" if gpu is not None else f"a GPU of node {node}"
    return Alert(
        name="gpu-fault",
        fault="xid",
        level=known.level,
        step=step,
        where=_gpu(node, gpu) if gpu is not None else f"node {node}",
        cause=f"XID {number} on {whose}: the driver reports {known.meaning}",
        evidence=f"event {number} of NVML{f' on {uuid}' if uuid else ''}; dmesg | grep -i xid on the node "
        "has the driver's message",
        next_step=known.next_step.replace("INDEX", uuid or "INDEX"),
    )


# ---- the host


def memory_low(rows: Sequence[Row], node: int) -> Alert | None:
    def total(row: Row) -> float:
        return float(row.get("host/memory_limit_bytes", row.get("host/memory_total_bytes", 0.0)))

    if not _lasts(
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

    if not _lasts(rows, lambda row: row.get("disk/free_bytes", float("inf")) < least(row)):
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


# ---- memory that creeps


def growing_rank(row: Row, rank: int, node: int, grown: GrowthEstimate, available: float) -> Alert:
    left, an_hour = available / grown.per_second, 3600 * grown.per_second
    return Alert(
        name="memory-growth",
        fault="rank-memory",
        level=Level.WARNING,
        step=row["step"],
        where=f"rank {rank}",
        cause=f"the memory of rank {rank} on node {node}, with its data workers, grows steadily",
        evidence=f"from {_bytes(grown.first)} to {_bytes(grown.last)} in {duration(grown.seconds)}, "
        f"{_bytes(an_hour)} an hour; {_bytes(available)} are available: full in {duration(left)}",
        next_step="find what keeps it: a list of losses or batches in a hook or dataset, an unbounded "
        "cache: python -X tracemalloc=10; try fewer data workers to see whether they are the "
        "cause",
    )


# ---- all of a node


class NodeDetector:
    """Args:
    checkpoint_bytes: the size of one checkpoint of the run; 0 if unknown.
    """

    def __init__(self, node: int, checkpoint_bytes: float = 0.0) -> None:
        self._node, self._checkpoint_bytes = node, checkpoint_bytes
        self._rows: deque[Row] = deque(maxlen=LASTING_SAMPLES)
        self._known: dict[str, object] = {}  # the last value of each figure, because a sample may lack some
        self._creeps: dict[int, GrowthTracker] = {}
        self._moves = 0

    def check(self, row: Row) -> list[Alert]:
        """Return what is wrong after this sample. Rows come in order and with all their figures."""
        node, before = self._node, dict(self._known)
        self._moves += "step" in before and row["step"] != before["step"]
        self._rows.append(row)
        self._known |= row
        rows = tuple(self._rows)
        found: list[Alert | None] = [memory_low(rows, node), disk_low(rows, node, self._checkpoint_bytes)]
        found += [silent_source(row, source, node) for source in ("gpu", "host")]
        for gpu in gpus(row):
            held_down = throttled_gpu(rows, gpu, node)
            found += [held_down or slow_clock(rows, gpu, node), lost_gpu(before, row, gpu, node)]
            found += memory_errors(before, row, gpu, node)
        if self._moves >= MIN_STEPPED_SAMPLES:
            found += self._creeping(row)
        return [alert for alert in found if alert is not None]

    def _creeping(self, row: Row) -> Iterator[Alert]:
        # The maximum over recent samples, because memory that another process used briefly is no measure of
        # growth.
        available = max(
            (
                one["host/memory_available_bytes"]
                for one in self._rows
                if "host/memory_available_bytes" in one
            ),
            default=0.0,
        )
        for name, size in row.items():
            if name.startswith("rank/") and name.endswith("/private_bytes"):
                rank = int(name.split("/")[1])
                grown = self._creeps.setdefault(rank, GrowthTracker()).add(row["time"], size, available)
                if grown is not None:
                    yield growing_rank(row, rank, self._node, grown, available)


def gpus(row: Row) -> range:
    return range(int(row.get("gpu/count", 0)))


def _lasts(rows: Sequence[Row], condition: Callable[[Row], bool]) -> bool:
    return len(rows) == LASTING_SAMPLES and all(condition(row) for row in rows)


def _begins(before: Row, row: Row, name: str) -> bool:
    return bool(row.get(name)) and not before.get(name)


def _busy(row: Row, gpu: int) -> bool:
    return (
        row.get(f"gpu/{gpu}/utilization_percent", 0.0) >= BUSY_PERCENT and f"gpu/{gpu}/sm_clock_ratio" in row
    )


def _clock(row: Row, gpu: int) -> list[str]:
    if f"gpu/{gpu}/sm_clock_ratio" not in row:
        return []
    return [
        f"{row[f'gpu/{gpu}/sm_clock_mhz']:g} of {row[f'gpu/{gpu}/sm_clock_max_mhz']:g} MHz "
        f"({row[f'gpu/{gpu}/sm_clock_ratio']:.0%})"
    ]


def _remapped(row: Row, gpu: int) -> str:
    of = {kind: row.get(f"gpu/{gpu}/remapped_rows_{kind}", 0) for kind in ("corrected", "uncorrected")}
    return (
        f"rows remapped during its life: {of['corrected']} after corrected errors, {of['uncorrected']} "
        "after uncorrected errors"
    )


def _gpu(node: int, gpu: int) -> str:
    return f"node {node}, GPU {gpu}"


def _index(row: Mapping[str, object], gpu: int) -> object:
    """Return the argument for nvidia-smi -i: the UUID, because its own numbers may differ from CUDA's."""
    return row.get(f"gpu/{gpu}/uuid", gpu)


def _bytes(size: float) -> str:
    return quantity(size, "B")
