"""What follows the last step, by rank 0 alone, from the files: the exported weights, a text, and what to try next."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from toolkit.checkpoint import open_reader
from toolkit.checkpoint.formats.huggingface_target import export
from toolkit.checkpoint.source import open_source
from toolkit.checkpoint_folder import newest, step_of
from toolkit.models.target import configuration
from toolkit.monitor.sink import Sink
from toolkit.plan.types import RunPlan
from toolkit.progress import quantity
from toolkit.rows import read_rows
from toolkit.rundir.directory import RunDirectory
from toolkit.train.consumed import Consumed, words

Say = Callable[[str], None]
TEMPERATURE = 0.7


def finish(plan: RunPlan, directory: RunDirectory, tokenizer: Path | None, sink: Sink, unigram: float | None,
           consumed: Consumed, *, say: Say, tell: Say, stop: Callable[[], object]) -> None:
    """After the last step of a run.

    Args:
        tokenizer: the folder of the tokenizer that made the run's text.
        unigram: the unigram model's loss on the first evaluation set, if it is known.
        consumed: samples and epochs of each source that the run took.
        say, tell: for results, for trouble.
        stop: whether to leave early.
    """
    sink.flush()  # what follows reads the files
    checkpoint = newest(directory.checkpoints)
    if plan.config.checkpoint.export:
        assert checkpoint is not None, "a run that exports saves its last step"
        config = None if plan.shape is not None else configuration(plan.config.model, plan.config.train.seed)
        export(open_source(checkpoint, plan.shape), directory.export, tokenizer=tokenizer, config=config)
    _tell_speed(directory, plan.unit, say)
    _tell_data(directory, consumed, say)
    _tell_losses(plan, directory, unigram, say)
    prompt = plan.config.monitor.prompt
    if prompt is not None and not stop():
        try:
            text = _continuation(plan, checkpoint, tokenizer, prompt, stop)
            say(f"the model continues {prompt!r}:\n\n{prompt}{text}\n")
            sink.log_text("continuation", prompt + text)
        except Exception as error:  # noqa: BLE001  the training is done and saved; a sample of text does not change that
            tell(f"no text was generated: {type(error).__name__}: {error}")
    picture = directory.plots / "loss.png"
    if picture.exists():
        sink.log_image("loss", picture)
    for line in last_words(plan, directory):
        say(line)


def _tell_speed(directory: RunDirectory, unit: str, say: Say) -> None:
    rows = list(read_rows(directory.metrics_file))
    if len(rows) > 1:
        median = statistics.median(row[f"{unit}_per_second"] for row in rows[1:])
        used = [row["mfu"] for row in rows[1:] if "mfu" in row]
        utilisation = f" (MFU {statistics.median(used):.1%})" if used else ""
        say(f"median of the steps: {quantity(median, unit)}/s{utilisation}, without the first, which has warm-up and compilation in it "
            f"({rows[0]['step_seconds']:.2f} s)")


def _tell_data(directory: RunDirectory, consumed: Consumed, say: Say) -> None:
    rows = [row for row in read_rows(directory.metrics_file) if "data_seconds" in row][1:]
    if rows:
        share = sum(row["data_seconds"] for row in rows) / sum(row["step_seconds"] for row in rows)
        say(f"data stall: the steps after the first waited for samples in {share:.2%} of their time")
    say(f"samples taken: {words(consumed)}")


def _tell_losses(plan: RunPlan, directory: RunDirectory, unigram: float | None, say: Say) -> None:
    rows = {row["set"]: row for row in read_rows(directory.eval_file)}
    for number, name in enumerate(plan.config.eval.sets):
        if name not in rows:
            continue
        row = rows[name]
        line = f"{name} loss after {row['step']} steps: {row['loss']:.4f} nats {plan.per}, on {row[plan.unit]:,} {plan.unit}"
        if "accuracy" in row:
            line += f", {row['accuracy']:.1%} of them right"
        if number == 0 and unigram is not None:
            gain = unigram - row["loss"]
            better = f"the trained one is {abs(gain):.4f} {'better' if gain > 0 else 'worse'}"
            line += f"; a unigram model's on the same tokens: {unigram:.4f} ({better})"
        say(line)


def _continuation(plan: RunPlan, checkpoint: Path | None, tokenizer: Path | None, prompt: str, stop: Callable[[], object]) -> str:
    from toolkit.data.tokenizer import load
    from toolkit.train.generate import continue_text, load_model

    if plan.shape is None:
        raise ValueError("monitor.prompt needs a family's model, not model.target")
    if tokenizer is None:
        raise ValueError("monitor.prompt needs data that are text")
    if checkpoint is None or step_of(checkpoint) != plan.config.train.steps:
        raise ValueError("monitor.prompt needs the weights of the last step: checkpoint.at_end=true")
    model = load_model(plan.shape, open_reader(checkpoint, model=plan.shape))
    return continue_text(model, load(tokenizer), prompt, temperature=TEMPERATURE, seed=plan.config.train.seed,
                         context=plan.shape.max_position_embeddings, stop=stop)


def last_words(plan: RunPlan, directory: RunDirectory) -> list[str]:
    """Four lines: where everything is, and what to try next."""
    path, steps = directory.path, plan.config.train.steps
    there = [name for name in ("plots/loss.png", "metrics.jsonl", "checkpoints", "export") if (path / name).exists()]
    longer = f"train longer, or in another layout: the same command with train.steps={2 * steps}, or with zero=stage3 as well"
    if plan.shape is None:
        use = f"use the weights: toolkit.checkpoint.open_reader('{path}')"
    else:
        use = f"ask the model for more: python launch/generate.py {path} \"import os\""
    look = f"see it as one page, with where its time went: python launch/report.py {path}"
    return [f"everything is in {path}: {', '.join(there)}", look, use, longer]
