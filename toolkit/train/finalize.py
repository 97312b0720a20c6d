"""Finish a run after its last step: export, a sample of text, the summary, and the end in ``status.json``."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.formats.huggingface.target import export
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint_folder import newest_checkpoint, step_of
from toolkit.commands import command_line
from toolkit.config.schema import EngineName, ParallelConfig, ZeroConfig
from toolkit.errors import ExitCode, UserError
from toolkit.goodput import Goodput, format_goodput
from toolkit.models.hugging_face import describe_export
from toolkit.models.user_model import hugging_face_config
from toolkit.monitor.sink import Row
from toolkit.observe.progress_hooks import SamplesConsumed, format_consumed
from toolkit.paths import Location
from toolkit.plan import make_plan
from toolkit.plan.types import RunPlan
from toolkit.rows import float_or_nan, read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.rundir.status import RunState
from toolkit.train.build import Training, TrainingHooks
from toolkit.train.departure import Departure
from toolkit.train.nonfinite import Diverged

log = logging.getLogger(__name__)

SAMPLING_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """How the loop ended.

    Attributes:
        diverged: set if ``code`` is DIVERGED.
        departure: set if ``code`` is STOPPED because faulty nodes leave the run.
    """

    code: ExitCode
    diverged: Diverged | None = None
    departure: Departure | None = None


def finish(training: Training, hooks: TrainingHooks, outcome: TrainingOutcome) -> None:
    """Log how the run ended, and finish it: export and sample after the last step, or write ``status.json``.

    Only rank 0 does anything.
    """
    if hooks.goodput is None:
        return
    context, step = training.context, training.state.step
    plan, directory = context.plan, context.directory
    elapsed = hooks.run_timer.format_spent(time.monotonic())
    unsaved = (
        hooks.checkpoints.skipped_last_save or outcome.diverged is not None or outcome.departure is not None
    )
    saved_step = (directory.saved_step() or 0) if unsaved else None
    goodput = hooks.goodput.goodput(saved_step)
    if goodput is not None:
        training.monitor.sink.log_summary("goodput", goodput.share)
        if goodput.attempts > 1:
            log.info(format_goodput(goodput))
    if outcome.code is ExitCode.DONE:
        finish_completed_run(training, elapsed, goodput)
        if step < plan.config.train.steps:
            reason = training.end.reason or "a hook on another rank ended the run"
            log.info(f"ended after step {step} of {plan.config.train.steps}: {reason}")
            directory.finish(RunState.DONE, int(ExitCode.DONE), reason, attempt=context.attempt)
    elif outcome.diverged is not None:
        checkpoint = newest_checkpoint(directory.checkpoints)
        reason = outcome.diverged.describe(
            str(checkpoint) if checkpoint else None, checked=hooks.goodput.has_saved
        )
        log.error(reason)
        directory.finish(RunState.FAILED, int(outcome.code), reason, attempt=context.attempt)
    elif outcome.departure is not None:
        log.warning(f"{outcome.departure}")  # the process records the end when all nodes have agreed on it
    elif hooks.checkpoints.skipped_last_save:
        reason = hooks.deadline.describe_lost_work(
            training.stop() or "another rank was asked to stop",
            step=step,
            saved=saved_step or None,
            seconds=hooks.goodput.unsaved_seconds(),
        )
        log.info(f"stopped after step {step}: {reason}")
        directory.finish(RunState.STOPPED, int(ExitCode.STOPPED), reason, attempt=context.attempt)
    elif hooks.budget is not None and hooks.budget.reason is not None:
        log.info(
            f"stopped after step {step} of {plan.config.train.steps}, saved, in {elapsed}: "
            f"{hooks.budget.reason}"
        )
        directory.finish(
            RunState.STOPPED, int(ExitCode.STOPPED), hooks.budget.reason, attempt=context.attempt
        )
    else:
        log.info(
            f"stopped after step {step} of {plan.config.train.steps}, saved, in {elapsed}; the same "
            "command continues"
        )


def finish_completed_run(training: Training, elapsed: str, goodput: Goodput | None) -> None:
    """Export the weights, log the summary and the losses, and continue the prompt of ``monitor.prompt``."""
    context, sink, data = training.context, training.sink, training.data
    plan, directory = context.plan, context.directory
    sink.flush()  # what follows reads the files
    checkpoint = newest_checkpoint(directory.checkpoints)
    if plan.config.checkpoint.export:
        assert checkpoint is not None, "a run that exports saves its last step"
        config = buffers = None
        if plan.config.model.target is not None:
            config = hugging_face_config(plan.config.model, plan.config.train.seed)
        elif plan.shape is None:
            config, buffers = describe_export(plan)
        export(
            open_source(checkpoint, plan.shape),
            directory.export,
            tokenizer=data.tokenizer,
            config=config,
            buffers=buffers,
        )
    rows = list(read_rows(directory.metrics_file))
    consumed = data.stream.consumed(training.state.step)
    share = goodput.share if goodput is not None else None
    log.info(
        format_summary(
            rows, plan, steps=training.state.step, elapsed=elapsed, goodput=share, consumed=consumed
        )
    )
    for line in format_losses(plan, directory, data.unigram()):
        log.info(line)
    prompt = plan.config.monitor.prompt
    if prompt is not None and not training.stop():
        try:
            if checkpoint is None or step_of(checkpoint) != training.state.step:
                raise ValueError("monitor.prompt needs the weights of the last step: checkpoint.at_end=true")
            text = _continue_prompt(plan, checkpoint, data.tokenizer, prompt, training.stop)
            log.info(f"the model continues {prompt!r}:\n\n{prompt}{text}\n")
            sink.log_summary("continuation", prompt + text)
        except Exception as error:  # noqa: BLE001  the training is complete and saved without a sample of text
            log.warning(f"no text was generated: {type(error).__name__}: {error}")
    plot = directory.plots / "loss.png"
    if plot.exists():
        sink.log_image("loss", plot)
    for line in format_next_commands(plan, directory):
        log.info(line)


def format_summary(
    rows: Sequence[Row],
    plan: RunPlan,
    *,
    steps: int,
    elapsed: str,
    goodput: float | None,
    consumed: SamplesConsumed,
) -> str:
    """Summarize a completed run in a line: time, median speed without the first step, goodput and samples.

    Args:
        rows: of all steps.
        steps: the number of completed steps.
        elapsed: the formatted time, with its cost.
        goodput: share of the time spent in steps that count; None if it is unknown.
    """
    steady = rows[1:] or rows
    parts = [f"{steps:,} steps in {elapsed}"]
    if steady:
        utilization = [row["mfu"] for row in steady if "mfu" in row]
        mfu = f" (MFU {statistics.median(utilization):.1%})" if utilization else ""
        speed = statistics.median(row[f"{plan.unit}_per_second"] for row in steady)
        parts.append(f"{speed:,.0f} {plan.unit}/s{mfu}")
        measured = [row for row in steady if "data_seconds" in row]
        seconds = sum(row["step_seconds"] for row in measured)
        if seconds:
            waiting = sum(row["data_seconds"] for row in measured) / seconds
            parts.append(f"{waiting:.2%} of it waiting for data")
    if goodput is not None:
        parts.append(f"goodput {goodput:.1%}")
    return f"{', '.join(parts)}; samples: {format_consumed(consumed)}"


def format_losses(plan: RunPlan, directory: RunDirectory, unigram: float | None) -> list[str]:
    """Return a line with the last loss of each evaluation set.

    Args:
        unigram: loss of a unigram model on the first set; None if it is unknown.
    """
    rows = {row["set"]: row for row in read_rows(directory.eval_file)}
    lines = []
    for number, name in enumerate(plan.config.eval.sets):
        if name not in rows:
            continue
        row = rows[name]
        line = f"{name} loss: {float_or_nan(row['loss']):.4f} {plan.loss_unit}"
        if "accuracy" in row:
            line += f", {row['accuracy']:.1%} of them right"
        if number == 0 and unigram is not None:
            line += f" (a unigram model: {unigram:.4f})"
        lines.append(line)
    return lines


def _continue_prompt(
    plan: RunPlan, checkpoint: Location, tokenizer: Path | None, prompt: str, stop: Callable[[], object]
) -> str:
    from toolkit.data.checks import special_tokens_mode, tokenizer_folder
    from toolkit.data.tokens.tokenizer import read_tokenizer
    from toolkit.train.generate import continue_text, load_model

    if plan.shape is None:
        raise ValueError(f"monitor.prompt needs a family's model, not {plan.config.model.source_key}")
    if tokenizer is None:
        raise ValueError("monitor.prompt needs text data")
    model = load_model(plan.shape, open_reader(checkpoint, model=plan.shape))
    return continue_text(
        model,
        read_tokenizer(tokenizer),
        prompt,
        temperature=SAMPLING_TEMPERATURE,
        seed=plan.config.train.seed,
        context=plan.shape.max_position_embeddings,
        stop=stop,
        special_tokens=special_tokens_mode(plan.config.data, tokenizer_folder(plan.config.data)),
    )


AXES = ("tensor", "pipeline", "context", "expert")


def another_layout(plan: RunPlan) -> str | None:
    """Return the overrides of another layout on the same machines; None if the planner refuses it."""
    config = plan.config
    stage = 2 if config.zero.stage == 3 else 3
    axes = [axis for axis in AXES if getattr(config.parallel, axis) > 1]
    engine = replace(config.engine, name=EngineName.deepspeed)
    other = replace(config, engine=engine, parallel=ParallelConfig(), zero=ZeroConfig(stage=stage))
    try:
        make_plan(other, plan.world)
    except UserError:
        return None
    switch = [] if config.engine.name is EngineName.deepspeed else ["engine=deepspeed"]
    return " ".join([*switch, f"zero=stage{stage}", *(f"parallel.{axis}=1" for axis in axes)])


def format_next_commands(plan: RunPlan, directory: RunDirectory) -> list[str]:
    """Return where the results are, and three commands to try next."""
    path, steps = directory.path, plan.config.train.steps
    layout = another_layout(plan)
    results = ("metrics.jsonl", "checkpoints", "plots/loss.png", "export")
    existing = [name for name in results if (path / name).exists()]
    if plan.shape is None:
        use = f"    weights:       toolkit.checkpoint.open_reader('{path}')"
    else:
        use = "    generate text: " + command_line("generate", str(path), '"import os"')
    return [
        f"saved in {path}: {', '.join(existing)}",
        f"    report:        {command_line('report', str(path))}",
        use,
        f"    train longer:  the same command with train.steps={2 * steps}"
        + (f", and another layout if you like: {layout}" if layout else ""),
    ]
