"""Where a run loses time: waiting for samples, pauses of single steps, steps that became slower, one slow rank, slow collectives.

Thresholds are shares of the step, so that they mean the same in any run; each stands with its reason. A step's ``step_seconds`` has
neither evaluation nor saving in it (``train/loop.py``); the ledger's ``wall_seconds`` has both, as parts.
"""

from __future__ import annotations

import itertools
from collections import deque
from statistics import median
from typing import Any

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.health.detector import LASTING, LEAST_SECONDS, OF_STEPS, Detector, SizeOfStep, WarmUp, per_cent, seconds
from toolkit.monitor.health.robust import Best, Lasting
from toolkit.monitor.parts import BUBBLE, CHECKPOINT, COMMUNICATION, DATA, EVALUATION
from toolkit.monitor.sink import Kind, Row

LONG = 200  # steps that are looked at for what comes now and then
BLOCK = 50  # steps of a block of ``Best``


class DataStall(Detector):
    """Training waits for samples in more than a tenth of its time, over the last 20 steps or, where samples come in large chunks, over
    the last 200. Without the longest wait: one hiccup of a disk is no slow pipeline. A sound pipeline is ahead of training, and the share
    is that of taking from a queue: far under a hundredth."""

    SHARE = 0.1

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._warm_up = WarmUp()
        self._steps: deque[tuple[float, float]] = deque(maxlen=LONG)  # waited, whole

    def see(self, kind: Kind, row: Row) -> Alert | None:
        if not self._warm_up.over():
            return None
        self._steps.append((row["data_seconds"], row["step_seconds"]))
        for length in (OF_STEPS, LONG):
            if len(self._steps) < length or (length == LONG and row["step"] % OF_STEPS):
                continue
            steps = sorted(list(self._steps)[-length:])[:-1]
            waited, whole = (sum(part) for part in zip(*steps, strict=True))
            if waited > self.SHARE * whole and waited > LEAST_SECONDS * len(steps):
                return Alert(
                    name="data-stall", level=Level.WARNING, step=row["step"],
                    cause="the data pipeline is slow: training waits for samples",
                    evidence=f"{per_cent(waited / whole)} of the time of the last {length} steps, {seconds(waited / len(steps))} of "
                             f"{seconds(whole / len(steps))} a step, was waiting for samples (alert above {self.SHARE:.0%})",
                    next_step=self._remedy)
        return None


class DataStallOfRank(Detector):
    """By the ledger: one rank waits for its samples, the others do not, and all wait for it."""

    kinds = (Kind.LEDGER,)

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._warm_up = WarmUp()
        self._newest: deque[tuple[int, float, float, float]] = deque(maxlen=OF_STEPS)  # rank, its wait, the median's, wall

    def see(self, kind: Kind, row: Row) -> Alert | None:
        if row["ranks"] < 2 or not self._warm_up.over():
            return None
        low, middle, high = row["parts"].get(DATA, (0.0, 0.0, 0.0))
        self._newest.append((row["data_rank"], high, low if row["ranks"] == 2 else middle, row["wall_seconds"]))
        rank = _commonest([number for number, *_ in self._newest])
        its = [(waited, others, wall) for number, waited, others, wall in self._newest if number == rank]
        if len(its) < LASTING:
            return None
        waited, others, wall = (median(part) for part in zip(*its, strict=True))
        if waited - others < max(DataStall.SHARE * wall, LEAST_SECONDS) or waited < 2 * others:
            return None
        node = rank // self._ranks_per_node
        return Alert(
            name="data-stall", where=f"rank {rank}", level=Level.WARNING, step=row["step"],
            cause=f"the data pipeline of rank {rank} is slow, and all ranks wait for it",
            evidence=f"rank {rank} waits {seconds(waited)} a step for its samples, the median rank {seconds(others)}, of "
                     f"{seconds(wall)} (in {len(its)} of the last {len(self._newest)} steps)",
            next_step=f"look at disk, network and CPU of node {node}: system/node-{node}.jsonl")


class GarbageCollection(Detector):
    """Python's collector stops every thread of a rank, and all ranks wait for the one that collects. More than a twentieth of the time,
    without the longest collection: a whole one now and then is what Python does by itself."""

    SHARE = 0.05

    def __init__(self) -> None:
        self._warm_up = WarmUp()
        self._steps: deque[tuple[float, float]] = deque(maxlen=OF_STEPS)

    def see(self, kind: Kind, row: Row) -> Alert | None:
        if "gc_seconds" not in row or not self._warm_up.over():
            return None
        self._steps.append((row["gc_seconds"], row["step_seconds"]))
        if len(self._steps) < OF_STEPS:
            return None
        steps = sorted(self._steps)[:-1]
        collected, whole = (sum(part) for part in zip(*steps, strict=True))
        if collected <= max(self.SHARE * whole, LEAST_SECONDS * len(steps)):
            return None
        return Alert(
            name="garbage-collection", level=Level.WARNING, step=row["step"],
            cause="Python's garbage collection stops training",
            evidence=f"{per_cent(collected / whole)} of the time of the last {OF_STEPS} steps, {seconds(collected / len(steps))} a step on "
                     f"the rank where it took longest (alert above {self.SHARE:.0%})",
            next_step="find what makes so many Python objects in each step (your own model, hooks or data code keep lists, dicts or "
                      "graphs): python -X tracemalloc=10 launch/train.py ...; what was there before the first step is in no collection")


class Pauses(Detector):
    """Single steps that take far longer than the others, again and again.

    Spikes of three times the median in one step of a hundred are normal on shared networks and disks. So: five of the last 20 steps above
    twice the median (with such spikes by chance once in a million steps), or, for rarer and longer ones, six of the last 200 that
    lose a tenth of the time. A long step after a long one does not count: steps that became slower are FallingThroughput's. Collections of
    garbage and waits for samples are taken out: they have their own alerts.
    """

    TIMES, FEW, OFTEN, SHARE = 2.0, 5, 6, 0.1
    kinds = (Kind.STEP, Kind.LEDGER)

    def __init__(self, size_of_step: SizeOfStep, *, ledger: bool) -> None:
        """``ledger``: rows of the ledger come, and say in which part the time is; else steps as a whole are looked at."""
        self._size = size_of_step
        self._judged = Kind.LEDGER if ledger else Kind.STEP
        self._warm_up = WarmUp()
        self._collected: dict[int, float] = {}  # by step: what is explained already
        self._newest: deque[tuple[float, dict[str, float]]] = deque(maxlen=LONG)  # seconds of a step, and of its parts

    def see(self, kind: Kind, row: Row) -> Alert | None:
        if kind is Kind.STEP:
            self._collected[row["step"]] = row.get("gc_seconds", 0.0)
            if len(self._collected) > 5 * LONG:  # the ledger comes some seconds later
                del self._collected[next(iter(self._collected))]
        if kind is not self._judged or not self._warm_up.over():
            return None
        collected = self._collected.get(row["step"], 0.0)
        if kind is Kind.STEP:
            whole, parts = row["step_seconds"] - row["data_seconds"], {}
        else:
            # In the wait for one rank all others have as much as that one has too much.
            parts = {name: low if name.startswith(COMMUNICATION) or name == BUBBLE else high
                     for name, (low, _, high) in row["parts"].items() if name not in (DATA, CHECKPOINT, EVALUATION)}
            whole = row["wall_seconds"] - sum(row["parts"].get(name, (0, 0, 0))[1] for name in (DATA, CHECKPOINT, EVALUATION))
        size = self._size(row["step"])
        self._newest.append(((whole - collected) / size, {name: value / size for name, value in parts.items()}))
        if len(self._newest) < OF_STEPS:
            return None
        middle = median(value for value, _ in self._newest)
        least = max(self.TIMES * middle, middle + 10 * LEAST_SECONDS / size)
        if self._newest[-1][0] <= least:
            return None  # nothing new
        return self._judge(row["step"], size, middle, least)

    def _judge(self, step: int, size: int, middle: float, limit: float) -> Alert | None:
        for length, least in ((OF_STEPS, self.FEW), (LONG, self.OFTEN)):
            steps = list(self._newest)[-length:]
            long = [now for before, now in itertools.pairwise(steps) if now[0] > limit >= before[0]]
            lost = sum(whole - middle for whole, _ in long)
            if len(long) >= least and (length == OF_STEPS or lost > self.SHARE * sum(whole for whole, _ in steps)):
                part = self._part([parts for _, parts in long])
                each, share = size * median(whole for whole, _ in long), lost / sum(whole for whole, _ in steps)
                return Alert(
                    name="pauses", level=Level.WARNING, step=step, where=part,
                    cause="single steps take far longer than the others, again and again" + (f", in {part}" if part else ""),
                    evidence=f"{len(long)} of the last {len(steps)} steps took {seconds(each)} (their median), the median step "
                             f"{seconds(size * middle)}; {per_cent(share)} of the time is lost",
                    next_step=_look_at(part, step))
        return None

    def _part(self, long: list[dict[str, float]]) -> str:
        """The part that the long steps have more of than the median step; empty where parts are not known."""
        names = {name for parts in long for name in parts}
        usual = {name: median(parts.get(name, 0.0) for _, parts in self._newest) for name in names}
        return max(names, key=lambda name: sum(parts.get(name, 0.0) - usual[name] for parts in long), default="")


class FallingThroughput(Detector):
    """Steps are slower than the run's own best block of 50, for the same number of samples: most of the last 20 by a quarter, or the
    median of the last 200 by 15%. A quarter, because a single step easily varies by a tenth; the median of 200 does not.

    Steps shorter than 0.15 s are joined until they have that length: twenty of a few milliseconds are a hiccup of the machine.
    """

    SHORT_TIMES, LONG_TIMES, JOINED_SECONDS = 1.25, 1.15, 0.15

    def __init__(self, size_of_step: SizeOfStep) -> None:
        self._size = size_of_step
        self._warm_up = WarmUp()
        self._best = Best(BLOCK, first=OF_STEPS)
        self._slow = Lasting(OF_STEPS, LASTING)
        self._newest: deque[float] = deque(maxlen=LONG)  # seconds a sample
        self._seconds, self._samples, self._seen = 0.0, 0, 0  # of the steps being joined; how many have been

    def see(self, kind: Kind, row: Row) -> Alert | None:
        if not self._warm_up.over():
            return None
        self._seconds += row["step_seconds"]
        self._samples += self._size(row["step"])
        if self._seconds < self.JOINED_SECONDS:
            return None
        cost, least = self._seconds / self._samples, LEAST_SECONDS / self._samples
        self._seconds, self._samples, self._seen = 0.0, 0, self._seen + 1
        self._newest.append(cost)
        self._best.add(cost)
        best = self._best.value
        if best is None:
            return None
        slow = self._slow.add(cost > max(self.SHORT_TIMES * best, best + least))
        if not slow and (len(self._newest) < LONG or self._seen % OF_STEPS):
            return None
        now = median(list(self._newest)[-OF_STEPS:] if slow else self._newest)
        if not slow and now <= max(self.LONG_TIMES * best, best + least):
            return None
        return Alert(
            name="falling-throughput", level=Level.WARNING, step=row["step"],
            cause="training has become slower than it was in this run",
            evidence=f"{1 / now:.4g} samples a second in the last {OF_STEPS if slow else LONG} steps, {1 / best:.4g} in the run's best "
                     f"{BLOCK} steps: {per_cent(1 - best / now)} less (steps shorter than {seconds(self.JOINED_SECONDS)} are joined)",
            next_step="see which part grew in ledger.jsonl (python launch/report.py RUN_DIR), and clocks, temperature and other processes "
                      "in system/node-*.jsonl")


class Straggler(Detector):
    """One rank computes a quarter longer than the others in most of the last 20 steps, and always the same one.

    Stages of a pipeline may differ by what they hold: there a rank is compared with how much longer it took in the run's best block.
    """

    TIMES = 1.25
    kinds = (Kind.LEDGER,)

    def __init__(self, *, ranks_per_node: int, stages: int) -> None:
        self._ranks_per_node, self._stages = ranks_per_node, stages
        self._warm_up = WarmUp()
        self._newest: deque[tuple[int, float, float]] = deque(maxlen=OF_STEPS)  # rank, its busy seconds, the others'
        self._usual = Best(BLOCK, first=OF_STEPS)

    def see(self, kind: Kind, row: Row) -> Alert | None:
        if row["ranks"] < 2 or not self._warm_up.over():
            return None
        its, middle = row["slowest_busy_seconds"], row["median_busy_seconds"]
        others = 2 * middle - its if row["ranks"] == 2 else middle  # of two, the median is their mean
        self._newest.append((row["slowest_rank"], its, others))
        usual = 1.0
        if self._stages > 1:
            self._usual.add(its / max(others, 1e-9))
            if self._usual.value is None:
                return None
            usual = self._usual.value
        rank = _commonest([number for number, _, _ in self._newest])
        slow = [(mine, theirs) for number, mine, theirs in self._newest
                if number == rank and mine > self.TIMES * usual * theirs and mine - usual * theirs > LEAST_SECONDS]
        if len(slow) < LASTING or row["slowest_rank"] != rank:
            return None
        mine, theirs = (median(part) for part in zip(*slow, strict=True))
        node, place = divmod(rank, self._ranks_per_node)
        return Alert(
            name="straggler", where=f"rank {rank}", level=Level.WARNING, step=row["step"],
            cause=f"rank {rank} (place {place} of node {node}) computes longer than the others, which wait for it in every step",
            evidence=f"busy for {seconds(mine)} a step, the {'other' if row['ranks'] == 2 else 'median'} rank for {seconds(theirs)}, in "
                     f"{len(slow)} of the last {len(self._newest)} steps" + (f"; usual: {usual:.2f} times" if self._stages > 1 else ""),
            next_step=f"compare its clocks, throttling and other processes with the others in system/node-{node}.jsonl; on that node: "
                      f"nvidia-smi -i {place} -q -d PERFORMANCE,CLOCK,PAGE_RETIREMENT; if it stays, leave the node out")


class SlowCollective(Detector):
    """Communication along one axis takes a tenth of the step more than in the run's best block, and half as much again, in most of the
    last 20 steps, on every rank: the minimum over ranks is what counts. Behind a slow rank the others wait, but that rank itself does not.
    """

    SHARE, TIMES = 0.1, 1.5
    kinds = (Kind.LEDGER,)

    def __init__(self, size_of_step: SizeOfStep) -> None:
        self._size = size_of_step
        self._warm_up = WarmUp()
        self._axes: dict[str, tuple[Best, Lasting, deque[float]]] = {}
        self._wall = Best(BLOCK, first=OF_STEPS)

    def see(self, kind: Kind, row: Row) -> Alert | None:
        if not self._warm_up.over():
            return None
        size = self._size(row["step"])
        self._wall.add(row["wall_seconds"] / size)
        found = None
        parts: dict[str, Any] = {name: values for name, values in row["parts"].items() if name.startswith(COMMUNICATION)}
        for name in parts:
            self._axes.setdefault(name, (Best(BLOCK, first=OF_STEPS), Lasting(OF_STEPS, LASTING), deque(maxlen=OF_STEPS)))
        for name, (best, lasting, newest) in self._axes.items():
            low = parts[name][0] / size if name in parts else 0.0
            best.add(low)
            newest.append(low)
            if best.value is None or self._wall.value is None:
                continue
            more = low - best.value
            slow = more > self.SHARE * self._wall.value and low > self.TIMES * best.value and more > LEAST_SECONDS / size
            if lasting.add(slow) and slow:
                found = self._alert(row, name.removeprefix(f"{COMMUNICATION}/"), size, median(newest), best.value, self._wall.value)
        return found

    def _alert(self, row: Row, axis: str, size: int, now: float, best: float, wall: float) -> Alert:
        return Alert(
            name="slow-collective", where=f"axis {axis}", level=Level.WARNING, step=row["step"],
            cause=f"collectives along axis {axis} have become slow on all their ranks",
            evidence=f"every rank waits at least {seconds(now * size)} a step for them, in the run's best {BLOCK} steps "
                     f"{seconds(best * size)}, of a step of {seconds(wall * size)}",
            next_step="look for link errors and other traffic: nvidia-smi nvlink -e, ibstat, ethtool -S on the nodes, NCCL_DEBUG=INFO for "
                      "the path that was chosen; attempts/*/probe.json has what the axis did at the start")


def _commonest(numbers: list[int]) -> int:
    return max(set(numbers), key=numbers.count)


def _look_at(part: str, step: int) -> str:
    trace = f"a trace of such steps says what it is: monitor.profile_step={step + OF_STEPS} at the next start"
    if part.startswith(COMMUNICATION):
        return f"look for a congested or flapping link (nvidia-smi nvlink -e, ibstat, ethtool -S); {trace}"
    return f"look for other processes on the node (top, nvidia-smi) and for code that runs only now and then; {trace}"
