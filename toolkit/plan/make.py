"""``make_plan`` decides everything about a run once, or refuses it with all reasons."""

from __future__ import annotations

from dataclasses import replace

from toolkit.config import engine_keys
from toolkit.config.identity import identity
from toolkit.config.schema import EngineName, RunConfig
from toolkit.errors import PlanError, Problem, Severity
from toolkit.families import get_family
from toolkit.families.base import Family, ModelShape, ParameterSpec
from toolkit.layout.axes import Axes
from toolkit.plan import deepspeed, megatron, rules
from toolkit.plan.batch import plan_batch
from toolkit.plan.memory import plan_memory
from toolkit.plan.rank_parameters import rank_parameters
from toolkit.plan.rule_context import RuleContext
from toolkit.plan.types import BatchPlan, RunPlan, World


def make_plan(config: RunConfig, world: World) -> RunPlan:
    """Plan ``config`` on ``world``.

    ``model.pretrained`` must be resolved (plan/pretrained.py). Reads no files.

    Raises:
        PlanError: with every problem found, errors first.
    """
    problems: list[Problem] = []
    family, shape = _shape(config, problems)
    parameters = family.parameters(shape) if family is not None and shape is not None else ()
    axes = _axes(config, world, problems)
    batch = _batch(config, axes, problems)
    engine_problems = engine_keys.problems(config)
    usable = engine_keys.without_wrong_keys(config, engine_problems)
    deepspeed_settings = megatron_settings = memory = None
    if batch is not None:
        if config.engine.name is EngineName.deepspeed:
            sizes = _sizes(shape, parameters, axes)
            deepspeed_settings = deepspeed.build_settings(usable, world, batch, sizes)
        if shape is not None and axes is not None:
            if config.engine.name is EngineName.megatron:
                megatron_settings = megatron.build_settings(usable, world, axes, shape)
            memory = plan_memory(usable, shape, parameters, axes, batch, world.device, deepspeed_settings)
    problems += rules.check(
        RuleContext(
            config=config,
            world=world,
            family=family,
            shape=shape,
            parameters=parameters,
            axes=axes,
            batch=batch,
            memory=memory,
            engine_problems=tuple(engine_problems),
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
        deepspeed=deepspeed_settings,
        megatron=megatron_settings,
        warnings=tuple(warnings),
    )


def _sizes(shape: ModelShape | None, parameters: tuple[ParameterSpec, ...], axes: Axes | None) -> list[int]:
    """Elements of each parameter on a rank of the largest stage; empty for ``model.target``."""
    if shape is None or axes is None:
        return []
    stages = [[spec.numel for spec in specs] for _, specs in rank_parameters(shape, parameters, axes)]
    return max(stages, key=sum)


def _shape(config: RunConfig, problems: list[Problem]) -> tuple[Family | None, ModelShape | None]:
    model = config.model
    if model.target is not None:
        return None, None
    if model.family is None:
        problems.append(
            Problem(
                "model.family",
                "model.family is null, and so are model.target and model.pretrained",
                "a model is a family with sizes, a module of your own, or a pretrained model",
                "choose model=..., or write model.target=my.package.Model or model.pretrained=FOLDER",
            )
        )
        return None, None
    family = None
    try:
        family = get_family(model.family)
        return family, family.resolve_shape(model)
    except PlanError as error:
        # The sizes of a pretrained model are fixed, so no other sizes are suggested.
        other = "choose another model, or train it as a module of your own: model.target=my.package.Model"
        problems += [
            problem if model.pretrained is None else replace(problem, remedy=other)
            for problem in error.problems
        ]
        return family, None


def _axes(config: RunConfig, world: World, problems: list[Problem]) -> Axes | None:
    parallel = config.parallel
    model_ranks = parallel.tensor * parallel.pipeline * parallel.context
    if world.ranks % model_ranks:
        problems.append(
            Problem(
                "parallel",
                f"{world.ranks} ranks, parallel.tensor={parallel.tensor}, "
                f"parallel.pipeline={parallel.pipeline}, parallel.context={parallel.context}",
                "the number of ranks is divisible by tensor x pipeline x context; the quotient is the number "
                "of data ranks",
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
