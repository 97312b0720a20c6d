"""Detect time lost in single steps: data stalls, garbage collection, pauses, stopped processes and busy
hosts.

Thresholds are fractions of the time, so that they mean the same in every run.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from toolkit.commands import command_line
from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.detector import (
    LASTING_STEPS,
    LONG_WINDOW,
    MIN_SECONDS,
    WINDOW,
    Detector,
    SizeOfStep,
    TimeGroups,
    WarmUp,
    format_percent,
    format_seconds,
)
from toolkit.monitor.health.robust_stats import LastingCondition
from toolkit.monitor.health.step_cost import cost_of_row, is_computing, read_delay
from toolkit.monitor.sink import Kind, Row
from toolkit.step_parts import CHECKPOINT, COMMUNICATION, DATA, EVALUATION


@dataclass(frozen=True, slots=True)
class _SampleWait:
    """Seconds waited for the samples of one step: by the rank that waited longest, by the others, and the
    step's total.
    """

    longest: float
    others: float
    step_seconds: float
    rank: int = 0


class DataStall(Detector):
    """Detect waiting for samples in more than 10% of the last 20 steps, or of up to 200 if samples arrive in
    large chunks.

    The longest wait is left out, so that a single hiccup of a disk gives no alert. A healthy pipeline stays
    ahead of training and its share is far below 1%. With the ledger, the alert names the rank if one rank
    waits and the others do not.
    """

    SHARE, LEAST_LOST = 0.1, 0.5  # LEAST_LOST: seconds in a window

    def __init__(self, remedy: str, *, ranks_per_node: int, ledger: bool) -> None:
        self._remedy, self._ranks_per_node = remedy, ranks_per_node
        self.kinds = (Kind.LEDGER if ledger else Kind.STEP,)  # type: ignore[misc]  # a class variable elsewhere
        self._warm_up = WarmUp()
        self._steps: deque[_SampleWait] = deque(maxlen=LONG_WINDOW)

    def check(self, kind: Kind, row: Row) -> Alert | None:
        if not self._warm_up.advance():
            return None
        self._steps.append(_wait_from_ledger(row) if kind is Kind.LEDGER else _wait_from_step(row))
        if len(self._steps) < WINDOW:
            return None
        for length in (WINDOW, LONG_WINDOW):
            steps = list(self._steps)[-length:]
            hiccup = max(steps, key=lambda step: step.longest)
            waited = sum(step.longest for step in steps) - hiccup.longest
            total_seconds = sum(step.step_seconds for step in steps) - hiccup.step_seconds
            if waited > max(self.SHARE * total_seconds, self.LEAST_LOST, MIN_SECONDS * len(steps)):
                return self._alert(row["step"], steps)
        return None

    def _alert(self, step: int, steps: Sequence[_SampleWait]) -> Alert:
        waited, others, total_seconds = (
            sum(getattr(wait, name) for wait in steps) for name in ("longest", "others", "step_seconds")
        )
        share = waited / total_seconds
        longer: defaultdict[int, float] = defaultdict(float)  # by rank: seconds waited longer than the others
        for wait in steps:
            longer[wait.rank] += wait.longest - wait.others
        rank = max(longer, key=longer.__getitem__)
        if longer[rank] > waited / 2:
            node = rank // self._ranks_per_node
            return Alert(
                name="data-stall",
                where=f"rank {rank}",
                level=Level.WARNING,
                step=step,
                lost_share=share,
                cause=f"the data pipeline of rank {rank} is slow, and all ranks wait for it",
                evidence=f"rank {rank} waited {format_seconds(waited)} for samples in the last "
                f"{len(steps)} steps, {format_percent(share)} of their time; the median rank "
                f"waited {format_seconds(others)}",
                next_step=f"check disk, network and CPU of node {node}: system/node-{node}.jsonl",
            )
        return Alert(
            name="data-stall",
            level=Level.WARNING,
            step=step,
            lost_share=share,
            cause="the data pipeline is slow: training waits for samples",
            evidence=f"waiting for samples took {format_percent(share)} of the last {len(steps)} steps, "
            f"{format_seconds(waited / len(steps))} of {format_seconds(total_seconds / len(steps))} a "
            f"step (alert above {self.SHARE:.0%})",
            next_step=self._remedy,
        )


def _wait_from_step(row: Row) -> _SampleWait:
    return _SampleWait(
        row["data_seconds"], row["data_seconds"], max(row["step_seconds"], row["data_seconds"])
    )


def _wait_from_ledger(row: Row) -> _SampleWait:
    low, middle, high = row["parts"].get(DATA, (0.0, 0.0, 0.0))
    # On a host without a free processor the threads that prefetch are late too, which is not the pipeline's
    # fault.
    row_cost = cost_of_row(row, 1)
    waited = row_cost.corrected(high, row_cost.starved)
    others = high if row["ranks"] == 1 else low if row["ranks"] == 2 else middle
    return _SampleWait(waited, min(waited, others), max(row["wall_seconds"], waited), row["data_rank"])


class GarbageCollection(Detector):
    """Detect garbage collection that takes more than 5% of the last 20 steps.

    The collector stops every thread of a rank, and all ranks wait for the rank that collects. The longest
    collection is left out, since an occasional full collection is normal in Python.
    """

    SHARE = 0.05

    def __init__(self) -> None:
        self._warm_up = WarmUp()
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def check(self, kind: Kind, row: Row) -> Alert | None:
        if "gc_seconds" not in row or not self._warm_up.advance():
            return None
        self._steps.append((row["gc_seconds"], row["step_seconds"]))
        if len(self._steps) < WINDOW:
            return None
        steps = sorted(self._steps)[:-1]
        collected, total_seconds = (sum(part) for part in zip(*steps, strict=True))
        if collected <= max(self.SHARE * total_seconds, MIN_SECONDS * len(steps)):
            return None
        return Alert(
            name="slow-steps",
            fault="garbage-collection",
            level=Level.WARNING,
            step=row["step"],
            lost_share=collected / total_seconds,
            cause="Python's garbage collection stops training",
            evidence=f"{format_percent(collected / total_seconds)} of the last {WINDOW} steps, "
            f"{format_seconds(collected / len(steps))} a step on the rank where it took longest "
            f"(alert above {self.SHARE:.0%})",
            next_step="find the code that creates many Python objects in each step (a model, hook or "
            "dataset of your own that keeps lists, dicts or graphs): PYTHONTRACEMALLOC=10 "
            f"{command_line('train', '...')}; objects that existed before the first step are not scanned",
        )


class RepeatedPauses(Detector):
    """Detect single steps that repeatedly take far longer than the others.

    Spikes of three times the median in one step of a hundred are normal on shared networks and disks. An
    alert needs five of the last 20 steps above twice the median (one in a million steps by chance), or six of
    the last 200 that lose 10% of the time. A long step that follows a long step does not count: steps that
    stay slow are FallingThroughput's. Time that other alerts cover is left out: waits for samples, saves,
    evaluations, garbage collection, stopped processes, a busy host.
    """

    TIMES, FEW, OFTEN, SHARE = 2.0, 5, 6, 0.1
    LEAST_PAUSE = 0.1  # seconds; shorter pauses come from the operating system's scheduler
    kinds = (Kind.STEP, Kind.LEDGER)

    def __init__(self, size_of_step: SizeOfStep) -> None:
        self._size = size_of_step
        self._warm_up = WarmUp()
        self._collected: dict[int, float] = {}  # seconds of garbage collection by step
        # Corrected seconds, measured seconds, and seconds of each part.
        self._newest: deque[tuple[float, float, dict[str, float]]] = deque(maxlen=LONG_WINDOW)

    def check(self, kind: Kind, row: Row) -> Alert | None:
        if kind is Kind.STEP:
            self._collected[row["step"]] = row.get("gc_seconds", 0.0)
            if len(self._collected) > 5 * LONG_WINDOW:  # ledger rows arrive some seconds later
                del self._collected[next(iter(self._collected))]
            return None
        if not self._warm_up.advance():
            return None
        size = self._size(row["step"])
        row_cost = cost_of_row(row, size, self._collected.get(row["step"], 0.0))
        # All ranks wait for the one that is late, so waiting counts with its minimum and computing with its
        # maximum.
        parts = {
            name: (high if is_computing(name) else low) / size
            for name, (low, _, high) in row["parts"].items()
            if name not in (DATA, CHECKPOINT, EVALUATION)
        }
        self._newest.append((row_cost.least / size, row_cost.measured / size, parts))
        if len(self._newest) < WINDOW:
            return None
        middle = median(measured for _, measured, _ in self._newest)
        limit = max(self.TIMES * middle, middle + self.LEAST_PAUSE / size)
        return self._assess(row["step"], size, middle, limit) if self._newest[-1][0] > limit else None

    def _assess(self, step: int, size: int, middle: float, limit: float) -> Alert | None:
        for length, least in ((WINDOW, self.FEW), (LONG_WINDOW, self.OFTEN)):
            steps = list(self._newest)[-length:]
            long = [now for before, now in itertools.pairwise(steps) if now[0] > limit >= before[0]]
            share = sum(judged - middle for judged, _, _ in long) / sum(measured for _, measured, _ in steps)
            if len(long) >= least and (length == WINDOW or share > self.SHARE):
                part = self._part([parts for _, _, parts in long])
                typical = size * median(judged for judged, _, _ in long)
                return Alert(
                    name="slow-steps",
                    fault="pauses",
                    level=Level.WARNING,
                    step=step,
                    where=part,
                    lost_share=share,
                    cause="single steps repeatedly take far longer than the others"
                    + (f", in {part}" if part else ""),
                    evidence=f"{len(long)} of the last {len(steps)} steps took {format_seconds(typical)} "
                    f"(median), the median step takes {format_seconds(size * middle)}; "
                    f"{format_percent(share)} of the time is lost",
                    next_step=_next_step(part, step),
                )
        return None

    def _part(self, long: list[dict[str, float]]) -> str:
        """Return the part that grew most in the long steps compared with the median step; empty if no parts
        are known.
        """
        names = {name for parts in long for name in parts}
        usual = {name: median(parts.get(name, 0.0) for _, _, parts in self._newest) for name in names}
        return max(
            names, key=lambda name: sum(parts.get(name, 0.0) - usual[name] for parts in long), default=""
        )


def _next_step(part: str, step: int) -> str:
    trace = f"record a trace of such steps with monitor.profile_step={step + WINDOW} at the next start"
    if part.startswith(COMMUNICATION):
        return f"check for a congested or flapping link (nvidia-smi nvlink -e, ibstat, ethtool -S); {trace}"
    return (
        "check for other processes on the node (top, nvidia-smi) and for code that runs only "
        f"occasionally; {trace}"
    )


class StoppedProcess(Detector):
    """Detect a process that was stopped twice in the last 200 steps.

    Once may be a deliberate pause or the migration of a virtual machine.
    """

    LEAST = 2
    kinds = (Kind.LEDGER,)

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        # Seconds for which a rank was stopped, the rank, the step's seconds.
        self._newest: deque[tuple[float, int, float]] = deque(maxlen=LONG_WINDOW)

    def check(self, kind: Kind, row: Row) -> Alert | None:
        stopped, rank = read_delay(row, "stopped")
        self._newest.append((stopped, rank, max(row["wall_seconds"], stopped)))
        if not stopped:
            return None
        by_rank = Counter(rank for stopped, rank, _ in self._newest if stopped)
        rank, count = by_rank.most_common(1)[0]
        if count < self.LEAST:
            return None
        of_rank = [seconds for seconds, other, _ in self._newest if seconds and other == rank]
        share = sum(of_rank) / sum(total_seconds for *_, total_seconds in self._newest)
        return Alert(
            name="slow-steps",
            fault="stopped-process",
            where=f"rank {rank}",
            level=Level.WARNING,
            step=row["step"],
            lost_share=share,
            cause=f"the process of rank {rank} is stopped for seconds at a time, and all ranks wait for it",
            evidence=f"{count} times in the last {len(self._newest)} steps none of its threads ran, for "
            f"{format_seconds(median(of_rank))} (median), although processors were free; "
            f"{format_percent(share)} of the time is lost",
            next_step=f"find what stops it on node {rank // self._ranks_per_node}: SIGSTOP, Ctrl-Z or a "
            "debugger, a paused container, a suspended virtual machine; otherwise check for "
            "swapping: vmstat 1, and swap in system/node-*.jsonl",
        )


class BusyHost(Detector):
    """Detect a rank that was ready to run but had no processor for 10% of the time, in 16 of the last 20
    steps.

    The alert is raised once, and again after 200 steps without the condition.
    """

    SHARE = 0.1
    kinds = (Kind.LEDGER,)

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._warm_up = WarmUp()
        self._groups: TimeGroups[Row] = TimeGroups()
        self._lasting = LastingCondition(WINDOW, LASTING_STEPS)
        self._newest: deque[tuple[Row, ...]] = deque(maxlen=WINDOW)
        self._calm = LONG_WINDOW  # groups of steps since the last busy one

    def check(self, kind: Kind, row: Row) -> Alert | None:
        if not self._warm_up.advance() or (group := self._groups.add(row["wall_seconds"], row)) is None:
            return None
        self._newest.append(group)
        busy = _starved_share(group) > self.SHARE
        lasts = self._lasting.add(busy)
        reported, self._calm = self._calm < LONG_WINDOW, self._calm + 1
        if reported and busy:
            self._calm = 0
        if reported or not lasts:
            return None
        self._calm = 0
        rows = [step_row for group in self._newest for step_row in group]
        share = _starved_share(rows)
        ranks = Counter(
            rank for waited, rank in (read_delay(step_row, "starved") for step_row in rows) if waited
        )
        rank = ranks.most_common(1)[0][0]
        node = rank // self._ranks_per_node
        crowded = sum(read_delay(step_row, "crowded")[0] for step_row in rows) / sum(
            step_row["wall_seconds"] for step_row in rows
        )
        return Alert(
            name="host-busy",
            where=f"node {node}",
            level=Level.WARNING,
            step=row["step"],
            lost_share=share,
            cause=f"the host is busy: ranks of node {node} wait for a processor, because too many threads "
            "or other processes use them",
            evidence=f"the rank that waited most, usually rank {rank}, was ready to run and had no "
            f"processor for {format_percent(share)} of the last {len(rows)} steps (alert above "
            f"{self.SHARE:.0%}); all its processors were busy for {format_percent(min(1.0, crowded))} "
            "of that time",
            next_step=f"check for other processes on node {node} (top), for too many threads of the run "
            "(debug.threads, OMP_NUM_THREADS, data workers) and for a small set of processors "
            "(taskset -p PID, the container's limit). Until then, slow steps that a busy host "
            "explains give no alerts",
        )


def _starved_share(rows: Sequence[Row]) -> float:
    return sum(read_delay(row, "starved")[0] for row in rows) / max(
        sum(row["wall_seconds"] for row in rows), 1e-9
    )
