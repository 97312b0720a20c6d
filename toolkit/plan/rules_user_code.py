"""Rules about objects of the user's own code: task, dataset, hooks, metrics and sinks."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.user_objects import object_problems
from toolkit.errors import Problem
from toolkit.plan.rule_context import Rule, RuleContext, make_error


def custom_data_has_a_dataset(ctx: RuleContext) -> Iterator[Problem]:
    data = ctx.config.data
    if data.is_custom:
        if data.target is None:
            yield make_error(
                ctx.config,
                "data.target data.name",
                "data=custom reads a dataset of your own code",
                "write data.target=my.package.Dataset, or data=stdlib",
            )
        if ctx.config.task.target is None and ctx.config.model.target is None:
            yield make_error(
                ctx.config,
                "task.target data.name",
                "a task collates the samples of your dataset, unless your module computes its loss from them",
                "write task.target=my.package.Task, or model=custom model.target=my.package.Model",
            )
        return
    for key in ("target", "arguments", "workers"):
        if value := getattr(data, key):
            yield Problem(
                f"data.{key}",
                f"data.{key}={', '.join(value) if isinstance(value, dict) else value}, data.name={data.name}",
                "data.target, data.arguments and data.workers belong to data=custom",
                f"write data=custom data.target={data.target or 'my.package.Dataset'}, or leave out "
                f"data.{key}",
            )


def objects_by_name_are_complete(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    for section, objects in (
        ("hooks", config.hooks),
        ("metrics", config.metrics),
        ("monitor.sinks", config.monitor.sinks),
    ):
        yield from object_problems(section, objects, ctx.world.ranks)


# Columns of an evaluation's row that metrics cannot have.
EVALUATION_COLUMNS = ("step", "set", "loss", "seconds", "samples", "tokens", "images")


def task_has_a_class(ctx: RuleContext) -> Iterator[Problem]:
    task = ctx.config.task
    if task.target is None and task.arguments:
        yield Problem(
            "task.arguments",
            f"task.arguments has {', '.join(task.arguments)}",
            "arguments belong to task.target",
            "write task.target=my.package.Task, or leave task.arguments out",
        )


def metrics_are_evaluated(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    for name in config.metrics:
        if name in EVALUATION_COLUMNS:
            yield Problem(
                f"metrics.{name}",
                f"metrics.{name} is the name of a metric",
                f"{', '.join(EVALUATION_COLUMNS)} are other columns of an evaluation",
                f"write +metrics.my_{name}.target=my.package.Metric",
            )
    if not config.metrics:
        return
    if not config.eval.every:
        yield make_error(config, "eval.every", "metrics are computed in evaluations", "write eval.every=100")
    if ctx.megatron:
        yield Problem(
            "engine.name",
            f"engine.name=megatron, metrics {', '.join(config.metrics)}",
            "Megatron-core returns losses, and metrics need the output of the model",
            "write engine=deepspeed zero=stage3, or leave +metrics out",
        )
        return
    for axis in ("pipeline", "context"):
        if (size := getattr(config.parallel, axis)) > 1:
            yield Problem(
                f"parallel.{axis}",
                f"parallel.{axis}={size}, metrics {', '.join(config.metrics)}",
                "metrics need the whole output of the model on each rank",
                f"write parallel.{axis}=1 zero=stage3, or leave +metrics out",
            )


RULES: tuple[Rule, ...] = (
    custom_data_has_a_dataset,
    objects_by_name_are_complete,
    task_has_a_class,
    metrics_are_evaluated,
)
