"""Single steps that lose time: waits for samples, garbage collection, pauses, a process that is stopped, a
host that is busy.

Thresholds are shares of the time, so that they mean the same in any run; each stands with its reason.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

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
from toolkit.monitor.step_parts import CHECKPOINT, COMMUNICATION, DATA, EVALUATION


@dataclass(frozen=True, slots=True)
class _Wait:
    """For the samples of one step: seconds of the rank that waited longest, of the others and of the whole
    step; that rank."""

    longest: float
    others: float
    whole: float
    rank: int = 0


class DataStall(Detector):
    """Training waits for samples in more than a tenth of its time, over the last 20 steps or, since samples
    may come in large chunks, over up to 200. Without the longest wait: one hiccup of a disk is no slow
    pipeline. A sound pipeline is ahead of training, and the share is that of taking from a queue: far under a
    hundredth.

    With the ledger it names the rank, if one rank waits and the others do not.
    """

    SHARE, LEAST_LOST = 0.1, 0.5  # seconds of a window

    def __init__(self, remedy: str, *, ranks_per_node: int, ledger: bool) -> None:
        self._remedy, self._ranks_per_node = remedy, ranks_per_node
        self.kinds = (Kind.LEDGER if ledger else Kind.STEP,)  # type: ignore[misc]  # a class variable elsewhere
        self._warm_up = WarmUp()
        self._steps: deque[_Wait] = deque(maxlen=LONG_WINDOW)

    def see(self, kind: Kind, row: Row) -> Alert | None:
        if not self._warm_up.over():
            return None
        self._steps.append(_of_ledger(row) if kind is Kind.LEDGER else _of_step(row))
        if len(self._steps) < WINDOW:
            return None
        for length in (WINDOW, LONG_WINDOW):
            steps = list(self._steps)[-length:]
            hiccup = max(steps, key=lambda step: step.longest)
            waited = sum(step.longest for step in steps) - hiccup.longest
            whole = sum(step.whole for step in steps) - hiccup.whole
            if waited > max(self.SHARE * whole, self.LEAST_LOST, MIN_SECONDS * len(steps)):
                return self._alert(row["step"], steps)
        return None

    def _alert(self, step: int, steps: Sequence[_Wait]) -> Alert:
        waited, others, whole = (
            sum(getattr(one, name) for one in steps) for name in ("longest", "others", "whole")
        )
        share = waited / whole
        longer: defaultdict[int, float] = defaultdict(float)  # by rank: than the others
        for one in steps:
            longer[one.rank] += one.longest - one.others
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
                evidence=f"rank {rank} waited {format_seconds(waited)} for samples in the last {len(steps)} steps, "
                f"{format_percent(share)} of their time, the median rank {format_seconds(others)}",
                next_step=f"look at disk, network and CPU of node {node}: system/node-{node}.jsonl",
            )
        return Alert(
            name="data-stall",
            level=Level.WARNING,
            step=step,
            lost_share=share,
            cause="the data pipeline is slow: training waits for samples",
            evidence=f"{format_percent(share)} of the time of the last {len(steps)} steps, "
            f"{format_seconds(waited / len(steps))} of "
            f"{format_seconds(whole / len(steps))} a step, was waiting for samples (alert above "
            f"{self.SHARE:.0%})",
            next_step=self._remedy,
        )


def _of_step(row: Row) -> _Wait:
    return _Wait(row["data_seconds"], row["data_seconds"], max(row["step_seconds"], row["data_seconds"]))


def _of_ledger(row: Row) -> _Wait:
    low, middle, high = row["parts"].get(DATA, (0.0, 0.0, 0.0))
    # On a host without a free processor the threads that read ahead are late too, and that is not the
    # pipeline's fault.
    account = cost_of_row(row, 1)
    waited = account.corrected(high, account.starved)
    others = high if row["ranks"] == 1 else low if row["ranks"] == 2 else middle
    return _Wait(waited, min(waited, others), max(row["wall_seconds"], waited), row["data_rank"])


class GarbageCollection(Detector):
    """Python's collector stops every thread of a rank, and all ranks wait for the one that collects. More
    than a twentieth of the time, without the longest collection: a whole one now and then is what Python does
    by itself."""

    SHARE = 0.05

    def __init__(self) -> None:
        self._warm_up = WarmUp()
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def see(self, kind: Kind, row: Row) -> Alert | None:
        if "gc_seconds" not in row or not self._warm_up.over():
            return None
        self._steps.append((row["gc_seconds"], row["step_seconds"]))
        if len(self._steps) < WINDOW:
            return None
        steps = sorted(self._steps)[:-1]
        collected, whole = (sum(part) for part in zip(*steps, strict=True))
        if collected <= max(self.SHARE * whole, MIN_SECONDS * len(steps)):
            return None
        return Alert(
            name="garbage-collection",
            level=Level.WARNING,
            step=row["step"],
            lost_share=collected / whole,
            cause="Python's garbage collection stops training",
            evidence=f"{format_percent(collected / whole)} of the time of the last {WINDOW} steps, "
            f"{format_seconds(collected / len(steps))} a step on "
            f"the rank on which it took longest (alert above {self.SHARE:.0%})",
            next_step="find what makes so many Python objects in each step (your own model, hooks or data "
            "code keep lists, dicts or "
            "graphs): python -X tracemalloc=10 launch/train.py ...; what was there before the "
            "first step is in no collection",
        )


class Pauses(Detector):
    """Single steps that take far longer than the others, again and again.

    Spikes of three times the median in one step of a hundred are normal on shared networks and disks. So:
    five of the last 20 steps above twice the median (with such spikes by chance once in a million steps), or,
    for rarer and longer ones, six of the last 200 that lose a tenth of the time. A long step after a long one
    does not count: steps that became slower are FallingThroughput's. What other alerts are about is not
    counted: waits for samples, saves, evaluations, garbage collections, stops of a process, a busy host.
    """

    TIMES, FEW, OFTEN, SHARE = 2.0, 5, 6, 0.1
    LEAST_PAUSE = 0.1  # seconds: a shorter one is the scheduler's
    kinds = (Kind.STEP, Kind.LEDGER)

    def __init__(self, size_of_step: SizeOfStep) -> None:
        self._size = size_of_step
        self._warm_up = WarmUp()
        self._collected: dict[int, float] = {}  # by step: of garbage
        # Seconds as judged, as measured, and of each part.
        self._newest: deque[tuple[float, float, dict[str, float]]] = deque(maxlen=LONG_WINDOW)

    def see(self, kind: Kind, row: Row) -> Alert | None:
        if kind is Kind.STEP:
            self._collected[row["step"]] = row.get("gc_seconds", 0.0)
            if len(self._collected) > 5 * LONG_WINDOW:  # the ledger comes some seconds later
                del self._collected[next(iter(self._collected))]
            return None
        if not self._warm_up.over():
            return None
        size = self._size(row["step"])
        account = cost_of_row(row, size, self._collected.get(row["step"], 0.0))
        # In the wait for one rank all others have as much as that one has too much.
        parts = {
            name: (high if is_computing(name) else low) / size
            for name, (low, _, high) in row["parts"].items()
            if name not in (DATA, CHECKPOINT, EVALUATION)
        }
        self._newest.append((account.least / size, account.measured / size, parts))
        if len(self._newest) < WINDOW:
            return None
        middle = median(measured for _, measured, _ in self._newest)
        limit = max(self.TIMES * middle, middle + self.LEAST_PAUSE / size)
        return self._judge(row["step"], size, middle, limit) if self._newest[-1][0] > limit else None

    def _judge(self, step: int, size: int, middle: float, limit: float) -> Alert | None:
        for length, least in ((WINDOW, self.FEW), (LONG_WINDOW, self.OFTEN)):
            steps = list(self._newest)[-length:]
            long = [now for before, now in itertools.pairwise(steps) if now[0] > limit >= before[0]]
            share = sum(judged - middle for judged, _, _ in long) / sum(measured for _, measured, _ in steps)
            if len(long) >= least and (length == WINDOW or share > self.SHARE):
                part = self._part([parts for _, _, parts in long])
                return Alert(
                    name="pauses",
                    level=Level.WARNING,
                    step=step,
                    where=part,
                    lost_share=share,
                    cause="single steps take far longer than the others, again and again"
                    + (f", in {part}" if part else ""),
                    evidence=f"{len(long)} of the last {len(steps)} steps took "
                    f"{format_seconds(size * median(judged for judged, _, _ in long))} (their "
                    f"median), the median step {format_seconds(size * middle)}; {format_percent(share)} of the "
                    "time is lost",
                    next_step=_look_at(part, step),
                )
        return None

    def _part(self, long: list[dict[str, float]]) -> str:
        """The part that the long steps have more of than the median step; empty if no parts are known."""
        names = {name for parts in long for name in parts}
        usual = {name: median(parts.get(name, 0.0) for _, _, parts in self._newest) for name in names}
        return max(
            names, key=lambda name: sum(parts.get(name, 0.0) - usual[name] for parts in long), default=""
        )


def _look_at(part: str, step: int) -> str:
    trace = f"a trace of such steps shows what it is: monitor.profile_step={step + WINDOW} at the next start"
    if part.startswith(COMMUNICATION):
        return f"look for a congested or flapping link (nvidia-smi nvlink -e, ibstat, ethtool -S); {trace}"
    return f"look for other processes on the node (top, nvidia-smi) and for code that runs only now and then; {trace}"


class Stops(Detector):
    """The process of a rank was stopped, twice in the last 200 steps: once may be a person's doing, or the
    move of a virtual machine."""

    LEAST = 2
    kinds = (Kind.LEDGER,)

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        # Seconds for which a rank was stopped, the rank, the step's seconds.
        self._newest: deque[tuple[float, int, float]] = deque(maxlen=LONG_WINDOW)

    def see(self, kind: Kind, row: Row) -> Alert | None:
        stopped, rank = read_delay(row, "stopped")
        self._newest.append((stopped, rank, max(row["wall_seconds"], stopped)))
        if not stopped:
            return None
        by_rank = Counter(rank for stopped, rank, _ in self._newest if stopped)
        rank, count = by_rank.most_common(1)[0]
        if count < self.LEAST:
            return None
        of_rank = [seconds for seconds, other, _ in self._newest if seconds and other == rank]
        share = sum(of_rank) / sum(whole for *_, whole in self._newest)
        return Alert(
            name="pauses",
            where=f"rank {rank}",
            level=Level.WARNING,
            step=row["step"],
            lost_share=share,
            cause=f"the process of rank {rank} is stopped for seconds at a time, and all ranks wait for it",
            evidence=f"{count} times in the last {len(self._newest)} steps none of its threads ran, for "
            f"{format_seconds(median(of_rank))} (the median), "
            f"although processors were free for it; {format_percent(share)} of the time is lost",
            next_step=f"find what stops it on node {rank // self._ranks_per_node}: SIGSTOP, Ctrl-Z or a "
            "debugger, a paused container, a suspended "
            "virtual machine; if nothing does, look for swapping: vmstat 1, and swap in "
            "system/node-*.jsonl",
        )


class HostBusy(Detector):
    """A rank had no processor for a tenth of the time, though it was ready to run, in 16 of the last 20
    steps. Told once, and again after 200 steps without it."""

    SHARE = 0.1
    kinds = (Kind.LEDGER,)

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._warm_up = WarmUp()
        self._units: TimeGroups[Row] = TimeGroups()
        self._lasting = LastingCondition(WINDOW, LASTING_STEPS)
        self._newest: deque[tuple[Row, ...]] = deque(maxlen=WINDOW)
        self._calm = LONG_WINDOW  # units since the last busy one

    def see(self, kind: Kind, row: Row) -> Alert | None:
        if not self._warm_up.over() or (unit := self._units.add(row["wall_seconds"], row)) is None:
            return None
        self._newest.append(unit)
        busy = _starved_share(unit) > self.SHARE
        lasts = self._lasting.add(busy)
        told, self._calm = self._calm < LONG_WINDOW, self._calm + 1
        if told and busy:
            self._calm = 0
        if told or not lasts:
            return None
        self._calm = 0
        rows = [one for unit in self._newest for one in unit]
        share = _starved_share(rows)
        ranks = Counter(rank for waited, rank in (read_delay(one, "starved") for one in rows) if waited)
        rank = ranks.most_common(1)[0][0]
        node = rank // self._ranks_per_node
        crowded = sum(read_delay(one, "crowded")[0] for one in rows) / sum(
            one["wall_seconds"] for one in rows
        )
        return Alert(
            name="host-busy",
            where=f"node {node}",
            level=Level.WARNING,
            step=row["step"],
            lost_share=share,
            cause=f"the host is busy: ranks of node {node} wait for a processor, because too many threads or "
            "other processes use them",
            evidence=f"the rank that waited most, usually rank {rank}, was ready to run and had no processor "
            f"for {format_percent(share)} of the last "
            f"{len(rows)} steps (alert above {self.SHARE:.0%}); all processors that it may use were "
            "busy for "
            f"{format_percent(min(1.0, crowded))} of that time",
            next_step=f"look for other processes on node {node} (top), for too many threads of the run's own "
            "(debug.threads, OMP_NUM_THREADS, "
            "data workers) and for a small set of processors (taskset -p PID, the container's "
            "limit). Until then slow steps that a busy "
            "host explains give no alerts",
        )


def _starved_share(rows: Sequence[Row]) -> float:
    return sum(read_delay(row, "starved")[0] for row in rows) / max(
        sum(row["wall_seconds"] for row in rows), 1e-9
    )
