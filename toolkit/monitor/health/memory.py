"""Detect memory that grows from step to step, on the fullest rank's process and device."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from toolkit.commands import command_line
from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.detector import WINDOW, Detector, WarmUp, format_percent
from toolkit.monitor.health.robust_stats import BlockMinima
from toolkit.monitor.sink import Kind, Row

GIB = 2**30

POINTS = 16  # in a window
SCALES = (1, 8, 64, 512)  # samples per point: windows of 3 min, 21 min, 3 h and 23 h at 10 s per sample
GROWN_SHARE = 0.02  # of the available memory within a window, which is then full after at most 50 windows
NOISE = 6.0  # the growth must exceed this many median deviations from the line
QUARTER = 0.4  # each quarter of the window must have this fraction of its share, which a single jump does not


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoredMemory:
    """A memory figure of a row, and its limits.

    Attributes:
        quickly, slowly: the minimal growth within 20 steps and over the whole run, as a fraction of the size
            before.
    """

    key: str
    fault: str
    subject: str
    total_bytes: int | None
    quickly: float
    slowly: float
    next_step: str


class MemoryGrowth(Detector):
    """Detect growth in nearly every step, as of a leak. Buffers and caches grow in jumps and then stay.

    Quick: 18 of the last 20 steps grew, by 5% (device: 2%) and 64 MiB in total. Slow: nine of ten blocks of
    the whole run so far (10 to 20 blocks, by their minima) grew, by 20% (device: 10%) and 256 MiB. The first
    30 steps are left out, because queues, caches and pools fill.
    """

    WARM_UP, GREW, BLOCKS, RISING = 30, 18, 20, 0.9
    LEAST_QUICK, LEAST_SLOW = 64 * 2**20, 256 * 2**20

    def __init__(self, memory: MonitoredMemory) -> None:
        self._memory = memory
        self._warm_up = WarmUp(self.WARM_UP)
        self._newest: deque[int] = deque(maxlen=WINDOW + 1)
        self._blocks = BlockMinima(self.BLOCKS, first=10)

    def check(self, kind: Kind, row: Row) -> Alert | None:
        size = row.get(self._memory.key)
        if size is None or not self._warm_up.advance():
            return None
        self._newest.append(size)
        whole = self._blocks.add(size)
        return self._quick(row["step"]) or (self._slow(row["step"]) if whole else None)

    def _quick(self, step: int) -> Alert | None:
        sizes = list(self._newest)
        if len(sizes) <= WINDOW or sizes[-1] - sizes[0] < max(
            self._memory.quickly * sizes[0], self.LEAST_QUICK
        ):
            return None
        grown = [after - before for before, after in itertools.pairwise(sizes) if after > before]
        # one jump among small increases
        if len(grown) < self.GREW or median(grown) * WINDOW < 0.5 * (sizes[-1] - sizes[0]):
            return None
        return self._alert(step, sizes[0], sizes[-1], WINDOW)

    def _slow(self, step: int) -> Alert | None:
        floors = self._blocks.values
        if len(floors) < self.BLOCKS // 2 or floors[-1] - floors[0] < max(
            self._memory.slowly * floors[0], self.LEAST_SLOW
        ):
            return None
        rises = [after - before for before, after in itertools.pairwise(floors)]
        if sum(rise > 0 for rise in rises) < self.RISING * len(rises) or median(rises) * len(rises) < 0.5 * (
            floors[-1] - floors[0]
        ):
            return None
        return self._alert(step, floors[0], floors[-1], len(rises) * self._blocks.length)

    def _alert(self, step: int, before: float, now: float, steps: int) -> Alert:
        memory, a_step = self._memory, (now - before) / steps
        left = ""
        if memory.total_bytes:
            steps_left = max(0, int((memory.total_bytes - now) / a_step))
            left = f"; {memory.total_bytes / GIB:.0f} GiB will be full after {steps_left:,} more steps"
        return Alert(
            name="memory-growth",
            fault=memory.fault,
            level=Level.WARNING,
            step=step,
            cause=f"{memory.subject} grows step by step",
            evidence=f"from {before / GIB:.2f} to {now / GIB:.2f} GiB in {steps} steps "
            f"({format_percent(now / before - 1)} more), "
            f"{a_step / 2**20:.3g} MiB a step{left}",
            next_step=memory.next_step,
        )


def host_memory(total_bytes: int | None) -> MonitoredMemory:
    return MonitoredMemory(
        key="host_bytes",
        fault="process-memory",
        subject="the memory of the process of the fullest rank",
        total_bytes=total_bytes,
        quickly=0.05,
        slowly=0.2,
        next_step=f"find what keeps it: PYTHONTRACEMALLOC=10 {command_line('train', '...')} and "
        "tracemalloc.take_snapshot() in a hook; common causes are lists that grow in each step, "
        "losses kept with their graphs (use float(loss)), and unbounded caches",
    )


def device_memory(total_bytes: int | None) -> MonitoredMemory:
    return MonitoredMemory(
        key="device_bytes",
        fault="device-memory",
        subject="the memory of tensors between steps on the fullest GPU",
        total_bytes=total_bytes,
        quickly=0.02,
        slowly=0.1,
        next_step="find what keeps tensors from step to step, usually losses or outputs kept with their "
        "graphs (use .detach() or float()): torch.cuda.memory._record_memory_history() and "
        "_dump_snapshot('memory.pickle'), shown at https://pytorch.org/memory_viz",
    )


# ---- samples of a rank's process


@dataclass(frozen=True, slots=True)
class GrowthEstimate:
    first: float  # bytes at the ends of the window, on the fitted line
    last: float
    seconds: float  # between them

    @property
    def per_second(self) -> float:
        return (self.last - self.first) / self.seconds


def steady_growth(points: Sequence[tuple[float, float]]) -> GrowthEstimate | None:
    """Fit a line to (seconds, bytes) points and return the growth if it is steady; None if flat, jumping or
    noisy.

    The slope is the median of the slopes between all pairs of points (Theil 1950, Sen 1968), which a few
    outliers do not change. Growth is steady if each quarter of the window contributes its share and the total
    is many times the scatter about the line.
    """
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if b[0] > a[0]]
    if not slopes or points[-1][0] <= points[0][0]:  # the clock was set back
        return None
    slope = median(slopes)
    offset = median(size - slope * at for at, size in points)
    estimate = GrowthEstimate(
        offset + slope * points[0][0], offset + slope * points[-1][0], points[-1][0] - points[0][0]
    )
    grown = estimate.last - estimate.first
    length = len(points) // 4
    quarters = [
        median(size for _, size in points[first : first + length]) for first in range(0, 4 * length, length)
    ]
    steady = all(after - before >= QUARTER * grown / 4 for before, after in itertools.pairwise(quarters))
    scatter = median(abs(size - offset - slope * at) for at, size in points)
    return estimate if grown > 0 and steady and grown > NOISE * scatter else None


class GrowthTracker:
    """Track one series in windows of several lengths.

    Each point is the minimum of several samples, because the memory of a process fluctuates and a leak raises
    its minimum.
    """

    def __init__(self) -> None:
        self._windows: dict[int, deque[tuple[float, float]]] = {
            scale: deque(maxlen=POINTS) for scale in SCALES
        }
        self._lowest: dict[int, list[tuple[float, float]]] = {scale: [] for scale in SCALES}

    def add(self, seconds: float, size: float, available: float) -> GrowthEstimate | None:
        """Add a sample; return growth by a share of ``available`` bytes in the shortest window that shows it,
        and reset that window.
        """
        estimate = None
        for scale, window in self._windows.items():
            samples = self._lowest[scale]
            samples.append((seconds, size))
            if len(samples) < scale:
                continue
            window.append((samples[-1][0], min(size for _, size in samples)))
            samples.clear()
            grown = steady_growth(tuple(window)) if len(window) == POINTS and estimate is None else None
            if grown is not None and grown.last - grown.first > GROWN_SHARE * available:
                estimate = grown
                window.clear()
        return estimate
