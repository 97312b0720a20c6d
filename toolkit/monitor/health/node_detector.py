"""What is wrong with a node, from its samples (``monitor/system/sampler.py``). Pure: rows in, alerts out, with a bounded memory.

A state has to last for three samples: a spike is none. Who hears of it how often is the limiter's business, so what lasts is said at each
sample. What this cannot see: a node whose GPUs are all slow alike (``straggler`` and the report compare nodes), a bad cable that
retransmits without an error event, and memory errors that no code corrects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.memory_leak import GrowthEstimate, GrowthTracker
from toolkit.monitor.sink import Row
from toolkit.monitor.system.gpu_codes import HARMFUL, xid_info
from toolkit.progress import duration, quantity

LASTING_SAMPLES = 3  # samples
THROTTLED_PERCENT = 20.0  # of the time: a tenth of the clock is lost where the hardware halves it
BUSY_PERCENT = 50.0  # utilization of a GPU whose clock is compared with others': an idle one lowers its clock
SLOW_CLOCK = 0.8  # of the median of the others: GPUs at one power limit differ by less than a tenth
MEMORY_SHARE = 0.03  # of the host's memory, or of its limit, that should be free
DISK_SHARE, DISK_BYTES = (
    0.03,
    50e9,
)  # free of the run's disk: the smaller of the two, and room for one checkpoint
SILENT_SECONDS = 60.0
MIN_STEPPED_SAMPLES = 3  # samples in which training went on, before its memory is looked at: a model and its state take theirs steadily too


# ---- one GPU


def throttled_gpu(rows: Sequence[Row], gpu: int, node: int) -> Alert | None:
    """Clocks held down by heat or power supply, in each of ``rows``."""

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
    evidence = [f"in {len(rows)} samples one after another", *_clock(row, gpu)]
    evidence += [f"{row[key]:g} °C" for key in (f"gpu/{gpu}/temperature_celsius",) if key in row]
    evidence += [
        f"memory at {row[key]:g} °C" for key in (f"gpu/{gpu}/memory_temperature_celsius",) if key in row
    ]
    evidence += [
        f"{row[key]:g} % of the time since the sample before"
        for key in (f"gpu/{gpu}/throttled_percent",)
        if key in row
    ]
    by_power = set(known) and set(known) <= {"power-brake"}
    remedy = (
        "have the node's power supplies and its rack's power limit looked at"
        if by_power
        else ("have fans, dust, inlet temperature and the seat of the heat sink looked at")
    )
    return Alert(
        name="gpu-throttled",
        level=Level.WARNING,
        step=row["step"],
        where=_gpu(node, gpu),
        cause=f"the clock of GPU {gpu} of node {node} is held down: {reasons}",
        evidence=", ".join(evidence),
        next_step=f"{remedy}; nvidia-smi -i {_index(row, gpu)} -q -d PERFORMANCE,TEMPERATURE,POWER on that node; if it stays, leave the "
        "node out: all ranks wait for the slowest",
    )


def slow_clock(rows: Sequence[Row], gpu: int, node: int) -> Alert | None:
    """A busy GPU whose clock is far below that of the other busy ones of its node, in each of ``rows``."""

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
        name="gpu-slow-clock",
        level=Level.WARNING,
        step=row["step"],
        where=_gpu(node, gpu),
        cause=f"GPU {gpu} of node {node} runs at a much lower clock than the other GPUs of the node",
        evidence=f"{', '.join(_clock(row, gpu))}; the others' median {median(peers(row)):.0%}, alert below {SLOW_CLOCK:.0%} of it; reasons "
        f"that its driver gives: {reasons}",
        next_step=f"compare limits and set clocks: nvidia-smi -i {_index(row, gpu)} -q -d CLOCK,POWER,PERFORMANCE; nvidia-smi "
        f"--reset-gpu-clocks -i {_index(row, gpu)} takes a forgotten setting back",
    )


def memory_errors(before: Row, row: Row, gpu: int, node: int) -> Iterator[Alert]:
    """New uncorrectable errors, and rows that wait for a remapping or could not be remapped. ``before``: the last known figures."""

    def alert(level: Level, name: str, cause: str, evidence: str, next_step: str) -> Alert:
        return Alert(
            name=name,
            level=level,
            step=row["step"],
            where=_gpu(node, gpu),
            cause=cause,
            evidence=evidence,
            next_step=next_step,
        )

    index = _index({**before, **row}, gpu)
    reset = f"take the node out of the run and reset the GPU (nvidia-smi --gpu-reset -i {index}); test it: dcgmi diag -r 3"
    errors = f"gpu/{gpu}/ecc_uncorrected_errors"
    if errors in row and errors in before and row[errors] > before[errors]:
        yield alert(
            Level.ERROR,
            "gpu-memory-error",
            f"the memory of GPU {gpu} of node {node} had errors that ECC cannot correct",
            f"{row[errors] - before[errors]:g} since the sample before, {row[errors]:g} since the driver was loaded",
            f"results since the last checkpoint are in doubt where the run did not end by itself; {reset}",
        )
    if _begins(before, row, f"gpu/{gpu}/row_remap_failed"):
        yield alert(
            Level.ERROR,
            "gpu-row-remap-failed",
            f"a bad row of the memory of GPU {gpu} of node {node} could not be remapped",
            _remapped(row, gpu),
            "take the node out of use: NVIDIA replaces GPUs in this state",
        )
    if _begins(before, row, f"gpu/{gpu}/row_remap_pending"):
        yield alert(
            Level.WARNING,
            "gpu-row-remap-pending",
            f"a bad row in the memory of GPU {gpu} of node {node} waits to be remapped",
            _remapped(row, gpu),
            f"the run may go on; then {reset}",
        )


def lost_gpu(before: Row, row: Row, gpu: int, node: int) -> Alert | None:
    if not _begins(before, row, f"gpu/{gpu}/lost"):
        return None
    return Alert(
        name="gpu-lost",
        level=Level.ERROR,
        step=row["step"],
        where=_gpu(node, gpu),
        cause=f"GPU {gpu} of node {node} is lost: its driver cannot reach it any more",
        evidence=f"NVML answers GPU_IS_LOST for {before.get(f'gpu/{gpu}/name', 'the GPU')} {before.get(f'gpu/{gpu}/uuid', '')}".rstrip(),
        next_step="the run ends or hangs; restart it without this node, and the node itself: dmesg | grep -i -e xid -e nvrm tells more",
    )


def xid_alert(number: int, gpu: int | None, node: int, step: int, uuid: str = "") -> Alert:
    """An event of the driver, as it comes. ``gpu`` None: of one that the run does not use."""
    known = xid_info(number)
    whose = f"GPU {gpu} of node {node}" if gpu is not None else f"a GPU of node {node}"
    return Alert(
        name="gpu-xid",
        level=known.level,
        step=step,
        where=_gpu(node, gpu) if gpu is not None else f"node {node}",
        cause=f"XID {number} on {whose}: the driver reports {known.meaning}",
        evidence=f"event {number} of NVML{f' on {uuid}' if uuid else ''}; dmesg | grep -i xid on the node has the driver's own words",
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
    most = f"; rank {largest} holds most: {_bytes(ranks[largest])}" if largest is not None else ""
    return Alert(
        name="host-memory-low",
        level=Level.ERROR,
        step=row["step"],
        where=f"node {node}",
        cause=f"the memory of node {node} is nearly full: the kernel ends a process next",
        evidence=f"{_bytes(row['host/memory_available_bytes'])} {kind}, {_bytes(total(row))}, are available, page cache included (alert "
        f"below {MEMORY_SHARE:.0%}){most}",
        next_step="fewer data workers, less in host memory (offload keeps parameters or optimizer states there), or another process that "
        "should not be on the node: ps aux --sort -rss | head",
    )


def disk_low(rows: Sequence[Row], node: int, checkpoint_bytes: float) -> Alert | None:
    def least(row: Row) -> float:
        return max(checkpoint_bytes, min(DISK_SHARE * row.get("disk/total_bytes", 0.0), DISK_BYTES))

    if not _lasts(rows, lambda row: row.get("disk/free_bytes", float("inf")) < least(row)):
        return None
    row = rows[-1]
    room = f"; a checkpoint of this run takes about {_bytes(checkpoint_bytes)}" if checkpoint_bytes else ""
    return Alert(
        name="disk-low",
        level=Level.WARNING,
        step=row["step"],
        where=f"node {node}",
        cause="the disk of the run's directory is nearly full",
        evidence=f"{_bytes(row['disk/free_bytes'])} of {_bytes(row['disk/total_bytes'])} are free on node {node} (alert below "
        f"{_bytes(least(row))}){room}",
        next_step="make room before the next checkpoint, which else fails: checkpoint.keep_last keeps fewer, du -sh RUN_DIR/* says what is "
        "large",
    )


def silent_source(row: Row, source: str, node: int) -> Alert | None:
    """Figures that do not come any more."""
    seconds = row.get(f"{source}/silent_seconds", 0.0)
    if seconds < SILENT_SECONDS:
        return None
    gpu = source == "gpu"
    return Alert(
        name="sampling-stalled",
        level=Level.WARNING,
        step=row["step"],
        where=f"node {node}, {source}",
        cause=f"the GPU driver of node {node} does not answer"
        if gpu
        else f"node {node} cannot be measured: a file system hangs",
        evidence=f"a question to {'NVML' if gpu else 'the operating system'} has been open for {seconds:g} s",
        next_step="nvidia-smi and dmesg | grep -i -e xid -e nvrm on that node: a driver in this state often ends in XID 119"
        if gpu
        else "df on that node, with a timeout: a network file system that is gone blocks whoever asks for its free space",
    )


# ---- memory that creeps


def growing_rank(row: Row, rank: int, node: int, grown: GrowthEstimate, available: float) -> Alert:
    left, an_hour = available / grown.per_second, 3600 * grown.per_second
    return Alert(
        name="host-memory-creep",
        level=Level.WARNING,
        step=row["step"],
        where=f"rank {rank}",
        cause=f"the memory of rank {rank} on node {node}, with its data workers, grows steadily: something is kept without need",
        evidence=f"from {_bytes(grown.first)} to {_bytes(grown.last)} in {duration(grown.seconds)}, {_bytes(an_hour)} an hour; "
        f"{_bytes(available)} are available: full in {duration(left)}",
        next_step="find what keeps it: a list of losses or batches in a hook or dataset, a cache without bound: python -X tracemalloc=10, "
        "or fewer data workers to see whether it is they",
    )


# ---- all of a node


class NodeDetector:
    """
    Args:
        checkpoint_bytes: that one checkpoint of the run takes, 0 where it is not known.
    """

    def __init__(self, node: int, checkpoint_bytes: float = 0.0) -> None:
        self._node, self._checkpoint_bytes = node, checkpoint_bytes
        self._rows: deque[Row] = deque(maxlen=LASTING_SAMPLES)
        self._known: dict[str, object] = {}  # the last value of each figure: a sample may lack some
        self._creeps: dict[int, GrowthTracker] = {}
        self._moves = 0

    def see(self, row: Row) -> list[Alert]:
        """What is wrong by now. Rows come in order and with all their figures."""
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
        # What was there a moment ago counts: memory that somebody took for a moment is no measure of growth.
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


def _lasts(rows: Sequence[Row], so: Callable[[Row], bool]) -> bool:
    return len(rows) == LASTING_SAMPLES and all(so(row) for row in rows)


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
        f"{row[f'gpu/{gpu}/sm_clock_mhz']:g} of {row[f'gpu/{gpu}/sm_clock_max_mhz']:g} MHz ({row[f'gpu/{gpu}/sm_clock_ratio']:.0%})"
    ]


def _remapped(row: Row, gpu: int) -> str:
    of = {kind: row.get(f"gpu/{gpu}/remapped_rows_{kind}", 0) for kind in ("corrected", "uncorrected")}
    return f"rows remapped over its life: {of['corrected']} for errors that were corrected, {of['uncorrected']} for others"


def _gpu(node: int, gpu: int) -> str:
    return f"node {node}, GPU {gpu}"


def _index(row: Mapping[str, object], gpu: int) -> object:
    """What nvidia-smi takes after -i: the UUID, since its own numbers may be others than CUDA's."""
    return row.get(f"gpu/{gpu}/uuid", gpu)


def _bytes(size: float) -> str:
    return quantity(size, "B")
