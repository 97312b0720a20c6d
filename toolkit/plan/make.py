"""``make_plan``: everything about a run is decided here, once, or refused with every reason."""

from __future__ import annotations

from dataclasses import replace

from toolkit.config import vendor
from toolkit.config.identity import identity
from toolkit.config.schema import EngineName, RunConfig
from toolkit.errors import PlanError, Problem, Severity
from toolkit.families import get_family
from toolkit.families.base import ModelShape, ParameterSpec
from toolkit.layout.axes import Axes
from toolkit.plan import deepspeed, megatron, rules
from toolkit.plan.batch import plan_batch
from toolkit.plan.memory import plan_memory
from toolkit.plan.rank_parameters import rank_parameters
from toolkit.plan.rule_context import RuleContext
from toolkit.plan.types import BatchPlan, RunPlan, World


def make_plan(config: RunConfig, world: World) -> RunPlan:
    """The plan of ``config`` (with ``model.pretrained`` resolved: plan/pretrained.py) on ``world``. Pure.

    Raises:
        PlanError: with every problem found, errors first.
    """
    problems: list[Problem] = []
    shape = _shape(config, problems)
    parameters = get_family(shape.family).parameters(shape) if shape is not None else ()
    axes = _axes(config, world, problems)
    batch = _batch(config, axes, problems)
    settings = of_megatron = memory = None
    if batch is not None:
        if config.engine.name is EngineName.deepspeed:
            settings = deepspeed.settings(
                vendor.usable(config), world, batch, _sizes(shape, parameters, axes)
            )
        if shape is not None and axes is not None and config.engine.name is EngineName.megatron:
            of_megatron = megatron.settings(vendor.usable(config), world, axes, shape)
        if shape is not None and axes is not None:
            memory = plan_memory(
                vendor.usable(config), shape, parameters, axes, batch, world.device, settings
            )
    problems += rules.check(
        RuleContext(
            config=config,
            world=world,
            shape=shape,
            parameters=parameters,
            axes=axes,
            batch=batch,
            memory=memory,
        )
    )
    errors = [problem for problem in problems if problem.severity is Severity.ERROR]
    warnings = [problem for problem in problems if problem.severity is Severity.WARNING]
    if errors:
        raise PlanError(*errors, *warnings)
    assert axes is not None, "without a problem there are axes"
    assert batch is not None, "without a problem there is a batch"
    name = identity(config)
    return RunPlan(
        config=config,
        world=world,
        axes=axes,
        identity=name,
        run_dir=config.run.dir or f"runs/{config.run.name}-{name}",
        batch=batch,
        shape=shape,
        parameters=parameters,
        memory=memory,
        deepspeed=settings,
        megatron=of_megatron,
        warnings=tuple(warnings),
    )


def _sizes(shape: ModelShape | None, parameters: tuple[ParameterSpec, ...], axes: Axes | None) -> list[int]:
    """Elements of each parameter on a rank of the fullest stage; none for ``model.target``."""
    if shape is None or axes is None:
        return []
    held = [[spec.numel for spec in specs] for _, specs in rank_parameters(shape, parameters, axes)]
    return max(held, key=sum)


def _shape(config: RunConfig, problems: list[Problem]) -> ModelShape | None:
    model = config.model
    if model.target is not None:
        return None
    if model.family is None:
        problems.append(
            Problem(
                "model.family",
                "model.family is null, and so are model.target and model.pretrained",
                "a model is a family with its sizes, any module, or a pretrained model",
                "choose model=..., or write model.target=my.package.Model or model.pretrained=FOLDER",
            )
        )
        return None
    try:
        return get_family(model.family).resolve_shape(model)
    except PlanError as error:
        # A pretrained model keeps its sizes, so no other ones are suggested.
        other = "take another model, or train it as a module of your own: model.target=my.package.Model"
        problems += [
            problem if model.pretrained is None else replace(problem, remedy=other)
            for problem in error.problems
        ]
        return None


def _axes(config: RunConfig, world: World, problems: list[Problem]) -> Axes | None:
    parallel = config.parallel
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    if world.ranks % model_ranks:
        problems.append(
            Problem(
                "parallel",
                f"{world.ranks} ranks, parallel.tensor={parallel.tensor}, "
                f"parallel.pipeline={parallel.pipeline}, parallel.context={parallel.context}",
                "the number of ranks is divisible by tensor x pipeline x context; the rest are data ranks",
                f"start {-(-world.ranks // model_ranks) * model_ranks} ranks, or change parallel.*",
            )
        )
        return None
    return Axes(
        data=world.ranks // model_ranks,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        expert=parallel.expert,
    )


def _batch(config: RunConfig, axes: Axes | None, problems: list[Problem]) -> BatchPlan | None:
    if axes is None:
        return None
    try:
        return plan_batch(config, axes.data)
    except PlanError as error:
        problems += error.problems
        return None
