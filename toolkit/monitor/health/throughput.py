"""Detect steps that became slow and stay slow: on all ranks, on one rank, or in one axis' communication.

Contention on a shared host comes in bursts of up to some seconds. Steps shorter than a second are therefore
joined to groups of one second, and an alert needs 16 of the last 20 groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
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
from toolkit.monitor.health.robust_stats import BestMedian, LastingCondition
from toolkit.monitor.health.step_cost import StepCost, cost_of_row
from toolkit.monitor.sink import Kind, Row
from toolkit.step_parts import COMMUNICATION

BLOCK = 50  # groups in a block of ``BestMedian``


class FallingThroughput(Detector):
    """Detect steps that are slower than the run's best block of 50, for the same number of samples.

    An alert needs most of the last 20 steps slower by 25%, or the median of the last 200 by 15%: a single
    step easily varies by 10%, the median of 200 does not.
    """

    SHORT_TIMES, LONG_TIMES = 1.25, 1.15
    kinds = (Kind.LEDGER,)

    def __init__(self, size_of_step: SizeOfStep) -> None:
        self._size = size_of_step
        self._warm_up = WarmUp()
        self._groups: TimeGroups[StepCost] = TimeGroups()
        self._best = BestMedian(BLOCK, first=WINDOW)
        self._slow = LastingCondition(WINDOW, LASTING_STEPS)
        # seconds per sample, corrected for a busy host
        self._newest: deque[float] = deque(maxlen=LONG_WINDOW)
        self._seen = 0

    def check(self, kind: Kind, row: Row) -> Alert | None:
        if not self._warm_up.advance():
            return None
        row_cost = cost_of_row(row, self._size(row["step"]))
        group = self._groups.add(row_cost.measured, row_cost)
        if group is None:
            return None
        samples = sum(step_cost.samples for step_cost in group)
        cost = sum(step_cost.least for step_cost in group) / samples
        self._seen += 1
        self._newest.append(cost)
        self._best.add(sum(step_cost.measured for step_cost in group) / samples)
        best, least = self._best.value, MIN_SECONDS * len(group) / samples
        if best is None:
            return None
        slow = self._slow.add(cost > max(self.SHORT_TIMES * best, best + least))
        if not slow and (len(self._newest) < LONG_WINDOW or self._seen % WINDOW):
            return None
        now = median(list(self._newest)[-WINDOW:] if slow else self._newest)
        if not slow and now <= max(self.LONG_TIMES * best, best + least):
            return None
        return Alert(
            name="slow-steps",
            fault="falling-throughput",
            level=Level.WARNING,
            step=row["step"],
            lost_share=1 - best / now,
            cause="training has become slower than it was earlier in this run",
            evidence=f"{1 / now:.4g} samples a second in the last {WINDOW if slow else LONG_WINDOW} steps, "
            f"{1 / best:.4g} in the run's best {BLOCK} steps: {format_percent(1 - best / now)} "
            "less (without waits for samples, evaluation and saving; steps shorter than a second "
            "are joined)",
            next_step=f"find the part that grew in ledger.jsonl ({command_line('report', 'RUN_DIR')}), and "
            "check clocks, temperature and other processes in system/node-*.jsonl",
        )


class Straggler(Detector):
    """Detect one rank that computes 25% longer than the others in most of the last 20 steps.

    Pipeline stages hold different layers. With a pipeline, a rank is compared with its excess in the run's
    best block.
    """

    TIMES = 1.25
    kinds = (Kind.LEDGER,)

    def __init__(self, *, ranks_per_node: int, stages: int) -> None:
        self._ranks_per_node, self._stages = ranks_per_node, stages
        self._warm_up = WarmUp()
        # The slowest rank, its corrected and its measured seconds, the others' seconds.
        self._groups: TimeGroups[tuple[int, float, float, float]] = TimeGroups()
        # A rank, its seconds beyond the others, the others' seconds, the number of steps.
        self._newest: deque[tuple[int, float, float, int]] = deque(maxlen=WINDOW)
        self._usual = BestMedian(BLOCK, first=WINDOW)

    def check(self, kind: Kind, row: Row) -> Alert | None:
        if row["ranks"] < 2 or not self._warm_up.advance():
            return None
        its, middle = row["slowest_busy_seconds"], row["median_busy_seconds"]
        # with two ranks the median is their mean
        others = max(0.0, 2 * middle - its) if row["ranks"] == 2 else middle
        entry = (row["slowest_rank"], cost_of_row(row, 1).corrected(its), its, others)
        group = self._groups.add(row["wall_seconds"], entry)
        if group is None:
            return None
        theirs = sum(others for *_, others in group)
        usual = 1.0
        if self._stages > 1:
            self._usual.add(sum(measured for _, _, measured, _ in group) / max(theirs, 1e-9))
            if self._usual.value is None:
                return None
            usual = self._usual.value
        excess: defaultdict[int, float] = defaultdict(float)
        for rank, corrected, _, others in group:
            excess[rank] += corrected - usual * others
        rank, more = max(excess.items(), key=lambda item: item[1])
        self._newest.append((rank, more, usual * theirs, len(group)))
        return self._assess(row, usual)

    def _assess(self, row: Row, usual: float) -> Alert | None:
        rank = Counter(rank for rank, *_ in self._newest).most_common(1)[0][0]
        slow = [
            (more, theirs, steps)
            for number, more, theirs, steps in self._newest
            if number == rank and more > max((self.TIMES - 1) * theirs, MIN_SECONDS * steps)
        ]
        if len(slow) < LASTING_STEPS or self._newest[-1][0] != rank:
            return None
        more, theirs = (median(entry[column] / entry[2] for entry in slow) for column in (0, 1))
        node, local_rank = divmod(rank, self._ranks_per_node)
        return Alert(
            name="straggler",
            where=f"rank {rank}",
            level=Level.WARNING,
            step=row["step"],
            lost_share=more / (more + theirs),
            cause=f"rank {rank} (local rank {local_rank} of node {node}) computes longer than the others, "
            "which wait for it in every step",
            evidence=f"busy for {format_seconds(theirs + more)} a step, the "
            f"{'other' if row['ranks'] == 2 else 'median'} "
            f"rank for {format_seconds(theirs / usual)}, in {len(slow)} of the last "
            f"{len(self._newest)} steps" + (f"; usual ratio: {usual:.2f}" if self._stages > 1 else ""),
            next_step="compare its clocks, throttling and other processes with the others in "
            f"system/node-{node}.jsonl; on that node: nvidia-smi -i {local_rank} -q -d "
            "PERFORMANCE,CLOCK,PAGE_RETIREMENT; if it persists, exclude the node",
        )


class SlowCollective(Detector):
    """Detect communication along one axis that takes 10% of the step and 50% more than in the run's best
    block.

    This must hold in most of the last 20 steps and on every rank: the minimum over ranks counts, because a
    slow rank makes the others wait but does not wait itself.
    """

    SHARE, TIMES = 0.1, 1.5
    kinds = (Kind.LEDGER,)

    def __init__(self, size_of_step: SizeOfStep) -> None:
        self._size = size_of_step
        self._warm_up = WarmUp()
        self._groups: TimeGroups[StepCost] = TimeGroups()
        self._axes: dict[str, tuple[BestMedian, LastingCondition, deque[float]]] = {}
        self._best_step = BestMedian(BLOCK, first=WINDOW)

    def check(self, kind: Kind, row: Row) -> Alert | None:
        if not self._warm_up.advance():
            return None
        row_cost = cost_of_row(row, self._size(row["step"]))
        group = self._groups.add(row_cost.measured, row_cost)
        return None if group is None else self._assess(row, group)

    def _assess(self, row: Row, group: Sequence[StepCost]) -> Alert | None:
        samples = sum(step_cost.samples for step_cost in group)
        self._best_step.add(sum(step_cost.measured for step_cost in group) / samples)
        best_step_seconds, least, alert = self._best_step.value, MIN_SECONDS * len(group) / samples, None
        for name in {
            name for step_cost in group for name in step_cost.waits if name.startswith(COMMUNICATION)
        }:
            self._axes.setdefault(
                name,
                (
                    BestMedian(BLOCK, first=WINDOW),
                    LastingCondition(WINDOW, LASTING_STEPS),
                    deque(maxlen=WINDOW),
                ),
            )
        for name, (best, lasting, newest) in self._axes.items():
            best.add(sum(step_cost.waits.get(name, 0.0) for step_cost in group) / samples)
            now = (
                sum(
                    step_cost.corrected(step_cost.waits.get(name, 0.0), step_cost.starved)
                    for step_cost in group
                )
                / samples
            )
            newest.append(now)
            if best.value is None or best_step_seconds is None:
                continue
            more = now - best.value
            slow = more > self.SHARE * best_step_seconds and now > self.TIMES * best.value and more > least
            if lasting.add(slow) and slow:
                size = samples / len(group)
                axis = name.removeprefix(f"{COMMUNICATION}/")
                alert = self._alert(
                    row, axis, size * median(newest), size * best.value, size * best_step_seconds
                )
        return alert

    def _alert(self, row: Row, axis: str, now: float, best: float, best_step_seconds: float) -> Alert:
        return Alert(
            name="slow-collective",
            where=f"axis {axis}",
            level=Level.WARNING,
            step=row["step"],
            lost_share=max(0.0, now - best) / (best_step_seconds + max(0.0, now - best)),
            cause=f"collectives along axis {axis} have become slow on all their ranks",
            evidence=f"every rank waits at least {format_seconds(now)} a step for them, compared with "
            f"{format_seconds(best)} in the run's best {BLOCK} steps; a step takes "
            f"{format_seconds(best_step_seconds)}",
            next_step="check for link errors and other traffic: nvidia-smi nvlink -e, ibstat, ethtool -S "
            "on the nodes, NCCL_DEBUG=INFO for the chosen path; attempts/*/probe.json has the "
            "axis' bandwidth at the start",
        )
