"""Find the fastest or cheapest layout of a run: branch and bound over ``SearchSpace.layouts``.

A layout is planned and its step time is predicted (2 to 10 ms) only if cheap bounds do not exclude it:

- Time. The whole model runs one micro-batch on one group of tensor and context ranks, without a pipeline. A
  pipeline of p stages with v chunks of m micro-batches takes at least C/p x (m + (p - 1)/v), where C is the
  time of this micro-batch (Narayanan et al., 2104.04473, section 2.2). Communication of gradients, gathers
  and unequal stages only add to it.
- Memory. States are at least those of evenly divided parameters. If the micro-batch stores A bytes in the
  whole model, a stage stores at least A k / (k + 1 - 1/p), where k = min(m, p)/p: its share of the blocks for
  k p micro-batches, or the loss, whichever is more.
- Traces. A model without a family is traced with a few micro-batches (module_traces.py). Recomputation has
  traces of its own, so a bound takes the time without it, and no activations.
- Order. Recomputation and offload only add time, so they are tried where a layout does not fit without; and
  a layout that does not fit excludes larger micro-batches and less recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count as count_up
from math import inf
from typing import NamedTuple

from toolkit.config.schema import EngineName, OffloadDevice
from toolkit.errors import Problem, Severity, UserError
from toolkit.estimate.goal import Goal
from toolkit.estimate.layouts import Layout, SearchSpace
from toolkit.estimate.module_traces import ModuleTraces
from toolkit.estimate.profile import HardwareProfile
from toolkit.estimate.step import estimate_step
from toolkit.estimate.types import StepEstimate
from toolkit.families.base import ParameterSpec
from toolkit.layout.axes import Axis
from toolkit.plan.checkpoint_size import state_bytes
from toolkit.plan.devices import memory_bytes
from toolkit.plan.make import draft_plan
from toolkit.plan.memory_verdict import USABLE, Fit, judge_memory
from toolkit.plan.memory_zero import FP32
from toolkit.plan.rank_parameters import is_expert_parameter
from toolkit.plan.trace import ModuleTrace
from toolkit.plan.types import Device, RunPlan
from toolkit.step_parts import BACKWARD, FORWARD, communication

TOLERANCE = 0.95  # bounds of time are taken this much lower: stages of a real pipeline are not equal
MATRIX_PARTS = (FORWARD, BACKWARD, communication(Axis.TENSOR))  # parts of every micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutResult:
    """A layout that was planned.

    Attributes:
        plan: None if ranks or batch cannot be divided.
        estimate: None if the layout cannot run.
        fits: whether it surely fits in the device's memory.
        problems: rules that it breaks; empty if it does not fit, when they were not checked.
    """

    layout: Layout
    plan: RunPlan | None
    estimate: StepEstimate | None
    fits: bool = True
    problems: tuple[Problem, ...] = ()

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step; infinite if the layout cannot run."""
        return inf if self.estimate is None else self.estimate.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """
    Attributes:
        best: of each kind of layout (``layout_kind``), best first.
        layouts: how many there are.
        without_memory: how many do not fit by the bound of memory.
        planned: how many were planned exactly.
    """

    best: tuple[LayoutResult, ...]
    layouts: int
    without_memory: int
    planned: int


class _Bounded(NamedTuple):
    """A layout in the queue. Of equal bounds those come first that exclude others: those that save least."""

    cost: float
    savings: tuple[int, ...]
    micro_batch: int  # negative, so that the largest comes first
    number: int
    divided: bool
    layout: Layout


class Evaluator:
    """Plans layouts of one run and predicts their time, each once.

    Args:
        traces: of a model without a family; None for a model of a family.
    """

    def __init__(
        self, space: SearchSpace, profile: HardwareProfile, traces: ModuleTraces | None = None
    ) -> None:
        self.space, self.profile, self._traces = space, profile, traces
        self._results: dict[Layout, LayoutResult] = {}
        self._microbatches: dict[tuple[object, ...], tuple[float, float]] = {}
        self._sizes: _StateSizes | None = None
        self._refused: dict[str, tuple[Problem, ...]] = {}  # by recomputation that the model does not have
        self.layouts = tuple(space.layouts())

    @property
    def planned(self) -> int:
        return len(self._results)

    def evaluate(self, layout: Layout) -> LayoutResult:
        """Plan ``layout`` with all rules, and predict its step time if it can run."""
        if layout not in self._results:
            self._results[layout] = self._evaluate(layout)
        return self._results[layout]

    def _evaluate(self, layout: Layout) -> LayoutResult:
        trace = self._trace(layout)
        if layout.recomputation in self._refused:
            problems = self._refused[layout.recomputation]
            return LayoutResult(layout=layout, plan=None, estimate=None, problems=problems)
        draft = draft_plan(layout.apply(self.space.config), layout.world(self.space.world), trace)
        if draft.plan is not None and not surely_fits(draft.plan):
            return LayoutResult(layout=layout, plan=draft.plan, estimate=None, fits=False)
        problems = draft.problems()
        if draft.plan is None or any(problem.severity is Severity.ERROR for problem in problems):
            return LayoutResult(layout=layout, plan=draft.plan, estimate=None, problems=problems)
        plan = replace(draft.plan, warnings=problems)
        estimate = estimate_step(plan, self.profile)
        return LayoutResult(layout=layout, plan=plan, estimate=estimate, problems=problems)

    def _trace(self, layout: Layout) -> ModuleTrace | None:
        """Return the trace of a model without a family; None for a family's, and if ``_refused`` has the
        reason.
        """
        if self._traces is None or layout.recomputation in self._refused:
            return None
        try:
            return self._traces.get(layout.recomputation, layout.micro_batch)
        except UserError as error:
            self._refused[layout.recomputation] = tuple(error.problems)
            return None

    def least_seconds(self, layout: Layout, *, divided: bool = True) -> float:
        """Return a lower bound of the predicted seconds of a step.

        Args:
            divided: whether the time of one micro-batch is that of the layout's tensor and context ranks, or
                an equal share of that of one rank, which is known sooner and lower.
        """
        seconds, _ = self._microbatch(layout, divided)
        stages, accumulation = layout.pipeline, self._accumulation(layout)
        return TOLERANCE * seconds / stages * (accumulation + (stages - 1) / layout.virtual)

    def least_bytes(self, layout: Layout, *, divided: bool = True) -> float:
        """Return a lower bound of a rank's memory on the device. ``divided``: see :meth:`least_seconds`."""
        _, stored = self._microbatch(layout, divided)
        stages = layout.pipeline
        share = min(self._accumulation(layout), stages) / stages
        return self._least_states(layout) + stored * share / (share + 1 - 1 / stages)

    def _least_states(self, layout: Layout) -> float:
        if self._sizes is None:
            self._sizes = self._state_sizes(layout)
        return self._sizes.least(layout, self._data_ranks(layout) * layout.context)

    def _state_sizes(self, layout: Layout) -> _StateSizes:
        config = self.space.config
        plan = draft_plan(layout.apply(config), layout.world(self.space.world), self._trace(layout)).plan
        parameters = () if plan is None else plan.known_parameters
        return _StateSizes.of(parameters, config.precision.element_bytes, state_bytes(config, parameters))

    def _data_ranks(self, layout: Layout) -> int:
        return layout.ranks(self.space.world) // layout.model_ranks

    def _accumulation(self, layout: Layout) -> int:
        """Micro-batches of a step on one rank."""
        return self.space.config.train.global_batch // (layout.micro_batch * self._data_ranks(layout))

    def _microbatch(self, layout: Layout, divided: bool) -> tuple[float, float]:
        """Return the seconds and stored bytes of one micro-batch of the whole model on one group of tensor
        and context ranks, with as many data ranks as expert parallelism needs; or a share of those of one
        rank.
        """
        tensor, context, expert = (layout.tensor, layout.context, layout.expert) if divided else (1, 1, 1)
        # Recomputation has a trace of its own, which is made only if layouts without it do not suffice.
        traced = self._traces is not None
        recomputation = self.layouts[0].recomputation if traced else layout.recomputation
        key = layout.engine, tensor, context, expert, layout.micro_batch, recomputation
        if key not in self._microbatches:
            alone = Layout(
                nodes=1,
                engine=layout.engine,
                tensor=tensor,
                context=context,
                expert=expert,
                zero=0 if layout.engine is EngineName.local else 1,
                micro_batch=layout.micro_batch,
                recomputation=recomputation,
            )
            self._microbatches[key] = self._run_alone(alone)
        seconds, stored = self._microbatches[key]
        if recomputation != layout.recomputation:
            stored = 0.0
        ranks = 1 if divided else layout.tensor * layout.context
        return seconds / ranks, stored / ranks

    def _run_alone(self, layout: Layout) -> tuple[float, float]:
        data = max(1, layout.expert // layout.context)
        config = layout.apply(self.space.config)
        train = replace(config.train, global_batch=data * layout.micro_batch)
        train = replace(train, batch_ramp=type(train.batch_ramp)())
        world = replace(self.space.world, ranks=data * layout.tensor * layout.context)
        plan = draft_plan(replace(config, train=train), world, self._trace(layout)).plan
        estimate = None if plan is None else estimate_step(plan, self.profile)
        if plan is None or estimate is None:
            return 0.0, 0.0
        stored = 0 if plan.memory is None else plan.memory.activations or 0
        return sum(estimate.parts.get(part, 0.0) for part in MATRIX_PARTS), float(stored)


def find_best(
    evaluator: Evaluator, goal: Goal, *, count: int = 5, keep: Callable[[Layout], bool] | None = None
) -> SearchResult:
    """Return the best layouts for ``goal``, one of each kind.

    Args:
        count: how many.
        keep: consider only these layouts.
    """
    have = _usable_bytes(evaluator.space)
    world = evaluator.space.world
    queue: list[_Bounded] = []
    layouts = without_memory = 0

    def bounded(layout: Layout, *, divided: bool) -> _Bounded | None:
        if have is not None and evaluator.least_bytes(layout, divided=divided) > have:
            return None
        seconds, ranks = evaluator.least_seconds(layout, divided=divided), layout.ranks(world)
        cost = goal.cost(seconds, ranks) if goal.allows(seconds, ranks) else inf
        return _Bounded(cost, _savings(layout), -layout.micro_batch, next(number), divided, layout)

    number = count_up()
    for layout in evaluator.layouts:
        if keep is None or keep(layout):
            layouts += 1
            entry = bounded(layout, divided=False)
            without_memory += entry is None
            queue += [entry] if entry is not None else []
    heapify(queue)
    found = _Frontier(count=count)
    before = evaluator.planned
    while queue:
        entry = heappop(queue)
        layout = entry.layout
        if entry.cost >= found.worst:
            break
        if entry.cost >= found.cost_of(layout) or found.excludes(layout):
            continue
        if not entry.divided:
            closer = bounded(layout, divided=True)
            without_memory += closer is None
            if closer is not None:
                heappush(queue, closer)
            continue
        result = evaluator.evaluate(layout)
        if not result.fits:
            found.add_too_large(layout)
        elif result.estimate is not None and result.plan is not None:
            found.add_runnable(layout)
            ranks = result.plan.world.ranks
            if goal.allows(result.estimate.high, ranks):
                found.add(result, goal.cost(result.seconds, ranks))
    return SearchResult(
        best=found.best(), layouts=layouts, without_memory=without_memory, planned=evaluator.planned - before
    )


def layout_kind(layout: Layout) -> tuple[object, ...]:
    """Return the properties that distinguish the layouts of an advice.

    The best micro-batch, recomputation and offload, and the best ZeRO stage that divides no parameters, are
    chosen within a kind.
    """
    axes = (layout.tensor, layout.pipeline, layout.virtual, layout.context, layout.expert)
    return layout.nodes, layout.engine, axes, layout.zero == 3


def surely_fits(plan: RunPlan) -> bool:
    """Return whether ``plan`` fits in its device's memory with the margin of its uncertainty."""
    verdict = judge_memory(plan.memory, plan.world)
    return verdict is None or verdict.fit is Fit.yes


@dataclass(slots=True)
class _Frontier:
    """The best layouts so far, and what the planned layouts exclude."""

    count: int
    costs: dict[tuple[object, ...], tuple[float, int, LayoutResult]] = field(default_factory=dict)
    runnable: dict[tuple[object, ...], list[tuple[int, ...]]] = field(default_factory=dict)
    too_large: dict[tuple[object, ...], list[tuple[int, ...]]] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The cost of the last of the best layouts."""
        costs = sorted(cost for cost, _, _ in self.costs.values())
        return costs[self.count - 1] if len(costs) >= self.count else inf

    def cost_of(self, layout: Layout) -> float:
        known = self.costs.get(layout_kind(layout))
        return inf if known is None else known[0]

    def best(self) -> tuple[LayoutResult, ...]:
        ordered = sorted(self.costs.values(), key=lambda entry: entry[:2])
        return tuple(result for _, _, result in ordered[: self.count])

    def add(self, result: LayoutResult, cost: float) -> None:
        """Equal costs: less memory is better."""
        assert result.plan is not None
        size = 0 if result.plan.memory is None else result.plan.memory.device_total
        kind = layout_kind(result.layout)
        if kind not in self.costs or (cost, size) < self.costs[kind][:2]:
            self.costs[kind] = (cost, size, result)

    def add_runnable(self, layout: Layout) -> None:
        key = (*_structure(layout), layout.micro_batch)
        self.runnable.setdefault(key, []).append(_savings(layout))

    def add_too_large(self, layout: Layout) -> None:
        sizes = self.too_large.setdefault(_structure(layout), [])
        sizes.append((-layout.micro_batch, *_savings(layout)))

    def excludes(self, layout: Layout) -> bool:
        """Return whether a faster layout than ``layout`` runs, or one that needs less memory does not fit."""
        mine = _savings(layout)
        runnable = self.runnable.get((*_structure(layout), layout.micro_batch), ())
        too_large = self.too_large.get(_structure(layout), ())
        return any(_all_at_most(faster, mine) for faster in runnable) or any(
            _all_at_most((-layout.micro_batch, *mine), smaller) for smaller in too_large
        )


def _structure(layout: Layout) -> tuple[object, ...]:
    axes = (layout.tensor, layout.pipeline, layout.virtual, layout.context, layout.expert)
    return layout.nodes, layout.engine, axes, layout.zero


def _savings(layout: Layout) -> tuple[int, ...]:
    """Return ranks of how much memory recomputation and offload of each kind save; a higher rank is
    slower.
    """
    again = {"none": 0, "selective": 1, "full": 1_000_000}
    every = layout.recomputation  # or every N-th block
    recomputed = again[every] if every in again else 2 + 100_000 // int(every)
    return recomputed, *(list(OffloadDevice).index(device) for device in layout.offload)


def _all_at_most(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def _usable_bytes(space: SearchSpace) -> float | None:
    have = memory_bytes(space.world)
    return None if have is None or space.world.device is Device.CPU else USABLE * have


@dataclass(frozen=True, slots=True, kw_only=True)
class _StateSizes:
    """Bytes of the states of the whole model."""

    dense_weights: int
    expert_weights: int
    gradient_ratio: float  # of fp32 gradients to weights
    optimizer: int  # master weights and moments

    @classmethod
    def of(cls, parameters: Iterable[ParameterSpec], width: int, states: int) -> _StateSizes:
        dense = expert = 0
        for spec in parameters:
            if is_expert_parameter(spec):
                expert += spec.numel * width
            else:
                dense += spec.numel * width
        return cls(
            dense_weights=dense,
            expert_weights=expert,
            gradient_ratio=FP32 / width,
            optimizer=states - dense - expert,
        )

    def least(self, layout: Layout, sharing: int) -> float:
        """Return a lower bound of a rank's bytes; ``sharing``: data x context ranks."""
        model_ranks = layout.tensor * layout.pipeline
        weights = (self.dense_weights + self.expert_weights / layout.expert) / model_ranks
        megatron = layout.engine is EngineName.megatron
        gradients = weights * (self.gradient_ratio if megatron else 1)
        optimizer = self.optimizer / model_ranks / (sharing if layout.zero else 1)
        if not megatron and layout.zero >= 2:
            gradients /= sharing
        if not megatron and layout.zero == 3:
            weights /= sharing
        if layout.offload[0] is not OffloadDevice.none:
            gradients = optimizer = 0.0
        if layout.offload[1] is not OffloadDevice.none:
            weights = 0.0
        return weights + gradients + optimizer
