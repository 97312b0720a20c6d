"""``make_plan`` decides everything about a run once, or refuses it with all reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolkit.config import engine_keys
from toolkit.config.identity import identity
from toolkit.config.optim import OptimConfig
from toolkit.config.schema import EngineName, RunConfig
from toolkit.errors import ConfigError, PlanError, Problem, Severity
from toolkit.families import load_family, resolve_shape_of
from toolkit.families.base import Family, ModelShape, ParameterSpec
from toolkit.layout.axes import Axes
from toolkit.optimizers import get_optimizer
from toolkit.plan import deepspeed, megatron, rules
from toolkit.plan.batch import plan_batch
from toolkit.plan.checkpoint_size import rank_state_bytes
from toolkit.plan.deepspeed_file import accept_file_keys
from toolkit.plan.device_overhead import add_device_overhead
from toolkit.plan.hugging_face import HuggingFaceModel, describe
from toolkit.plan.kernels import choose_kernels
from toolkit.plan.memory import plan_memory
from toolkit.plan.memory_verdict import DOES_NOT_FIT, MAY_NOT_FIT, Fit, judge_memory, nearest_change
from toolkit.plan.rank_parameters import rank_parameters
from toolkit.plan.rule_context import RuleContext
from toolkit.plan.saves import plan_saves
from toolkit.plan.trace import ModuleTrace, NotTraced
from toolkit.plan.train_steps import resolve_train_steps
from toolkit.plan.types import BatchPlan, MemoryPlan, RunPlan, World


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """A plan whose rules have not been checked.

    Attributes:
        plan: None if ranks or batch cannot be divided, or the optimizer is unknown; then ``found`` has
            errors.
        context: what the rules read.
        found: problems that were found before the rules.
    """

    plan: RunPlan | None
    context: RuleContext
    found: tuple[Problem, ...]

    def problems(self) -> tuple[Problem, ...]:
        """Return all problems, errors first."""
        every = [*self.found, *rules.find_problems(self.context)]
        return tuple(sorted(every, key=lambda problem: problem.severity is not Severity.ERROR))


def make_plan(config: RunConfig, world: World, trace: ModuleTrace | NotTraced | None = None) -> RunPlan:
    """Plan ``config`` on ``world``.

    ``model.pretrained`` must be resolved (plan/pretrained.py), and ``train.epochs`` (plan/train_steps.py).
    This reads no files. A model of transformers without a family is built without memory, to count its
    parameters (plan/hugging_face.py). A run that does not fit in memory, and breaks no other rule, is planned
    with other settings to find a remedy.

    Args:
        trace: of a model without a family, whose activations and FLOPs, and for ``model.target`` parameters,
            are not known otherwise.

    Raises:
        PlanError: with every problem found, errors first.
    """
    draft = draft_plan(config, world, trace)
    problems = _with_nearest_change(draft.problems(), config, world, trace)
    if _has_errors(problems):
        raise PlanError(*problems)
    assert draft.plan is not None, "without an error there is a plan"
    return replace(draft.plan, warnings=tuple(problems))


def _has_errors(problems: Sequence[Problem]) -> bool:
    return any(problem.severity is Severity.ERROR for problem in problems)


def _with_nearest_change(
    problems: Sequence[Problem], config: RunConfig, world: World, trace: ModuleTrace | NotTraced | None
) -> list[Problem]:
    """Replace the remedy of a run that does not fit by overrides with which it does, if there are any."""
    lacking = [problem for problem in problems if problem.rule in (DOES_NOT_FIT, MAY_NOT_FIT)]
    if not lacking or _has_errors([problem for problem in problems if problem not in lacking]):
        return list(problems)

    def fits(changed: RunConfig) -> bool:
        same = changed.train.recomputation == config.train.recomputation
        draft = draft_plan(changed, world, trace if same else None)
        if draft.plan is None or _has_errors(draft.problems()):
            return False
        verdict = judge_memory(draft.plan.memory, world)
        return verdict is not None and verdict.fit is Fit.yes

    overrides = nearest_change(config, world, fits)
    if overrides is None:
        return list(problems)
    return [
        replace(problem, remedy=f"write {overrides}") if problem in lacking else problem
        for problem in problems
    ]


def draft_plan(config: RunConfig, world: World, trace: ModuleTrace | NotTraced | None = None) -> DraftPlan:
    """Plan as :func:`make_plan` does, without the rules.

    Runs that cannot start, such as those that do not fit in memory, are planned too: their time and memory
    explain why another layout is better.
    """
    problems: list[Problem] = []
    config = _with_train_steps(config, problems)
    config, given = _with_known_optimizer(config, problems), config
    family, shape = _shape(config, problems)
    hugging_face_model = _describe_hugging_face_model(config, problems)
    parameters: tuple[ParameterSpec, ...] = ()
    if family is not None and shape is not None:
        parameters = family.parameters(shape)
    elif hugging_face_model is not None:
        parameters = hugging_face_model.parameters
    axes = _axes(config, world, problems)
    batch = _batch(config, axes, problems)
    config, file_problems = accept_file_keys(config, world, batch)
    engine_problems = [*file_problems, *engine_keys.problems(config)]
    usable = engine_keys.drop_wrong_keys(config, engine_problems)
    kernels = choose_kernels(config, world, shape, _tokens(config, batch))
    deepspeed_settings, megatron_settings = _engine_settings(usable, world, axes, batch, shape, parameters)
    traced = trace if isinstance(trace, ModuleTrace) else None
    # Settings and saves are decided without the trace, because the ranks of the run have none.
    stored = parameters or (traced.parameters if traced is not None else ())
    memory = None
    if stored and axes is not None and batch is not None:
        settings = deepspeed_settings if megatron_settings is None else megatron_settings["transformer"]
        memory = plan_memory(usable, shape, stored, axes, batch, world.device, settings, kernels=kernels)
        if traced is not None:
            memory = _with_trace(memory, traced, batch.micro_batch)
        memory = add_device_overhead(memory, usable, world, axes)
    context = RuleContext(
        config=config,
        world=world,
        family=family,
        shape=shape,
        hugging_face_model=hugging_face_model,
        parameters=parameters,
        axes=axes,
        batch=batch,
        memory=memory,
        state_bytes=rank_state_bytes(config, world, parameters),
        kernels=kernels,
        engine_problems=tuple(engine_problems),
    )
    plan = None
    if axes is not None and batch is not None and config.optim is given.optim:
        name = identity(config)
        plan = RunPlan(
            config=config,
            world=world,
            axes=axes,
            identity=name,
            run_dir=config.run.dir or f"runs/{config.run.name}-{name}",
            batch=batch,
            shape=shape,
            parameters=parameters,
            vocab_size=context.vocab_size,
            memory=memory,
            kernels=kernels,
            saves=plan_saves(config, world, context.state_bytes, memory),
            deepspeed=deepspeed_settings,
            megatron=megatron_settings,
            warnings=(),
            trace=trace,
        )
    return DraftPlan(plan=plan, context=context, found=tuple(problems))


def _engine_settings(
    config: RunConfig,
    world: World,
    axes: Axes | None,
    batch: BatchPlan | None,
    shape: ModelShape | None,
    parameters: tuple[ParameterSpec, ...],
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the settings of DeepSpeed and Megatron-core; None for an engine that does not train the run."""
    if batch is not None and config.engine.name is EngineName.deepspeed:
        return deepspeed.build_settings(config, world, batch, _sizes(shape, parameters, axes)), None
    if (
        batch is not None
        and axes is not None
        and shape is not None
        and config.engine.name is EngineName.megatron
    ):
        return None, megatron.build_settings(config, world, axes, shape)
    return None, None


def _tokens(config: RunConfig, batch: BatchPlan | None) -> int | None:
    """Return tokens of a micro-batch on a rank."""
    if batch is None:
        return None
    return batch.micro_batch * config.train.sequence_length // config.parallel.context


def _with_trace(memory: MemoryPlan, trace: ModuleTrace, micro_batch: int) -> MemoryPlan:
    """Return ``memory`` with the activations of ``trace``, which are proportional to the micro-batch.

    The copies of the optimizer's step, which ``memory`` has as temporaries, exist when activations do not.
    """
    saved, peak = (size * micro_batch // trace.micro_batch for size in (trace.saved_bytes, trace.peak_bytes))
    return replace(memory, activations=saved, temporaries=max(peak, memory.temporaries) - saved)


def _with_train_steps(config: RunConfig, problems: list[Problem]) -> RunConfig:
    try:
        return resolve_train_steps(config)
    except PlanError as error:
        problems += error.problems
        # Any length will do to find the other problems.
        train = replace(config.train, tokens=None, epochs=None)
        return resolve_train_steps(replace(config, train=train))


def _sizes(shape: ModelShape | None, parameters: tuple[ParameterSpec, ...], axes: Axes | None) -> list[int]:
    """Return the elements of each parameter on a rank of the largest stage; empty for ``model.target``."""
    if axes is None or not parameters:
        return []
    stages = [[spec.numel for spec in specs] for _, specs in rank_parameters(shape, parameters, axes)]
    return max(stages, key=sum)


def _shape(config: RunConfig, problems: list[Problem]) -> tuple[Family | None, ModelShape | None]:
    model = config.model
    if model.source_key != "model.family":
        return None, None
    if model.family is None:
        problems.append(
            Problem(
                "model.family",
                "model.family is null, and so are model.target, model.pretrained and model.hf.architecture",
                "a model is a family with sizes, a module of your own, pretrained, or one of transformers",
                "write model=llama or another option, model=custom model.target=my.package.Model, or "
                "model=pretrained model.pretrained=FOLDER",
            )
        )
        return None, None
    family = None
    try:
        family = load_family(model.family)
        return family, resolve_shape_of(family, model)
    except (ConfigError, PlanError) as error:
        # The sizes of a pretrained model are fixed, so no other sizes are suggested.
        other = f"write model=huggingface model.pretrained={model.pretrained}, or choose another model"
        problems += [
            problem if model.pretrained is None else replace(problem, remedy=other)
            for problem in error.problems
        ]
        return family, None


def _with_known_optimizer(config: RunConfig, problems: list[Problem]) -> RunConfig:
    """Plan a run of an unknown optimizer with the default one, so that all its problems are found."""
    try:
        get_optimizer(config.optim.name)
    except PlanError as error:
        problems += error.problems
        return replace(config, optim=replace(config.optim, name=OptimConfig().name))
    return config


def _describe_hugging_face_model(config: RunConfig, problems: list[Problem]) -> HuggingFaceModel | None:
    if config.model.source_key != "model.hf.architecture":
        return None
    try:
        return describe(config.model)
    except PlanError as error:
        problems += error.problems
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
                "the number of ranks must be divisible by tensor x pipeline x context; the quotient is the "
                "number of data ranks",
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
