"""Build what one rank trains with: the task, the hooks, and the exchange with the other ranks after each
step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint.remote.upload import UploadSettings
from toolkit.checkpoint_folder import committed_checkpoints, newest_checkpoint
from toolkit.config.checkpoint import parse_cadence
from toolkit.config.data import DocumentMasking
from toolkit.data.registry import RunData
from toolkit.engine.protocol import Engine, StepResult
from toolkit.engine.rank_sync import StepConsensus, reach_consensus
from toolkit.estimate.plan_report import kernel_choices
from toolkit.hooks import Hooks, SaveObserver
from toolkit.monitor.loss_plot import plot_loss
from toolkit.monitor.sink import Sink
from toolkit.monitor.throughput import RunTimer, TimeSpent, time_spent
from toolkit.observe.context import RankContext
from toolkit.observe.goodput_tracker import GoodputTracker
from toolkit.observe.monitoring import RunMonitor
from toolkit.observe.progress_hooks import DataProgressLogger, MetricsLogger, PlotWriter, StatusWriter
from toolkit.plan.flops import why_no_utilisation
from toolkit.plan.types import Device, RunPlan
from toolkit.restart_phases import RestartPhases
from toolkit.rows import last_row, read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.usage import read_usage
from toolkit.train.auto_interval import AutoInterval, ChosenInterval
from toolkit.train.budget import BudgetWatch
from toolkit.train.computation_check import ComputationCheck
from toolkit.train.evaluation import Evaluation
from toolkit.train.memory_snapshots import MemorySnapshots
from toolkit.train.metric_tracking import BestCheckpoints, EarlyStopping
from toolkit.train.metrics import EvaluationMetrics
from toolkit.train.nonfinite import finite_on_all_ranks
from toolkit.train.rank_exchange import RankExchange
from toolkit.train.rollback import Rollback
from toolkit.train.save_deadline import SaveDeadline
from toolkit.train.saving import Checkpoints, SaveTimer
from toolkit.train.soundness import Soundness
from toolkit.train.state import StateWriter, TrainState
from toolkit.train.task import NextTokenTask, Task, TextTask, configure_text_task, text_task
from toolkit.train.uploads import CheckpointUploads, OpenedStore
from toolkit.train.user_hooks import EndRequest, build_user_hooks
from toolkit.train.user_task import checked_task
from toolkit.train.vision import vision_task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Training:
    """One rank's training.

    Attributes:
        stop, seconds_left: as in :func:`toolkit.train.run.run`.
        end: a hook's request to end the run early.
        rollbacks: those of the run so far.
        store: the store of ``checkpoint.url``; None without one.
    """

    context: RankContext
    data: RunData
    sink: Sink
    monitor: RunMonitor
    engine: Engine
    task: Task
    metrics: EvaluationMetrics | None
    state: TrainState
    stop: Callable[[], str | None]
    seconds_left: Callable[[], float | None]
    end: EndRequest
    rollbacks: list[Rollback]
    store: OpenedStore | None


@dataclass(frozen=True, slots=True)
class TrainingHooks:
    """All hooks in call order, and those that are also used outside of the loop.

    Attributes:
        goodput, status: None except on rank 0.
        budget: None except on rank 0 of a run with a budget.
        snapshots: None if no snapshots in memory are taken.
    """

    all: Hooks
    run_timer: RunTimer
    checkpoints: Checkpoints
    save_timer: SaveTimer
    deadline: SaveDeadline
    goodput: GoodputTracker | None
    status: StatusWriter | None
    budget: BudgetWatch | None
    snapshots: MemorySnapshots | None


def build_task(
    plan: RunPlan, data: RunData, user_task: Task | None, metrics: EvaluationMetrics | None
) -> Task:
    """Return the user's task, or that of the model and the data, as engines and the loop call it."""
    task = user_task or _default_task(plan, data)
    if isinstance(task, TextTask):
        separate = plan.config.data.documents is DocumentMasking.separate
        configure_text_task(task, plan, data.end_of_text if separate else None)
    if isinstance(task, NextTokenTask):
        task.predicts = metrics is not None or type(task).evaluate is not NextTokenTask.evaluate
    return checked_task(task, plan.config, metrics)


def _default_task(plan: RunPlan, data: RunData) -> Task:
    return text_task(plan) if data.records is None else vision_task(plan, data.records)


def build_hooks(
    training: Training,
    started: float,
    *,
    snapshot_folder: Path | None = None,
    exchange: RankExchange | None = None,
    restart: RestartPhases | None = None,
) -> TrainingHooks:
    """Build the hooks in the order in which the loop calls them.

    Args:
        started: ``time.monotonic()`` when the run started.
        snapshot_folder: this node's folder of snapshots in memory; None: none are taken.
        exchange: for the snapshots; None without them.
        restart: the phases of the restart that started this attempt.
    """
    context, monitor, data = training.context, training.monitor, training.data
    plan, directory, rank, attempt = context.plan, context.directory, context.rank, context.attempt
    earlier = directory.attempt_times(before=attempt)
    deadline = SaveDeadline(plan, (save for each in earlier for save in each.saves))
    save_timer = SaveTimer(parse_cadence(plan.config.checkpoint.every).seconds)
    goodput = (
        GoodputTracker(directory.attempt_folder(attempt), earlier, restart=restart) if rank == 0 else None
    )
    observers: list[SaveObserver] = [deadline] if goodput is None else [goodput, deadline]
    if goodput is not None and parse_cadence(plan.config.checkpoint.every).auto:
        observers.append(_build_auto_interval(training, save_timer, goodput))
    run_timer = RunTimer(plan, read_earlier_time(directory) if rank == 0 else TimeSpent(), started)

    hooks = Hooks(
        MetricsLogger(plan, monitor.sink, data.stream.consumed, run_timer),
        *monitor.build_hooks(training.engine),
        recorder=monitor.recorder,
    )
    if goodput is not None:
        hooks.add(goodput)
    uploads = build_uploads(training)
    budget = None
    if goodput is not None and plan.config.budget.is_set:
        budget = _build_budget(training, deadline, goodput, uploads)
        hooks.add(budget)
        observers.append(budget)
    for name, hook in build_user_hooks(
        context, monitor.sink, training.end, lambda: training.state.step, monitor.hangs.enter
    ).items():
        hooks.add(hook, name)
    if plan.config.train.early_stopping.metric is not None:
        hooks.add(
            EarlyStopping(plan.config.train.early_stopping, training.end.request), "train.early_stopping"
        )
    best = None
    if plan.config.checkpoint.keep_best.metric is not None:
        best = BestCheckpoints(plan.config.checkpoint.keep_best, partial(existing_steps, training))
        hooks.add(best, "checkpoint.keep_best")
    computation = None
    if plan.config.monitor.computation_every:
        computation = ComputationCheck(context, training.engine, training.task, monitor.alert)
        hooks.add(computation, "monitor.computation_every")
    soundness = Soundness(plan.config.train)
    hooks.add(soundness, "train.soundness")
    hooks.add(_build_evaluation(training, hooks))

    def checkpoints_in_use() -> list[int]:
        uploading = uploads.uploader.steps_in_use() if uploads is not None else ()
        return [*uploading, *(computation.confirmed_checkpoints() if computation is not None else ())]

    store = CheckpointStore(
        directory.checkpoints,
        plan.config.checkpoint.keep_last,
        plan.config.checkpoint.keep_every,
        staging_bytes=plan.saves.staging_bytes,
        in_use=checkpoints_in_use,
    )
    writer = StateWriter(context, training.engine, data.stream, training.sink.flush, hooks.state_dict)
    checkpoints = Checkpoints(
        writer,
        store,
        save_timer,
        on_checkpoint=hooks.on_checkpoint,
        observers=observers,
        sound=soundness.judge_save,
        best=best,
    )
    hooks.add(checkpoints)
    snapshots = None
    if snapshot_folder is not None and exchange is not None:
        on_blocked = (lambda seconds: None) if goodput is None else goodput.on_save_blocked
        snapshots = MemorySnapshots(writer, snapshot_folder, exchange, on_blocked=on_blocked)
        hooks.add(snapshots)
    if uploads is not None:
        hooks.add(uploads)  # after the hook that saves, so that the last checkpoint is uploaded too
    status = _add_progress_hooks(training, hooks, goodput) if goodput is not None else None
    return TrainingHooks(
        hooks, run_timer, checkpoints, save_timer, deadline, goodput, status, budget, snapshots
    )


def _add_progress_hooks(training: Training, hooks: Hooks, goodput: GoodputTracker) -> StatusWriter:
    """Add the hooks that report progress, which come last."""
    context, data = training.context, training.data
    directory, newest = context.directory, newest_checkpoint(context.directory.checkpoints)
    status = StatusWriter(directory, context.attempt, newest, goodput=goodput.status)
    hooks.add(status)
    if len(data.stream.consumed(0)) > 1:
        hooks.add(DataProgressLogger(data.stream.consumed))

    def draw() -> None:
        training.sink.flush()
        plot_loss(directory.path, data.unigram(), context.plan.loss_unit)

    hooks.add(PlotWriter(draw))
    return status


def _build_auto_interval(training: Training, timer: SaveTimer, goodput: GoodputTracker) -> AutoInterval:
    plan, directory, late = training.context.plan, training.context.directory, training.monitor.late

    def apply(chosen: ChosenInterval) -> None:
        timer.seconds = chosen.seconds
        pause = chosen.costs.save if chosen.measured else None
        goodput.set_interval(chosen.seconds, pause, chosen.costs.between_failures)
        if late is not None:
            # A checkpoint is complete one save after it is due; in the foreground the timer waits for that.
            late.set_interval(chosen.seconds + (0.0 if plan.saves.background else chosen.costs.save))

    usage = read_usage(directory, before=training.context.attempt)
    return AutoInterval(plan, usage, began=goodput.began, apply=apply)


def _build_budget(
    training: Training, deadline: SaveDeadline, goodput: GoodputTracker, uploads: CheckpointUploads | None
) -> BudgetWatch:
    directory = training.context.directory
    evaluations = {row["set"]: row["seconds"] for row in read_rows(directory.eval_file)}

    def save_seconds() -> float | None:
        estimate = deadline.estimate()
        return None if estimate is None else estimate.seconds

    return BudgetWatch(
        training.context.plan,
        read_usage(directory, before=training.context.attempt),
        began=goodput.began,
        save_seconds=save_seconds,
        upload_seconds=lambda: 0.0 if uploads is None else uploads.uploader.upload_seconds,
        evaluation_seconds=sum(evaluations.values()) if evaluations else None,
    )


def build_uploads(training: Training) -> CheckpointUploads | None:
    """Return the hook that uploads checkpoints, if there is a store, with its thread running.

    A checkpoint that an earlier attempt saved and did not upload is sent first.
    """
    context, store = training.context, training.store
    if store is None:
        return None
    checkpoint, folder = context.plan.config.checkpoint, context.directory.checkpoints
    settings = UploadSettings(
        checkpoints=folder,
        folder=context.directory.uploads,
        rank=context.rank,
        ranks=context.ranks,
        attempt=context.attempt,
        keep_last=checkpoint.keep_last,
        keep_every=checkpoint.keep_every,
    )
    uploads = CheckpointUploads(
        store,
        settings,
        training.monitor.alert,
        training.seconds_left,
        only_sound=bool(context.plan.config.train.rollback_keys),
    )
    newest = newest_checkpoint(folder)
    if isinstance(newest, Path) and newest.parent == folder:
        uploads.on_checkpoint(newest)
    return uploads


def existing_steps(training: Training, steps: Collection[int]) -> list[int]:
    """Return those of ``steps`` with a checkpoint that every rank sees, or in the store. Collective."""
    context = training.context
    committed = {*committed_checkpoints(context.directory.checkpoints)}
    if training.store is not None:
        committed.update(training.store.steps)
    ordered = sorted(steps)
    absent = context.all_reduce_flags([step not in committed for step in ordered]) if ordered else []
    return [step for step, missing in zip(ordered, absent, strict=True) if not missing]


def _build_evaluation(training: Training, hooks: Hooks) -> Evaluation:
    context = training.context

    def missing(step: int) -> bool:
        training.sink.flush()
        rows = read_rows(context.directory.eval_file)
        absent = context.rank == 0 and all(row["step"] != step for row in rows)
        return bool(context.all_reduce_flags([absent])[0])

    return Evaluation(
        context.plan,
        training.engine,
        training.task,
        {name: eval_set.batches for name, eval_set in training.data.sets.items()},
        metrics=training.metrics,
        missing=missing,
        on_eval=hooks.on_eval,
        on_batch=training.monitor.hangs.beat,
    )


def make_step_sync(training: Training, hooks: TrainingHooks) -> Callable[[float, StepResult], StepConsensus]:
    """Return the exchange that all ranks make after each step."""
    context, monitor, engine = training.context, training.monitor, training.engine

    def sync(data_seconds: float, result: StepResult) -> StepConsensus:
        process = monitor.process_stats.sample(engine.device)
        own = StepConsensus(
            stop=training.stop() is not None,
            end_early=training.end.reason is not None,
            too_late_to_save=hooks.deadline.too_late(training.seconds_left()),
            budget_spent=hooks.budget is not None and hooks.budget.spent(training.state.step),
            save_due=context.rank == 0 and hooks.save_timer.due(),
            nonfinite=result.nonfinite,
            data_seconds=data_seconds,
            ledger_steps=monitor.ledger_steps_due(),
            gc_seconds=process.gc_seconds,
            host_bytes=process.host_bytes,
            device_bytes=process.device_bytes,
            device_peak_bytes=process.device_peak_bytes,
        )
        consensus = reach_consensus(own, context.all_reduce_flags)
        if not consensus.nonfinite:
            return consensus
        finite = finite_on_all_ranks(engine.shards(), context.all_reduce_flags)
        return replace(consensus, nonfinite_state=not finite)

    return sync


def log_setup(plan: RunPlan, data: RunData) -> None:
    """Log the chosen implementations, what separate documents cost, and why no MFU is shown. On rank 0."""
    for title, choice in kernel_choices(plan):
        log.info(f"{title}: {choice.name} ({choice.reason})")
    if plan.config.data.documents is not DocumentMasking.joined:
        for name, cost in data.waste().items():
            log.info(f"documents of {name} are separate: {cost} (in a sample of {cost.tokens:,} tokens)")
    reason = why_no_utilisation(plan)
    if reason is not None and plan.world.device is Device.CUDA:
        log.info(f"the model FLOPs utilization (MFU) is not shown: {reason}")


def read_earlier_time(directory: RunDirectory) -> TimeSpent:
    """Return what earlier attempts spent, according to their last rows, including repeated steps."""
    files = [
        directory.metrics_file,
        *(directory.attempt_folder(number) / directory.metrics_file.name for number in directory.attempts()),
    ]
    return time_spent(row for file in files if (row := last_row(file)) is not None)
