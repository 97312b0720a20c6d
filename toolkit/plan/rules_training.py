"""Rules about data, optimizer, schedule, evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.checkpoint import Cadence, parse_cadence
from toolkit.config.cluster import ClusterBackend
from toolkit.config.data import DocumentMasking
from toolkit.config.kernels import LossKernel
from toolkit.config.mixture import EXAMPLE
from toolkit.config.monitor import OnWrongComputation
from toolkit.config.optim import LrScaling, ScheduleConfig, ScheduleName
from toolkit.errors import Problem
from toolkit.plan.kernels import megatron_logits_key
from toolkit.plan.rule_context import Rule, RuleContext, make_error, make_warning
from toolkit.plan.schedule import peak_rate


def mixture_has_sources(ctx: RuleContext) -> Iterator[Problem]:
    data, steps = ctx.config.data, ctx.config.train.steps
    if data.name != "mixture" and (data.sources or data.phases):
        yield Problem(
            "data.sources",
            f"data.name={data.name} with data.sources or data.phases",
            "sources and phases belong to a mixture",
            "write data=mixture, or leave them out",
        )
    elif data.name == "mixture" and not data.sources:
        yield Problem(
            "data.sources",
            "data.name=mixture without data.sources",
            "a mixture must have sources",
            f"write '{EXAMPLE}' and the others in the same way",
        )
    past = [phase["from_step"] for phase in data.phases if phase["from_step"] >= steps]
    if past:
        yield Problem(
            "data.phases",
            f"data.phases from step {past[0]} on, train.steps={steps}",
            "every phase must begin before the run ends",
            f"write train.steps={past[0] + 1} or more, or leave out that phase",
        )


def fused_loss_fits(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    if config.train.loss_kernel is not LossKernel.fused:
        return
    if config.model.target is not None:
        yield make_error(
            config,
            "train.loss_kernel model.target",
            "a module of your own computes its loss itself, or returns the logits to your task",
            "write train.loss_kernel=auto",
        )
    elif config.data.is_arrays:
        yield make_error(
            config,
            "train.loss_kernel data.name",
            "the fused loss is the cross-entropy of the next token",
            "write train.loss_kernel=auto",
        )
    elif (key := megatron_logits_key(config)) is not None:
        yield make_error(
            config,
            f"train.loss_kernel engine.megatron.{key}",
            "the setting of Megatron-core is for the logits of the whole micro-batch, which the fused loss "
            "does not compute",
            f"leave out engine.megatron.{key}, or write train.loss_kernel=auto",
        )


def learning_rate_scaling(ctx: RuleContext) -> Iterator[Problem]:
    optim = ctx.config.optim
    if optim.lr_scaling is not LrScaling.none and optim.lr_reference_batch is None:
        yield make_error(
            ctx.config,
            "optim.lr_reference_batch optim.lr_scaling",
            "scaling needs the global batch for which optim.lr was chosen",
            f"write optim.lr_reference_batch={ctx.config.train.global_batch}, or optim.lr_scaling=none",
        )
    elif optim.lr_reference_batch is not None and optim.lr_reference_batch < 1:
        yield make_error(
            ctx.config,
            "optim.lr_reference_batch",
            "a batch has at least one sequence",
            "write optim.lr_reference_batch=256",
        )
    elif optim.lr_scaling is LrScaling.none and optim.lr_reference_batch is not None:
        yield make_warning(
            ctx.config,
            "optim.lr_reference_batch optim.lr_scaling",
            "the reference batch is used with lr_scaling only",
            "write optim.lr_scaling=linear or sqrt, or leave it out",
        )


def schedule_fits_the_run(ctx: RuleContext) -> Iterator[Problem]:
    config, schedule, steps = ctx.config, ctx.config.schedule, ctx.config.train.steps
    if schedule.name is ScheduleName.custom or schedule.target is not None or schedule.arguments:
        yield from _custom_schedule(ctx)
        return
    if schedule.name is ScheduleName.wsd and schedule.decay is None:
        yield make_error(
            config,
            "schedule.decay schedule.name",
            "wsd is constant until its last schedule.decay steps, so it needs their number",
            f"write schedule.decay={max(1, steps // 10)}, a tenth of the run",
        )
        return
    if schedule.name is ScheduleName.constant and schedule.decay is not None:
        yield make_warning(
            config,
            "schedule.decay schedule.name",
            "a constant schedule does not decay",
            "write schedule.name=linear, or leave out schedule.decay",
        )
    ends = schedule.warmup_steps + (schedule.decay or 0)
    if schedule.name is ScheduleName.wsd and ends > steps:
        yield make_error(
            config,
            "schedule.decay schedule.warmup train.steps",
            "warm-up and decay of wsd do not overlap: warmup + decay <= steps",
            f"write schedule.decay={max(1, steps - schedule.warmup_steps)}, or train.steps={ends}",
        )
    elif schedule.warmup_steps and schedule.warmup_steps >= steps:
        # A decay may be longer, because the run can be extended later.
        yield make_warning(
            config,
            "train.steps schedule.warmup",
            "the run ends during warm-up and never reaches the peak learning rate",
            f"write train.steps={schedule.warmup_steps + 1} or more, or a shorter schedule.warmup",
        )


def _custom_schedule(ctx: RuleContext) -> Iterator[Problem]:
    """The function decides the whole curve, so other settings would have no effect."""
    config, schedule = ctx.config, ctx.config.schedule
    if schedule.target is None:
        yield make_error(
            config,
            "schedule.target schedule.name",
            "schedule=custom and schedule.arguments belong to your own function",
            "write schedule=custom schedule.target=my.package.factor, or schedule=cosine without "
            "schedule.arguments",
        )
    elif schedule.name is not ScheduleName.custom:
        yield make_error(
            config,
            "schedule.target schedule.name",
            "a schedule has one source",
            f"write schedule=custom schedule.target={schedule.target}, or leave schedule.target out",
        )
    others = {"warmup": "0", "decay": "null", "min_lr": "0.0"}
    given = [key for key in others if getattr(schedule, key) != getattr(ScheduleConfig(), key)]
    if given and schedule.name is ScheduleName.custom:
        yield make_error(
            config,
            " ".join([*(f"schedule.{key}" for key in given), "schedule.name"]),
            "schedule.target computes the whole curve, with warm-up and decay",
            f"write {' '.join(f'schedule.{key}={others[key]}' for key in given)}, and "
            f"+schedule.arguments.NAME=VALUE for arguments of your function",
        )


def rates_are_ordered(ctx: RuleContext) -> Iterator[Problem]:
    top, low = peak_rate(ctx.config.optim, ctx.config.train.global_batch), ctx.config.schedule.min_lr
    if low > top:
        yield make_error(
            ctx.config,
            "schedule.min_lr optim.lr",
            f"the learning rate decays from the peak ({top:g}) to schedule.min_lr",
            f"write schedule.min_lr={top / 10:g}",
        )


def evaluation_has_sets(ctx: RuleContext) -> Iterator[Problem]:
    evaluation = ctx.config.eval
    if evaluation.every and not evaluation.sets:
        yield make_error(
            ctx.config,
            "eval.sets eval.every",
            "an evaluation needs at least one set",
            "write eval.sets=[validation], or eval.every=0",
        )
    if len(set(evaluation.sets)) != len(evaluation.sets):
        yield make_error(ctx.config, "eval.sets", "each set is evaluated once", "write each name once")


def tracked_metrics_are_evaluated(ctx: RuleContext) -> Iterator[Problem]:
    """Early stopping and the best checkpoints read a metric of an evaluation set."""
    config = ctx.config
    for key, metric in (
        ("train.early_stopping.metric", config.train.early_stopping.metric),
        ("checkpoint.keep_best.metric", config.checkpoint.keep_best.metric),
    ):
        if metric is None:
            continue
        name, _, column = metric.rpartition("/")
        if not config.eval.every:
            yield make_error(
                config,
                f"{key} eval.every",
                "a tracked metric is measured by evaluations",
                "write eval.every=100",
            )
        elif name not in config.eval.sets or not column:
            sets = [f"{each}/{column or 'loss'}" for each in config.eval.sets]
            yield make_error(
                config,
                f"{key} eval.sets",
                "a metric is SET/NAME, with a set of eval.sets",
                f"write {key}={sets[0] if sets else 'validation/loss'}",
            )


def checkpoints_are_written(ctx: RuleContext) -> Iterator[Problem]:
    checkpoint = ctx.config.checkpoint
    cadence = parse_cadence(checkpoint.every)
    if cadence.never and not checkpoint.at_end:
        yield make_warning(
            ctx.config,
            "checkpoint.every checkpoint.at_end",
            "nothing of this run is saved, unless it is stopped by a signal",
            "write checkpoint.at_end=true",
        )
    if cadence.steps is not None and checkpoint.keep_every % cadence.steps:
        yield make_warning(
            ctx.config,
            "checkpoint.keep_every checkpoint.every",
            "only written checkpoints can be kept, so keep_every is a multiple of every",
            f"write checkpoint.keep_every={-(-checkpoint.keep_every // cadence.steps) * cadence.steps}",
        )


def rollbacks_are_possible(ctx: RuleContext) -> Iterator[Problem]:
    """A rollback needs an earlier checkpoint, and a source that can skip samples by their positions."""
    config, asked = ctx.config, ctx.config.train.rollback_keys
    if not asked:
        return
    names, without = " ".join(asked), " ".join(asked.values())
    if parse_cadence(config.checkpoint.every) == Cadence():
        yield make_error(
            config,
            f"checkpoint.every {names}",
            "a rollback goes back to a checkpoint that the run saved before",
            f"write checkpoint.every=500, or {without}",
        )
    if config.data.name == "dataset":
        yield make_error(
            config,
            f"{names} data.name",
            "a rollback skips samples by their positions, and data=dataset packs documents one after another",
            f"write {without}",
        )


def faulty_nodes_can_leave(ctx: RuleContext) -> Iterator[Problem]:
    """Whether a run can find a faulty node, and continue without it from a checkpoint before the fault."""
    config, key, nodes = ctx.config, "monitor.on_wrong_computation", ctx.config.cluster.nodes or 1
    if config.monitor.on_wrong_computation is not OnWrongComputation.leave:
        return
    stop = f"{key}=stop"
    if not config.monitor.computation_every:
        yield make_error(
            config,
            f"{key} monitor.computation_every",
            "only a check of the computation finds a node that computes wrong values",
            f"write monitor.computation_every=1000, or {key}=alert",
        )
    if parse_cadence(config.checkpoint.every) == Cadence():
        yield make_error(
            config,
            f"{key} checkpoint.every",
            "the run continues from a checkpoint that it saved before the fault",
            f"write checkpoint.every=500, or {stop}",
        )
    if config.checkpoint.url is not None:
        yield make_error(
            config,
            f"{key} checkpoint.url",
            "a start prefers a later checkpoint of the store, which may be from after the fault",
            f"write {stop}, or leave out checkpoint.url",
        )
    if config.cluster.where is ClusterBackend.kubernetes:
        yield make_error(
            config,
            f"{key} cluster.where",
            "Kubernetes replaces a pod that leaves, and may start the new one on the faulty node",
            f"write {stop}",
        )
    elif config.cluster.where is ClusterBackend.slurm and config.cluster.min_nodes is None:
        yield make_error(
            config,
            f"{key} cluster.min_nodes",
            "a node can leave a job only if the job may have fewer nodes",
            f"write cluster.min_nodes={nodes - 1}, or {stop}" if nodes > 1 else f"write {stop}",
        )


def fork_excludes_resume(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    if config.run.fork is not None and config.resume not in ("auto", "never"):
        yield make_error(
            config,
            "run.fork resume",
            "a run starts either from another run's state or from a checkpoint of its own",
            "leave out run.fork to resume, or resume to fork",
        )


def only_text_has_documents(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.config.data.documents is DocumentMasking.separate and ctx.config.data.is_arrays:
        yield make_error(
            ctx.config, "data.documents data.name", "only text has documents", "leave out data.documents"
        )


RULES: tuple[Rule, ...] = (
    learning_rate_scaling,
    schedule_fits_the_run,
    rates_are_ordered,
    evaluation_has_sets,
    tracked_metrics_are_evaluated,
    checkpoints_are_written,
    rollbacks_are_possible,
    faulty_nodes_can_leave,
    fork_excludes_resume,
    mixture_has_sources,
    only_text_has_documents,
    fused_loss_fits,
)
