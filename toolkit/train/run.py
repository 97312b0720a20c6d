"""Run one rank of a training, from its plan to its exit code."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from toolkit.data.registry import RunData, open_data
from toolkit.engine.build import build_engine
from toolkit.engine.protocol import rank_device
from toolkit.engine.rank_sync import check_same_data, make_data_gather, make_flag_reduce
from toolkit.errors import ExitCode
from toolkit.observe.context import RankContext
from toolkit.observe.monitoring import monitor_run
from toolkit.observe.sinks import close_with_exit_code, open_sinks
from toolkit.plan.types import RunPlan
from toolkit.restart_phases import RestartPhase, RestartPhases
from toolkit.rundir.directory import RunDirectory
from toolkit.train.build import Training, TrainingHooks, build_hooks, build_task, log_setup, make_step_sync
from toolkit.train.computation_check import WrongComputation
from toolkit.train.departure import ElasticNodes, leave_faulty_nodes
from toolkit.train.finalize import TrainingOutcome, finish
from toolkit.train.loop import train
from toolkit.train.micro_batches import prefetches
from toolkit.train.nonfinite import Diverged
from toolkit.train.process_setup import freeze_gc, seed_everything
from toolkit.train.rank_exchange import open_exchange
from toolkit.train.resume import (
    earlier_rollbacks,
    find_resume_point,
    restore_hooks,
    restore_stream,
    set_aside_later_checkpoints,
)
from toolkit.train.rollback import roll_back
from toolkit.train.snapshot_restore import find_snapshot
from toolkit.train.uploads import open_checkpoint_store
from toolkit.train.user_hooks import EndRequest
from toolkit.train.user_task import build_metrics, build_user_task, describe_task

log = logging.getLogger(__name__)


def run(
    plan: RunPlan,
    *,
    rank: int,
    local_rank: int,
    stop: Callable[[], str | None],
    attempt: int,
    data: str | None = None,
    launcher: str | None = None,
    seconds_left: Callable[[], float | None] = lambda: None,
    snapshot_folder: Path | None = None,
    restart: RestartPhases | None = None,
    elastic: ElasticNodes | None = None,
) -> ExitCode:
    """Train on this rank. With several ranks the process group is initialized before.

    Args:
        stop: returns the reason to stop once there is one.
        attempt: the number that ``RunDirectory.begin`` gave this start.
        data: folder of the generation of data to read, because ``data.path`` may change while the run is
            under way. None: the current generation.
        launcher: name of what started the ranks, for the record.
        seconds_left: returns the time until this rank is killed after it was asked to stop; None if it was
            not asked, or will not be killed.
        snapshot_folder: this node's folder of snapshots in memory, which this attempt may continue from and
            writes to. None: this node has none, and then none are used on any node.
        restart: the phases of the restart that started this attempt, for the record.
        elastic: how nodes can leave the run; None: their number is fixed.

    Returns:
        DONE after the last step. STOPPED if the ranks agreed to stop; then the state is saved, unless there
        is no time for it and ``status.json`` describes what is lost. STOPPED also if a faulty node leaves the
        run, and then nothing is saved. DIVERGED if a loss, gradient or weight is not finite, rollbacks do not
        help, or ranks compute different values, with the reason in ``status.json``. The caller writes every
        other end there.

    Raises:
        UserError: the data, the checkpoint or the model do not fit the configuration.
    """
    started = time.monotonic()
    directory = RunDirectory(plan.run_dir)
    with ExitStack() as stack:
        seed_everything(plan)
        all_reduce_flags = make_flag_reduce(plan.world.ranks)
        store = open_checkpoint_store(plan, directory, rank, attempt)
        stored = store.newest if store is not None else None
        exchange = snapshot = None
        if plan.config.checkpoint.memory_every and not all_reduce_flags([snapshot_folder is None])[0]:
            assert snapshot_folder is not None
            exchange = open_exchange(rank, plan.world.ranks, plan.world.ranks_per_node)
            snapshot = find_snapshot(plan, directory, snapshot_folder, exchange, stored)
        resume_point = find_resume_point(plan, directory, stored, snapshot)
        user_task = build_user_task(plan.config)
        plan = describe_task(replace(plan, batch=resume_point.batch), user_task)
        state = resume_point.state
        context = RankContext(
            plan=plan, directory=directory, rank=rank, attempt=attempt, all_reduce_flags=all_reduce_flags
        )
        coordinate = plan.axes.coordinates(rank).data
        run_data = open_data(plan.config, plan.batch, coordinate, data or plan.config.data.path)
        stack.callback(run_data.stream.close)
        fingerprint = fingerprint_data(context, run_data)
        rollbacks = earlier_rollbacks(directory, resume_point)
        restore_stream(resume_point, run_data.stream, rollbacks)
        if rank == 0:
            directory.move_rows_after(state.step, attempt)
            if not resume_point.continues:
                directory.move_rollbacks(attempt)
            log.info(resume_point.description)

        sink = open_sinks(context, state.step, data=fingerprint, launcher=launcher)
        set_exit_code = stack.enter_context(close_with_exit_code(sink))
        metrics = build_metrics(
            plan.config, rank_device(plan.world.device, local_rank), make_data_gather(plan.axes)
        )
        task = build_task(plan, run_data, user_task, metrics)
        monitor = stack.enter_context(monitor_run(context, sink))
        engine = build_engine(plan, task, rank=rank, local_rank=local_rank, recorder=monitor.recorder)
        monitor.hangs.beat("building the engine")
        restart = restart.ended(RestartPhase.BUILD) if restart is not None else None
        if snapshot is not None:
            snapshot.fetch(engine.load)
        engine.load(resume_point.reader)
        restart = restart.ended(RestartPhase.LOAD) if restart is not None else None
        if rank == 0:
            set_aside_later_checkpoints(plan, directory, resume_point, attempt)
            log_setup(plan, run_data)

        training = Training(
            context,
            run_data,
            sink,
            monitor,
            engine,
            task,
            metrics,
            state,
            stop,
            seconds_left,
            EndRequest(),
            rollbacks,
            store,
        )
        hooks = build_hooks(
            training, started, snapshot_folder=snapshot_folder, exchange=exchange, restart=restart
        )
        restore_hooks(resume_point, hooks.all, rank=rank)
        outcome = fit(training, hooks)
        if isinstance(outcome.diverged, WrongComputation):
            departure = leave_faulty_nodes(training, hooks, outcome.diverged, elastic)
            if departure is not None:
                outcome = TrainingOutcome(ExitCode.STOPPED, departure=departure)
        set_exit_code(outcome.code)
        try:
            finish(training, hooks, outcome)
        finally:
            all_reduce_flags([0])  # wait for rank 0, which may need what another rank's exit tears down
        return outcome.code


def fingerprint_data(context: RankContext, data: RunData) -> dict[str, str | int]:
    """Return the fingerprints of the training and evaluation data. Collective.

    Raises:
        InputError: a rank reads other data than rank 0.
    """
    evaluation = {f"eval.sets {name}": eval_set.data_hash for name, eval_set in data.sets.items()}
    fingerprint = {**data.stream.fingerprint(), **evaluation}
    check_same_data(fingerprint, context.ranks)
    return fingerprint


def fit(training: Training, hooks: TrainingHooks) -> TrainingOutcome:
    """Run the loop with existing objects frozen, then close the engine."""
    engine, state, monitor = training.engine, training.state, training.monitor
    with freeze_gc():  # not while closing the engine, whose reference cycles only the collector frees
        monitor.process_stats.sample(engine.device)  # discard what was collected before the first step
        try:
            code = train(
                training.context.plan,
                engine,
                training.task,
                training.data.stream.steps(state.step),
                state,
                hooks.all,
                make_step_sync(training, hooks),
                data_rank=training.context.plan.axes.coordinates(training.context.rank).data,
                prefetch=prefetches(training.context.plan) and training.data.stream.prefetchable,
                recorder=monitor.recorder,
                roll_back=partial(roll_back, training, hooks),
            )
            outcome = TrainingOutcome(code)
        except Diverged as error:
            outcome = TrainingOutcome(ExitCode.DIVERGED, error)
        except Exception as error:
            hooks.all.on_exception(error)
            if hooks.status is not None:
                with suppress(OSError):  # the disk may be full; the original error matters more
                    hooks.status.on_end(state.step)
            raise
    monitor.hangs.stop()  # the other ranks wait for what rank 0 does next
    engine.close()
    return outcome
