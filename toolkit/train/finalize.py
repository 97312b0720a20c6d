"""What follows the last step, by rank 0 alone, from the files: the exported weights, a text, and what to try next."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.formats.huggingface_target import export
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint_folder import newest, step_of
from toolkit.models.target import configuration
from toolkit.monitor.sink import Row, Sink
from toolkit.plan.types import RunPlan
from toolkit.rows import float_of, read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.train.data_progress import SamplesConsumed, format_consumed

Say = Callable[[str], None]
TEMPERATURE = 0.7


def finalize_run(
    plan: RunPlan,
    directory: RunDirectory,
    tokenizer: Path | None,
    sink: Sink,
    unigram: float | None,
    consumed: SamplesConsumed,
    *,
    time: str,
    goodput: float | None,
    say: Say,
    tell: Say,
    stop: Callable[[], object],
) -> None:
    """After the last step of a run.

    Args:
        tokenizer: the folder of the tokenizer that made the run's text.
        unigram: the unigram model's loss on the first evaluation set, if it is known.
        consumed: samples and epochs of each source that the run took.
        time, goodput: see ``summary``.
        say, tell: for results, for trouble.
        stop: whether to leave early.
    """
    sink.flush()  # what follows reads the files
    checkpoint = newest(directory.checkpoints)
    if plan.config.checkpoint.export:
        assert checkpoint is not None, "a run that exports saves its last step"
        config = None if plan.shape is not None else configuration(plan.config.model, plan.config.train.seed)
        export(open_source(checkpoint, plan.shape), directory.export, tokenizer=tokenizer, config=config)
    say(summary(list(read_rows(directory.metrics_file)), plan, time=time, goodput=goodput, consumed=consumed))
    _tell_losses(plan, directory, unigram, say)
    prompt = plan.config.monitor.prompt
    if prompt is not None and not stop():
        try:
            text = _continuation(plan, checkpoint, tokenizer, prompt, stop)
            say(f"the model continues {prompt!r}:\n\n{prompt}{text}\n")
            sink.log_summary("continuation", prompt + text)
        except Exception as error:  # noqa: BLE001  the training is done and saved; a sample of text does not change that
            tell(f"no text was generated: {type(error).__name__}: {error}")
    picture = directory.plots / "loss.png"
    if picture.exists():
        sink.log_image("loss", picture)
    for line in next_commands(plan, directory):
        say(line)


def summary(
    rows: Sequence[Row], plan: RunPlan, *, time: str, goodput: float | None, consumed: SamplesConsumed
) -> str:
    """Of a run that is done, in a line: its time, median speed without the first step (warm-up and compilation), and what it read.

    Args:
        rows: of all its steps.
        time: that it took, and what that cost.
        goodput: share of the time that went into steps that stand; None: unknown.
    """
    steady = rows[1:] or rows
    parts = [f"{plan.config.train.steps:,} steps in {time}"]
    if steady:
        used = [row["mfu"] for row in steady if "mfu" in row]
        utilisation = f" (MFU {statistics.median(used):.1%})" if used else ""
        parts.append(
            f"{statistics.median(row[f'{plan.unit}_per_second'] for row in steady):,.0f} {plan.unit}/s{utilisation}"
        )
        stalled = [row for row in steady if "data_seconds" in row]
        seconds = sum(row["step_seconds"] for row in stalled)
        if seconds:
            parts.append(
                f"{sum(row['data_seconds'] for row in stalled) / seconds:.2%} of it waiting for data"
            )
    if goodput is not None:
        parts.append(f"goodput {goodput:.1%}")
    return f"{', '.join(parts)}; samples: {format_consumed(consumed)}"


def _tell_losses(plan: RunPlan, directory: RunDirectory, unigram: float | None, say: Say) -> None:
    rows = {row["set"]: row for row in read_rows(directory.eval_file)}
    for number, name in enumerate(plan.config.eval.sets):
        if name not in rows:
            continue
        row = rows[name]
        line = f"{name} loss: {float_of(row['loss']):.4f} nats {plan.per}"
        if "accuracy" in row:
            line += f", {row['accuracy']:.1%} of them right"
        if number == 0 and unigram is not None:
            line += f" (a unigram model: {unigram:.4f})"
        say(line)


def _continuation(
    plan: RunPlan, checkpoint: Path | None, tokenizer: Path | None, prompt: str, stop: Callable[[], object]
) -> str:
    from toolkit.data.checks import special_tokens_mode, tokenizer_folder
    from toolkit.data.tokens.tokenizer import read_tokenizer
    from toolkit.train.generate import continue_text, load_model

    if plan.shape is None:
        raise ValueError("monitor.prompt needs a family's model, not model.target")
    if tokenizer is None:
        raise ValueError("monitor.prompt needs data that are text")
    if checkpoint is None or step_of(checkpoint) != plan.config.train.steps:
        raise ValueError("monitor.prompt needs the weights of the last step: checkpoint.at_end=true")
    model = load_model(plan.shape, open_reader(checkpoint, model=plan.shape))
    return continue_text(
        model,
        read_tokenizer(tokenizer),
        prompt,
        temperature=TEMPERATURE,
        seed=plan.config.train.seed,
        context=plan.shape.max_position_embeddings,
        stop=stop,
        special_tokens=special_tokens_mode(plan.config.data, tokenizer_folder(plan.config.data)),
    )


def next_commands(plan: RunPlan, directory: RunDirectory) -> list[str]:
    """Where everything is, and three commands to try next."""
    path, steps = directory.path, plan.config.train.steps
    there = [
        name
        for name in ("metrics.jsonl", "checkpoints", "plots/loss.png", "export")
        if (path / name).exists()
    ]
    if plan.shape is None:
        use = f"    weights:       toolkit.checkpoint.open_reader('{path}')"
    else:
        use = f'    generate text: python launch/generate.py {path} "import os"'
    return [
        f"saved in {path}: {', '.join(there)}",
        f"    report:        python launch/report.py {path}",
        use,
        f"    train longer:  the same command with train.steps={2 * steps}, and another layout if you like: zero=stage3",
    ]
