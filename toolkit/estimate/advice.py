"""The best layouts of a run for its machines, and why the obvious alternatives lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from toolkit.config.schema import EngineName, RunConfig
from toolkit.errors import PlanError, Problem, Severity
from toolkit.estimate.cost import RunCost, run_cost
from toolkit.estimate.goal import Goal, make_goal, most_gpu_hours
from toolkit.estimate.layouts import OFFLOADS, VIRTUAL_KEY, Layout, SearchSpace, layout_of
from toolkit.estimate.module_traces import ModuleTraces, Tracer
from toolkit.estimate.profile import HardwareProfile, load_profile
from toolkit.estimate.search import Evaluator, LayoutResult, SearchResult, find_best, layout_kind
from toolkit.estimate.step import estimate_step
from toolkit.estimate.types import StepEstimate
from toolkit.plan.devices import GPUS, memory_bytes
from toolkit.plan.flops import flops_per_step, peak_flops
from toolkit.plan.make import draft_plan
from toolkit.plan.memory_verdict import judge_memory
from toolkit.plan.transformer_engine import has_transformer_engine
from toolkit.plan.types import Device, RunPlan, World

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvisedLayout:
    """One of the best layouts, ready to run."""

    layout: Layout
    plan: RunPlan
    estimate: StepEstimate
    cost: RunCost

    @property
    def units_per_second(self) -> float:
        """Tokens, images or samples per second of all ranks."""
        return self.plan.units_per_step / self.estimate.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s over the peak of all GPUs; None if utilisation is not reported."""
        flops, peak = flops_per_step(self.plan), peak_flops(self.plan)
        if flops is None or peak is None:
            return None
        return flops / (self.estimate.seconds * peak * self.plan.world.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A layout that people often try first.

    Attributes:
        name: what distinguishes it.
        layout: the best of this kind.
        seconds: predicted for a step, also if it cannot run; None if that is not known.
        reason: why it is not the advice.
    """

    name: str
    layout: Layout
    seconds: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """
    Attributes:
        config: the user's run.
        fixed: keys that kept their values.
        goal: what was minimized, and the limits of a step.
        best: best first; empty if no layout can run.
        missed: the limit that no layout meets, in a sentence; ``best`` then has the nearest.
        alternatives: why obvious ones are not in ``best``.
    """

    config: RunConfig
    fixed: frozenset[str]
    goal: Goal
    best: tuple[AdvisedLayout, ...]
    missed: str | None
    alternatives: tuple[Alternative, ...]
    search: SearchResult

    @property
    def without_transformer_engine(self) -> bool:
        """Whether Megatron-core's layers are slower than they could be on these GPUs."""
        world = self.best[0].plan.world
        return (
            world.device is Device.CUDA
            and self.config.model.source_key == "model.family"
            and not has_transformer_engine(world)
            and "engine.name" not in self.fixed
        )


def advise(
    config: RunConfig,
    world: World,
    *,
    fixed: frozenset[str],
    hours: float | None = None,
    trace: Tracer | None = None,
) -> Advice:
    """Search the best layouts of ``config`` on ``world``, within ``config.budget``.

    Args:
        config: composed, with the sizes of ``model.pretrained``.
        fixed: keys that keep their values.
        hours: the most that all steps may take, also by ``budget.until``.
        trace: traces a model without a family (train/trace.py), which has no advice otherwise.

    Raises:
        PlanError: the time of a step cannot be predicted, or no layout can run.
        UserError: a model without a family cannot be built.
    """
    draft = draft_plan(config, world)
    if draft.context.of_a_family and draft.context.shape is None:
        raise PlanError(*(found for found in draft.problems() if found.severity is Severity.ERROR))
    limited = hours is not None or most_gpu_hours(config) is not None
    space = SearchSpace(
        config=config, world=world, shape=draft.context.shape, fixed=fixed, fewer_nodes=limited
    )
    profile = load_profile(config.cluster, world)
    _check_predictable(config, profile)
    assert profile is not None
    goal = make_goal(config, world, hours)
    traces = None
    if not draft.context.of_a_family:
        assert trace is not None, "models without a family are traced"
        traces = ModuleTraces(config, world, trace, most=config.train.global_batch)
    evaluator = Evaluator(space, profile, traces)
    if traces is not None and evaluator.layouts:
        # A model that cannot be traced is refused here, rather than in the search.
        traces.get(evaluator.layouts[0].recomputation, evaluator.layouts[0].micro_batch)
    search = find_best(evaluator, goal)
    missed = None
    if not search.best and limited:
        search, missed = _nearest(evaluator, goal, config, hours)
    if not search.best:
        raise PlanError(_nothing_runs(evaluator, search))
    best = tuple(_advised(result) for result in search.best)
    return Advice(
        config=config,
        fixed=fixed,
        goal=goal,
        best=best,
        missed=missed,
        alternatives=tuple(_alternatives(evaluator, goal, search)),
        search=search,
    )


def layout_overrides(advised: AdvisedLayout, config: RunConfig) -> list[str]:
    """Return the arguments that turn ``config`` into the advised layout: ``engine=megatron
    parallel.tensor=2``.
    """
    layout, base = advised.layout, config
    changed = layout.apply(config)
    overrides = []
    if changed.engine.name is not base.engine.name:
        overrides.append(f"engine={changed.engine.name.value}")
    for axis in ("tensor", "pipeline", "context", "expert"):
        if (size := getattr(changed.parallel, axis)) != getattr(base.parallel, axis):
            overrides.append(f"parallel.{axis}={size}")
    own = base.engine.megatron.get(VIRTUAL_KEY.rpartition(".")[2])
    if layout.virtual > 1 and own != layout.virtual:
        overrides.append(f"{'+' * (own is None)}{VIRTUAL_KEY}={layout.virtual}")
    elif layout.virtual == 1 and own is not None:
        overrides.append(f"~{VIRTUAL_KEY}")
    if layout.zero != base.zero.stage:
        overrides.append(f"zero.stage={layout.zero}")
    for kind in ("optimizer", "parameters", "activations"):
        if (device := getattr(changed.offload, kind)) is not getattr(base.offload, kind):
            overrides.append(f"offload.{kind}={device.value}")
    if layout.micro_batch != base.train.micro_batch:
        overrides.append(f"train.micro_batch={layout.micro_batch}")
    if layout.recomputation != base.train.activation_checkpointing:
        overrides.append(f"train.activation_checkpointing={layout.recomputation}")
    if changed.cluster.nodes != base.cluster.nodes:
        overrides.append(f"cluster.nodes={changed.cluster.nodes}")
    if changed.engine.deepspeed != base.engine.deepspeed:
        overrides.append("+engine.deepspeed.data_types.grad_accum_dtype=fp32")
    return overrides


def _nearest(
    evaluator: Evaluator, goal: Goal, config: RunConfig, hours: float | None
) -> tuple[SearchResult, str | None]:
    """Return the fastest layouts if no layout meets the deadline; the cheapest ones if none is within the
    budget.
    """
    if hours is not None:
        search = find_best(evaluator, Goal())
        if not search.best:
            return search, None
        fastest = _advised(search.best[0]).cost
        if fastest.high_hours > hours:
            return search, (
                f"no layout ends within {hours:.3g} hours: the upper end of the fastest is "
                f"{fastest.high_hours:.3g} hours, {fastest.high_hours - hours:.3g} too many"
            )
    search = find_best(evaluator, Goal(cheapest=True, most_seconds=goal.most_seconds))
    if not search.best:
        return search, None
    first, most = _advised(search.best[0]), most_gpu_hours(config)
    assert most is not None, "a layout meets the deadline, so the budget is what none meets"
    high = first.cost.high_hours * first.plan.world.ranks
    in_time = " in time" if hours is not None else ""
    return search, (
        f"no layout is within the budget of {_amount(config, most)}: the upper end of the cheapest{in_time} "
        f"is {_amount(config, high)}, {_amount(config, high - most)} too much"
    )


def _amount(config: RunConfig, gpu_hours: float) -> str:
    """GPU-hours, with their price if there is one."""
    price = config.monitor.price_per_gpu_hour
    cost = "" if price is None else f" (cost {gpu_hours * price:,.0f})"
    return f"{gpu_hours:,.4g} GPU-hours{cost}"


def _check_predictable(config: RunConfig, profile: HardwareProfile | None) -> None:
    problems = []
    if config.model.source_key == "model.family" and config.task.target is not None:
        problems.append(
            Problem(
                "task.target",
                f"advise=true with task.target={config.task.target}",
                "step times of a model family are predicted with its own loss, as a task may do more",
                "leave task.target out, and add it to the advised run",
            )
        )
    if profile is None:
        problems.append(
            Problem(
                "cluster.gpu",
                f"advise=true with cluster.gpu={config.cluster.gpu or 'null'}",
                "step times are predicted for a known kind of GPU",
                f"write cluster.gpu= and one of {', '.join(GPUS)}",
            )
        )
    if problems:
        raise PlanError(*problems)


def _nothing_runs(evaluator: Evaluator, search: SearchResult) -> Problem:
    space = evaluator.space
    kept = sorted(space.fixed.intersection(LAYOUT_KEYS))
    own = evaluator.evaluate(layout_of(space.config, space.world))
    seen = f"{search.layouts} layouts on {space.world.ranks} ranks"
    refused = next((problem for problem in own.problems if problem.severity is Severity.ERROR), None)
    why = f" ({refused.rule})" if refused is not None and not search.planned else ""
    return Problem(
        "advise",
        seen + (f" with {' '.join(kept)} as given" if kept else ""),
        f"at least one layout divides the run evenly, fits in memory and breaks no rule{why}",
        "give fewer keys on the command line, use more nodes, or another train.global_batch",
    )


LAYOUT_KEYS = frozenset(
    {
        "engine.name",
        "parallel.tensor",
        "parallel.pipeline",
        "parallel.context",
        "parallel.expert",
        VIRTUAL_KEY,
        "zero.stage",
        "offload.optimizer",
        "offload.parameters",
        "train.micro_batch",
        "train.activation_checkpointing",
    }
)


# -- alternatives


def _alternatives(evaluator: Evaluator, goal: Goal, search: SearchResult) -> Iterator[Alternative]:
    """Yield each obvious alternative that is not one of the best."""
    first, best = search.best[0], search.best[0].layout
    shown = {layout_kind(result.layout) for result in search.best}
    seen = {result.layout for result in search.best}
    space = evaluator.space

    def compare(name: str, result: LayoutResult) -> Iterator[Alternative]:
        if result.layout not in seen:
            seen.add(result.layout)
            yield _alternative(name, result, first, goal, evaluator.profile)

    def best_of(name: str, keep: Callable[[Layout], bool]) -> Iterator[Alternative]:
        if any(keep(result.layout) for result in search.best):
            return

        def kept(layout: Layout) -> bool:
            return layout.nodes == best.nodes and keep(layout)

        found = find_best(evaluator, Goal(cheapest=goal.cheapest), count=1, keep=kept).best
        smallest = found[0] if found else _smallest(evaluator, kept)
        if smallest is not None and layout_kind(smallest.layout) not in shown:
            yield from compare(name, smallest)

    yield from compare("as configured", evaluator.evaluate(layout_of(space.config, space.world)))
    if best.recomputation != "none":
        yield from compare("without recomputation", evaluator.evaluate(replace(best, recomputation="none")))
    yield from best_of(
        "ZeRO 3 on data ranks only", lambda one: one.model_ranks * one.expert == 1 and one.zero == 3
    )
    yield from best_of(
        "data parallel without ZeRO 3", lambda one: one.model_ranks * one.expert == 1 and one.zero < 3
    )
    yield from best_of("engine=deepspeed", lambda one: one.engine is EngineName.deepspeed)
    yield from best_of("engine=megatron", lambda one: one.engine is EngineName.megatron)
    if best.pipeline > 1:
        yield from best_of("without a pipeline", lambda one: one.pipeline == 1)
    if best.offload != OFFLOADS[0]:
        yield from compare("without offload", evaluator.evaluate(replace(best, offload=OFFLOADS[0])))
    per_node = space.world.ranks_per_node
    data = best.ranks(space.world) // best.model_ranks
    across = replace(
        best, engine=EngineName.megatron, tensor=2 * per_node, pipeline=1, virtual=1, context=1, zero=1
    )
    heads = 1 if space.shape is None else space.shape.num_attention_heads
    if best.nodes > 1 and best.tensor > 1 and heads % across.tensor == 0 and best.offload == OFFLOADS[0]:
        yield from compare("tensor ranks across nodes", evaluator.evaluate(across))
    if space.config.train.global_batch % (2 * best.micro_batch * data) == 0:
        larger = replace(best, micro_batch=2 * best.micro_batch)
        yield from compare(f"micro-batch {larger.micro_batch}", evaluator.evaluate(larger))


def _smallest(evaluator: Evaluator, keep: Callable[[Layout], bool]) -> LayoutResult | None:
    """Return the layout that needs least memory, of those that do not run."""
    kept = [layout for layout in evaluator.layouts if keep(layout)]
    least = min(kept, key=evaluator.least_bytes, default=None)
    return None if least is None else evaluator.evaluate(least)


def _alternative(
    name: str, result: LayoutResult, first: LayoutResult, goal: Goal, profile: HardwareProfile
) -> Alternative:
    estimate = result.estimate
    if estimate is None and result.plan is not None:  # predicted although it cannot run
        estimate = estimate_step(result.plan, profile)
    return Alternative(
        name=name,
        layout=result.layout,
        seconds=None if estimate is None else estimate.seconds,
        reason=_reason(result, estimate, first, goal),
    )


def _reason(result: LayoutResult, estimate: StepEstimate | None, first: LayoutResult, goal: Goal) -> str:
    if not result.fits:
        assert result.plan is not None
        return _does_not_fit(result.plan)
    if result.estimate is None:
        errors = [problem for problem in result.problems if problem.severity is Severity.ERROR]
        return f"refused: {errors[0].seen}: {errors[0].rule}" if errors else "its time is not known"
    assert result.plan is not None
    assert first.plan is not None
    assert first.estimate is not None
    ranks, best_ranks = result.plan.world.ranks, first.plan.world.ranks
    if not goal.allows(result.estimate.high, ranks):
        late = result.estimate.high > goal.most_seconds
        return "too late" if late else "too expensive"
    ratio = goal.cost(result.seconds, ranks) / goal.cost(first.seconds, best_ranks)
    what = "GPU-hours" if goal.cheapest else "time"
    part = _slower_part(result.estimate, first.estimate)
    return f"{ratio:.2f} x the {what}" + (f": {part}" if part else "")


def _does_not_fit(plan: RunPlan) -> str:
    have = memory_bytes(plan.world)
    assert plan.memory is not None
    assert have is not None
    needs = f"{plan.memory.device_total / GB:,.1f} GB of {have / GB:,.1f} GB"
    return f"{judge_memory(plan.memory, plan.world)} ({needs})"


def _slower_part(estimate: StepEstimate, best: StepEstimate) -> str | None:
    """Return the part of the step that takes most longer than in the best layout."""
    longer = {name: seconds - best.parts.get(name, 0.0) for name, seconds in estimate.parts.items()}
    name = max(longer, key=lambda part: longer[part], default=None)
    if name is None or longer[name] <= 0:
        return None
    own, other = estimate.parts[name], best.parts.get(name, 0.0)
    return f"{name} takes {own:.3g} s of its {estimate.seconds:.3g} s, here {other:.3g} s"


def _advised(result: LayoutResult) -> AdvisedLayout:
    assert result.plan is not None
    assert result.estimate is not None
    cost = run_cost(result.plan, result.estimate)
    return AdvisedLayout(layout=result.layout, plan=result.plan, estimate=result.estimate, cost=cost)
