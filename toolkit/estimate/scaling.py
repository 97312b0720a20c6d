"""Predict the scaling of a run from few ranks to many, and find the change that helps where it breaks.

Strong scaling keeps the global batch. Weak scaling keeps the samples per rank: ``train.global_batch`` is that
of the described machines (``cluster.*``), and grows and shrinks with their number. The efficiency of a point
is its throughput per rank relative to the smallest number of ranks that can run:

    E(n) = (batch(n) / (n t(n))) / (batch(n0) / (n0 t(n0)))

Both curves are estimates of every point's own plan. Amdahl's and Gustafson's laws are not used: a fixed
serial share describes neither a ring whose bandwidth drops at the border of a node nor a pipeline's bubble.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError, InputError, PlanError, Problem, Severity
from toolkit.estimate.layout_changes import Changes, apply_changes, as_overrides, can_divide, neighbours
from toolkit.estimate.measured_factors import SpeedFactors, apply_factors, ratio_spread
from toolkit.estimate.types import INTERVAL_QUANTILE, StepEstimate
from toolkit.plan import make_plan
from toolkit.plan.types import Device, RunPlan, World

LEAST_EFFICIENCY = 0.8  # below it a point counts as broken
LEAST_GAIN = 1.02  # of throughput by a change that is shown
MOST_RANKS = 1 << 20
ROUNDS = 3  # of changes at one point, each by one key
Estimator = Callable[[RunPlan], StepEstimate | None]
Planner = Callable[[RunConfig, World], RunPlan]


class Scaling(StrEnum):
    STRONG = "strong"
    WEAK = "weak"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and its estimate.

    Attributes:
        changes: keys that differ from the configuration as written.
    """

    changes: Changes
    plan: RunPlan
    estimate: StepEstimate

    @property
    def throughput(self) -> float:
        """Samples per second and rank."""
        return self.plan.batch.global_batch / (self.plan.world.ranks * self.estimate.seconds)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The changes as a user types them."""
        return as_overrides(self.changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Throughput per rank relative to the reference, with its 80% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """One number of ranks.

    Attributes:
        written: the configuration as written; None if it cannot run, for the reason ``problem``.
        changed: the best of the tried changes, where the point is broken; None if none was better.
        efficiency, changed_efficiency: of ``written`` and ``changed``.
        cause: the part of the step that grew most per sample since the reference; None at the reference.
    """

    scaling: Scaling
    ranks: int
    written: Candidate | None = None
    problem: Problem | None = None
    changed: Candidate | None = None
    efficiency: Efficiency | None = None
    changed_efficiency: Efficiency | None = None
    cause: str | None = None

    @property
    def broken(self) -> bool:
        return self.efficiency is None or self.efficiency.value < LEAST_EFFICIENCY


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCurve:
    """The points of one kind of scaling, by rising number of ranks.

    Attributes:
        reference: what efficiencies refer to: the smallest number of ranks that can run as written, else with
            changes; None if no point can run.
        first_broken: the first point above the reference that cannot run or is less efficient than
            ``LEAST_EFFICIENCY``; None if there is none.
    """

    scaling: Scaling
    points: tuple[ScalingPoint, ...]
    reference: Candidate | None
    first_broken: ScalingPoint | None


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse ``1..1024``, the doublings of 1 up to 1,024, or a list ``8,64,256``.

    Raises:
        InputError: it is neither.
    """
    first, dots, last = text.partition("..")
    numbers = [
        int(part) if part.strip().isdecimal() else 0 for part in ([first, last] if dots else text.split(","))
    ]
    valid = all(0 < number <= MOST_RANKS for number in numbers) and (not dots or numbers[0] <= numbers[1])
    if not valid:
        raise InputError(
            Problem(
                "scaling",
                f"scaling={text}",
                "numbers of ranks are a range FIRST..LAST, which is doubled from the first on, or a list; "
                f"each is between 1 and {MOST_RANKS:,}",
                "write scaling=1..1024 or scaling=8,64,256",
            )
        )
    if dots:
        return tuple(numbers[0] << power for power in range((numbers[1] // numbers[0]).bit_length()))
    return tuple(sorted(set(numbers)))


def scaling_curve(
    scaling: Scaling,
    config: RunConfig,
    world: World,
    ranks: Sequence[int],
    estimate: Estimator,
    factors: SpeedFactors | None = None,
    *,
    fixed: Container[str] = (),
    advance: Callable[[], object] = lambda: None,
    plan: Planner = make_plan,
) -> ScalingCurve:
    """Plan and estimate ``config`` on each number of ``ranks``.

    Args:
        config: resolved, with the global batch of ``world``.
        world: the described machines, whose nodes every point uses; a smaller point uses a part of one node.
        estimate: of a plan; None if it is not known.
        factors: of measured runs, by which estimates are multiplied.
        fixed: keys that are not changed where the curve breaks.
        advance: called twice for each point.
        plan: plans a point; for a model without a family, with its trace (``ModuleTraces.plan``).

    Raises:
        InputError: the configuration can be planned, but not estimated.
    """

    def corrected(plan: RunPlan) -> StepEstimate | None:
        found = estimate(plan)
        if found is None or factors is None:
            return found
        return apply_factors(found, factors, plan.world.ranks)

    points: list[ScalingPoint] = []
    for number in ranks:
        point = ScalingPoint(scaling=scaling, ranks=number)
        try:
            point = replace(
                point, written=_candidate({}, *scale(scaling, config, world, number), corrected, plan)
            )
        except PlanError as error:
            point = replace(point, problem=_first_error(error))
        points.append(point)
        advance()
    reference = next((point.written for point in points if point.written is not None), None)
    last: Candidate | None = None  # of the point before, from which changes start too
    for index, point in enumerate(points):
        point = _measure(point, reference, factors)
        if point.broken and (point.problem is None or point.problem.key != "scaling"):
            starts: list[Changes] = [{}, *([last.changes] if last is not None else [])]
            changed = best_change(scale(scaling, config, world, point.ranks), starts, corrected, fixed, plan)
            if changed is not None and (
                point.written is None or changed.throughput > LEAST_GAIN * point.written.throughput
            ):
                reference = reference or changed
                point = _measure(replace(point, changed=changed), reference, factors)
        points[index] = point
        last = point.changed or point.written
        advance()
    above = (point for point in points if reference is not None and point.ranks > reference.plan.world.ranks)
    return ScalingCurve(
        scaling=scaling,
        points=tuple(points),
        reference=reference,
        first_broken=next((point for point in above if point.broken), None),
    )


def scale(scaling: Scaling, config: RunConfig, world: World, ranks: int) -> tuple[RunConfig, World]:
    """Return ``config`` and ``world`` on another number of ranks.

    Raises:
        PlanError: the ranks do not fill whole nodes, or the global batch of weak scaling is not whole.
    """
    per_node = min(ranks, world.ranks_per_node)
    if ranks % per_node:
        raise PlanError(
            Problem(
                "scaling",
                f"{ranks:,} ranks on nodes of {per_node}",
                "several nodes are filled completely",
                f"write scaling={ranks // per_node * per_node}",
            )
        )
    nodes = ranks // per_node
    cluster = config.cluster
    if world.device is Device.CPU:
        cluster = replace(cluster, nodes=nodes, cpu_ranks=per_node)
    else:
        cluster = replace(cluster, nodes=nodes, gpus_per_node=per_node)
    config = replace(config, cluster=cluster)
    if scaling is Scaling.WEAK:
        given = config.train.global_batch
        batch, rest = divmod(given * ranks, world.ranks)
        if rest:
            raise PlanError(
                Problem(
                    "scaling",
                    f"train.global_batch={given} of {world.ranks:,} ranks on {ranks:,} ranks",
                    "weak scaling keeps the samples per rank, so the batch of every point is a whole number",
                    f"write train.global_batch={math.lcm(given, world.ranks)}, or describe fewer machines",
                )
            )
        # The estimate is that of a step after the ramp, whose increments need not divide another batch.
        ramp = replace(config.train.batch_ramp, start=None, increment=None, samples=None)
        config = replace(config, train=replace(config.train, global_batch=batch, batch_ramp=ramp))
    return config, replace(world, ranks=ranks, ranks_per_node=per_node)


def best_change(
    scaled: tuple[RunConfig, World],
    starts: Iterable[Changes],
    estimate: Estimator,
    fixed: Container[str] = (),
    plan: Planner = make_plan,
) -> Candidate | None:
    """Return the candidate with the highest throughput that a climb reaches from ``starts``; None if none can
    run.

    Each round changes one key to a neighbouring value and keeps the best. The climb may end in a local
    maximum; ``advise=true`` searches all layouts of one number of ranks.
    """
    config, world = scaled
    tried: dict[tuple[str, ...], Candidate | None] = {}

    def attempt(changes: Changes) -> Candidate | None:
        key = as_overrides(changes)
        if key not in tried:
            changed = apply_changes(config, changes)
            tried[key] = None
            if can_divide(changed, world):
                try:
                    tried[key] = _candidate(changes, changed, world, estimate, plan)
                except (PlanError, ConfigError):
                    tried[key] = None  # a layout that a rule or the model refuses
        return tried[key]

    best: Candidate | None = None
    for start in starts:
        at, candidate = start, attempt(start)
        for _ in range(ROUNDS):
            around = [
                found for changes in neighbours(config, at, fixed) if (found := attempt(changes)) is not None
            ]
            fastest = max(around, key=lambda found: found.throughput, default=None)
            if fastest is None or (candidate is not None and fastest.throughput <= candidate.throughput):
                break
            at, candidate = fastest.changes, fastest
        if candidate is not None and (best is None or candidate.throughput > best.throughput):
            best = candidate
    return best


def verdict(curve: ScalingCurve) -> Iterator[str]:
    """Yield where the curve breaks, why, and which change helps, as sentences."""
    name = f"{curve.scaling.capitalize()} scaling"
    last = curve.points[-1]
    broken = curve.first_broken
    if not any(point.written for point in curve.points):
        yield f"{name}: the configuration as written cannot run."
        yield f"At {last.ranks:,} ranks: {_sentence(last.problem)}"
        broken = last
    elif broken is None:
        assert curve.reference is not None
        at = "" if last.efficiency is None else f", {last.efficiency.value:.0%} at {last.ranks:,} ranks"
        yield (
            f"{name} is at least {LEAST_EFFICIENCY:.0%} efficient from "
            f"{curve.reference.plan.world.ranks:,} to {last.ranks:,} ranks{at}."
        )
        return
    elif broken.efficiency is None:
        yield f"{name} ends at {broken.ranks:,} ranks, which cannot run: {_sentence(broken.problem)}"
    else:
        assert broken.written is not None
        yield (
            f"{name} falls below {LEAST_EFFICIENCY:.0%} at {broken.ranks:,} ranks: "
            f"{broken.efficiency.value:.0%}."
        )
        if broken.cause is not None:
            estimate = broken.written.estimate
            yield (
                f"The part of a step that grows most per sample is {broken.cause}: "
                f"{estimate.parts[broken.cause]:.3g} s of {estimate.seconds:.3g} s."
            )
    for point in [broken, *([last] if last.broken and last is not broken else [])]:
        if point.changed is None or point.changed_efficiency is None:
            yield f"At {point.ranks:,} ranks, none of the tried changes is faster."
            continue
        before = "" if point.efficiency is None else f" instead of {point.efficiency.value:.0%}"
        yield (
            f"At {point.ranks:,} ranks, {' '.join(point.changed.overrides)} gives an efficiency of "
            f"{point.changed_efficiency.value:.0%}{before}."
        )


def _candidate(
    changes: Changes, config: RunConfig, world: World, estimate: Estimator, plan: Planner
) -> Candidate:
    planned = plan(config, world)
    found = estimate(planned)
    if found is None:
        raise InputError(
            Problem(
                "task.target",
                f"scaling= with task.target={config.task.target}",
                "step times of a model family are predicted with its own loss, as a task may do more",
                "leave task.target out, or plan without scaling=",
            )
        )
    return Candidate(changes, planned, found)


def _measure(point: ScalingPoint, reference: Candidate | None, factors: SpeedFactors | None) -> ScalingPoint:
    """Return ``point`` with its efficiencies and the cause of their loss."""
    if reference is None:
        return point
    if point.written is not None:
        point = replace(
            point,
            efficiency=_efficiency(point.written, reference, factors),
            cause=_cause(point.written, reference),
        )
    if point.changed is not None:
        point = replace(point, changed_efficiency=_efficiency(point.changed, reference, factors))
    return point


def _efficiency(candidate: Candidate, reference: Candidate, factors: SpeedFactors | None) -> Efficiency:
    value = candidate.throughput / reference.throughput
    spread = math.exp(
        INTERVAL_QUANTILE
        * ratio_spread(candidate.estimate, reference.estimate, factors, candidate.plan.world.ranks)
    )
    return Efficiency(value=value, low=value / spread, high=value * spread)


def _cause(candidate: Candidate, reference: Candidate) -> str | None:
    """Return the part whose time per sample and rank grew most; None if none grew."""

    def per_sample(one: Candidate, part: str) -> float:
        return one.estimate.parts.get(part, 0.0) * one.plan.world.ranks / one.plan.batch.global_batch

    growth = {
        part: per_sample(candidate, part) - per_sample(reference, part) for part in candidate.estimate.parts
    }
    part = max(growth, key=lambda name: growth[name], default=None)
    return part if part is not None and growth[part] > 0 else None


def _first_error(error: PlanError) -> Problem:
    return next(
        (problem for problem in error.problems if problem.severity is Severity.ERROR), error.problems[0]
    )


def _sentence(problem: Problem | None) -> str:
    if problem is None:
        return "the reason is not known."
    return f"{problem.seen}; {problem.rule}. Remedy: {problem.remedy}."
