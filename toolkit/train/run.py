"""One rank of a run, from its plan to its exit code."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace

from toolkit.checkpoint.online.store import CheckpointStore
from toolkit.checkpoint_folder import newest
from toolkit.config.data import Documents
from toolkit.config.schema import OnNonfinite, parse_cadence
from toolkit.data.evaluation import EvalSet
from toolkit.data.open import open_data
from toolkit.data.registry import RunData
from toolkit.engine.build import build_engine
from toolkit.engine.protocol import Engine, StepResult
from toolkit.engine.rank_sync import FlagReduce, StepConsensus, check_same_data, make_flag_reduce
from toolkit.errors import ExitCode
from toolkit.goodput import format_goodput
from toolkit.hooks import Hooks
from toolkit.monitor.loss_plot import plot_loss
from toolkit.monitor.sink import Sink
from toolkit.monitor.throughput import RunTimer, TimeSpent, time_spent
from toolkit.observe.monitoring import watching
from toolkit.observe.reporting import Metrics, Plots, StatusFile
from toolkit.observe.sinks import closed_with_code, open_sinks
from toolkit.plan.flops import without_utilisation
from toolkit.plan.types import Device, RunPlan
from toolkit.rows import last_row, read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState
from toolkit.train import finalize, process_setup
from toolkit.train.data_progress import DataProgress
from toolkit.train.evaluation import Evaluation
from toolkit.train.goodput_tracker import GoodputTracker
from toolkit.train.loop import train
from toolkit.train.nonfinite import Diverged, StopOnNonfinite, finite_on_all_ranks
from toolkit.train.resume import find_resume_point, restore_stream, set_aside_later_checkpoints
from toolkit.train.save_deadline import SaveDeadline
from toolkit.train.saving import AllCosts, Checkpoints, Costs, Timer
from toolkit.train.task import Task, text_task
from toolkit.train.vision import vision_task

log = logging.getLogger(__name__)

Stop = Callable[[], str | None]


def run(
    plan: RunPlan,
    *,
    rank: int,
    local_rank: int,
    stop: Stop,
    attempt: int,
    data: str | None = None,
    launcher: str | None = None,
    seconds_left: Callable[[], float | None] = lambda: None,
) -> ExitCode:
    """Train on this rank.

    Args:
        stop: the reason to stop, once there is one.
        attempt: the number that ``RunDirectory.begin`` gave this start.
        data: the folder of the generation of data to read: ``data.path`` may point to another one while the run is under way.
            None: the one that it points to now.
        launcher: who started the ranks, for what is recorded of the run.
        seconds_left: until this rank, asked to stop, is ended in any case; None: it was not asked, or is not ended.

    Returns:
        DONE after the last step; STOPPED where a stop was agreed. Then the state is saved; where no rank has the time for it,
        ``status.json`` says what is lost. DIVERGED if a loss, gradient or weight is not finite; ``status.json`` has the
        reason. Every other end is written there by the caller, who knows of errors too.

    Raises:
        UserError: data, checkpoint or model are not what the run says.
    """
    began = time.monotonic()
    directory = RunDirectory(plan.run_dir)
    with ExitStack() as stack:
        stack.enter_context(process_setup.process_group(plan, rank, local_rank))
        process_setup.configure_process(plan)
        ranks = plan.world.ranks
        all_reduce_flags = make_flag_reduce(ranks)
        resume_point = find_resume_point(plan, directory)
        plan = replace(plan, batch=resume_point.batch)
        reads = open_data(
            plan.config, plan.batch, plan.axes.coordinates(rank).data, data or plan.config.data.path
        )
        stream = reads.stream
        stack.callback(stream.close)
        fingerprint = {
            **stream.fingerprint(),
            **{f"eval.sets {name}": one.data_hash for name, one in reads.sets.items()},
        }
        check_same_data(fingerprint, ranks)
        restore_stream(resume_point, stream)
        state = resume_point.state
        if rank == 0:
            directory.trim_after(state.step, attempt)
            log.info(resume_point.words)
        sink = open_sinks(
            plan, directory, state.step, rank, attempt=attempt, data=fingerprint, launcher=launcher
        )
        ended = stack.enter_context(closed_with_code(sink))

        task = (
            text_task(plan, end_of_text(plan, reads))
            if reads.records is None
            else vision_task(plan, reads.records)
        )
        watch = stack.enter_context(
            watching(plan, directory, sink, all_reduce_flags, rank=rank, attempt=attempt)
        )
        engine = build_engine(plan, task, rank=rank, local_rank=local_rank, recorder=watch.recorder)
        watch.progress.beat("building the engine")
        engine.load(resume_point.reader)
        if rank == 0:
            for words in (
                *set_aside_later_checkpoints(plan, directory, resume_point, attempt),
                *costs_of_windows(plan, reads),
                *words_without_utilisation(plan),
            ):
                log.info(words)

        def draw() -> None:
            sink.flush()
            plot_loss(directory.path, reads.unigram(), plan.per)

        save_deadline = SaveDeadline(
            plan, (save for one in directory.tried(before=attempt) for save in one.saves)
        )
        costs: Costs = save_deadline
        if rank == 0:
            times = GoodputTracker(
                directory.attempt_folder(attempt), directory.tried(before=attempt), log.info
            )
            costs = AllCosts(times, save_deadline)
        timer = Timer(parse_cadence(plan.config.checkpoint.every).seconds)
        course = RunTimer(plan, spent_before(directory) if rank == 0 else TimeSpent(), began)
        hooks = Hooks(
            Metrics(plan, watch.sink, stream.consumed, course), *watch.hooks(engine), recorder=watch.recorder
        )
        if rank == 0:
            hooks.add(times)
        if plan.config.train.on_nonfinite is OnNonfinite.stop:
            hooks.add(StopOnNonfinite())
        hooks.add(
            evaluation(
                plan,
                engine,
                task,
                reads.sets,
                hooks,
                all_reduce_flags,
                directory,
                sink,
                watch.progress.beat,
                rank,
            )
        )
        saving = Checkpoints(
            plan,
            engine,
            CheckpointStore(
                directory.checkpoints, plan.config.checkpoint.keep_last, plan.config.checkpoint.keep_every
            ),
            stream,
            timer,
            rank=rank,
            attempt=attempt,
            all_reduce_flags=all_reduce_flags,
            flush=sink.flush,
            announce=hooks.on_checkpoint,
            tell=log.warning if rank == 0 else lambda words: None,
            costs=costs,
        )
        hooks.add(saving)
        if rank == 0:
            status = StatusFile(directory, attempt, newest(directory.checkpoints), goodput=times.status)
            hooks.add(status)
            if len(stream.consumed(0)) > 1:
                hooks.add(DataProgress(stream.consumed, log.info))
            hooks.add(Plots(draw, log.warning))

        def agree(waited: float, result: StepResult) -> StepConsensus:
            mine: list[int] = [
                stop() is not None,
                save_deadline.too_late(seconds_left()),
                rank == 0 and timer.due(),
            ]
            mine += [
                result.nonfinite,
                round(waited * 1e6),
                watch.ledger_due(),
                *watch.process_stats.read(engine.device),
            ]
            stopping, late, due, nonfinite, microseconds, steps, collecting, host_bytes, device_bytes = (
                all_reduce_flags(mine)
            )
            bad_weights = bool(nonfinite) and not finite_on_all_ranks(engine.shards(), all_reduce_flags)
            return StepConsensus(
                stop=bool(stopping),
                no_time=bool(late),
                save=bool(due),
                data_seconds=microseconds / 1e6,
                ledger=steps,
                gc_seconds=collecting / 1e6,
                nonfinite=bool(nonfinite),
                bad_weights=bad_weights,
                host_bytes=host_bytes,
                device_bytes=device_bytes,
            )

        diverged: Diverged | None = None
        with process_setup.freeze_gc():  # no longer: engines are circles, whose end is the collector's
            watch.process_stats.read(engine.device)  # what was collected until now is not the first step's
            try:
                code = train(
                    plan, engine, task, stream.steps(state.step), state, hooks, agree, recorder=watch.recorder
                )
            except Diverged as found:
                diverged, code = found, ExitCode.DIVERGED
            except Exception:
                if rank == 0:
                    with suppress(OSError):  # a full disk, maybe: what went wrong is more than the step
                        status.on_end(state.step)
                raise
        watch.progress.stop()  # rank 0 has more to do than the others, who wait for it
        engine.close()
        ended(code)
        took = course.format_spent(time.monotonic())
        kept = (directory.saved_step() or 0) if saving.given_up or diverged is not None else None
        total = times.goodput(kept) if rank == 0 else None
        if total is not None:
            watch.sink.log_summary("goodput", total.share)
            if total.attempts > 1:
                log.info(format_goodput(total))
        try:
            if rank == 0 and code is ExitCode.DONE:
                finalize.finalize_run(
                    plan,
                    directory,
                    reads.tokenizer,
                    sink,
                    reads.unigram(),
                    stream.consumed(state.step),
                    time=took,
                    goodput=total.share if total is not None else None,
                    say=log.info,
                    tell=log.warning,
                    stop=stop,
                )
            elif rank == 0 and diverged is not None:
                checkpoint = newest(directory.checkpoints)
                words = diverged.describe(str(checkpoint) if checkpoint else None, checked=times.has_saved)
                print(f"error: {words}", file=sys.stderr, flush=True)
                directory.finish(RunState.FAILED, int(code), words, attempt=attempt)
            elif rank == 0 and saving.given_up:
                words = save_deadline.words(
                    stop() or "another rank was asked to stop",
                    step=state.step,
                    saved=kept or None,
                    work=times.unsaved(),
                )
                log.info(f"stopped after step {state.step}: {words}")
                directory.finish(RunState.STOPPED, int(ExitCode.STOPPED), words, attempt=attempt)
            elif rank == 0:
                log.info(
                    f"stopped after step {state.step} of {plan.config.train.steps}, saved, in {took}; the same command continues"
                )
        finally:
            all_reduce_flags(
                [0]
            )  # the others stay until rank 0 is through: leaving tears down what it may still need
        return code


def end_of_text(plan: RunPlan, reads: RunData) -> int | None:
    """None where documents are not kept apart."""
    if plan.config.data.documents is Documents.joined:
        return None
    assert reads.end_of_text is not None, "what has no documents is refused with data.documents=separate"
    return reads.end_of_text


def costs_of_windows(plan: RunPlan, reads: RunData) -> list[str]:
    """To people, where documents are kept apart."""
    if plan.config.data.documents is Documents.joined:
        return []
    return [
        f"documents of {name} are kept apart: {cost} (in {cost.tokens:,} tokens looked at)"
        for name, cost in reads.waste().items()
    ]


def words_without_utilisation(plan: RunPlan) -> list[str]:
    """To people on GPUs, once."""
    reason = without_utilisation(plan)
    return (
        [f"speed is told without a utilisation (MFU): {reason}"]
        if reason is not None and plan.world.device is Device.CUDA
        else []
    )


def spent_before(directory: RunDirectory) -> TimeSpent:
    """By earlier attempts, from their rows: those that stand, and those of steps that were run again."""
    files = [
        directory.metrics_file,
        *(directory.attempt_folder(number) / directory.metrics_file.name for number in directory.attempts()),
    ]
    return time_spent(row for file in files if (row := last_row(file)) is not None)


def evaluation(
    plan: RunPlan,
    engine: Engine,
    task: Task,
    sets: Mapping[str, EvalSet],
    hooks: Hooks,
    all_reduce_flags: FlagReduce,
    directory: RunDirectory,
    sink: Sink,
    progress: Callable[[str], None],
    rank: int,
) -> Evaluation:
    def missing(step: int) -> bool:
        sink.flush()
        absent = rank == 0 and all(row["step"] != step for row in read_rows(directory.eval_file))
        return bool(all_reduce_flags([absent])[0])

    return Evaluation(
        engine,
        task,
        {name: one.batches for name, one in sets.items()},
        every=plan.config.eval.every,
        steps=plan.config.train.steps,
        missing=missing,
        announce=hooks.on_eval,
        unit=plan.unit,
        progress=progress,
    )
