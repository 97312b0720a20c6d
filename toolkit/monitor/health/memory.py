"""Memory that grows from step to step: of the fullest rank's process, and of its device."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from statistics import median

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.detector import WINDOW, Detector, WarmUp, format_percent
from toolkit.monitor.health.robust_stats import BlockMinima
from toolkit.monitor.sink import Kind, Row

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoredMemory:
    """One figure of a row, and how much of it there is.

    Attributes:
        quickly, slowly: the least growth in 20 steps and over all of the run that counts, as a share of what was there before.
    """

    key: str
    name: str
    words: str
    total_bytes: int | None
    quickly: float
    slowly: float
    next_step: str


class MemoryGrowth(Detector):
    """Growth in nearly every step, which a leak is and nothing else: buffers and caches grow in jumps and then stay.

    Quick: 18 of the last 20 steps grew, by a twentieth of what was there (device: a fiftieth) and 64 MiB in all. Slow: over blocks of the
    whole run so far (10 to 20 of them; their floors), nine of ten grew, by a fifth and 256 MiB. The first 30 steps are left out: queues,
    caches and pools fill.
    """

    WARM_UP, GREW, BLOCKS, RISING = 30, 18, 20, 0.9
    LEAST_QUICK, LEAST_SLOW = 64 * 2**20, 256 * 2**20

    def __init__(self, memory: MonitoredMemory) -> None:
        self._memory = memory
        self._warm_up = WarmUp(self.WARM_UP)
        self._newest: deque[int] = deque(maxlen=WINDOW + 1)
        self._blocks = BlockMinima(self.BLOCKS, first=10)

    def see(self, kind: Kind, row: Row) -> Alert | None:
        size = row.get(self._memory.key)
        if size is None or not self._warm_up.over():
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
        if len(grown) < self.GREW or median(grown) * WINDOW < 0.5 * (
            sizes[-1] - sizes[0]
        ):  # no jump among small ones
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
            left = f"; {memory.total_bytes / GIB:.0f} GiB are full after {max(0, int((memory.total_bytes - now) / a_step)):,} more steps"
        return Alert(
            name=memory.name,
            level=Level.WARNING,
            step=step,
            cause=f"{memory.words} grows step by step",
            evidence=f"from {before / GIB:.2f} to {now / GIB:.2f} GiB in {steps} steps ({format_percent(now / before - 1)} more), "
            f"{a_step / 2**20:.3g} MiB a step{left}",
            next_step=memory.next_step,
        )


def host_memory(total_bytes: int | None) -> MonitoredMemory:
    return MonitoredMemory(
        key="host_bytes",
        name="memory-creep",
        words="the memory of the process of a rank (the fullest one)",
        total_bytes=total_bytes,
        quickly=0.05,
        slowly=0.2,
        next_step="find what keeps it: python -X tracemalloc=10 launch/train.py ... and tracemalloc.take_snapshot() in a hook; usual are "
        "lists that are appended to in each step, losses kept with their graphs (use float(loss)), and caches without bounds",
    )


def device_memory(total_bytes: int | None) -> MonitoredMemory:
    return MonitoredMemory(
        key="device_bytes",
        name="device-memory-creep",
        words="the memory that tensors hold on a GPU between steps (the fullest one)",
        total_bytes=total_bytes,
        quickly=0.02,
        slowly=0.1,
        next_step="find what keeps tensors from step to step, usually losses or outputs kept with their graphs (use .detach() or float()): "
        "torch.cuda.memory._record_memory_history() and _dump_snapshot('memory.pickle'), shown at https://pytorch.org/memory_viz",
    )
