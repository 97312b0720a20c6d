"""Batch sizes: other tools give parts per process, this toolkit the global batch of all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.adopt.types import Context, Decision, Format, Source, changed, default, exact, refused

MICRO = (
    "train_micro_batch_size_per_gpu",
    "per_device_train_batch_size",
    "per_gpu_train_batch_size",
    "micro_batch_size",
)
ACCUMULATION = ("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps")
GLOBAL = ("train_batch_size", "global_batch_size")
STEPS = ("max_steps", "train_iters", "scheduler.params.total_num_steps")
RANKS = "the number of data ranks is not in the files: for N of them multiply it by N, or pass --ranks=N"


def read_context(sources: Sequence[Source], ranks: int | None) -> Context:
    """Return the facts about the batch and the ranks that any file names; ``auto`` names nothing."""
    return Context(
        keys={},
        formats=frozenset(source.format for source in sources),
        ranks=ranks or _ranks(sources),
        micro_batch=_first(sources, MICRO),
        accumulation=_first(sources, ACCUMULATION),
        global_batch=_first(sources, GLOBAL),
        model_ranks=_model_ranks(sources),
        steps=_first(sources, STEPS),
    )


def micro_batch(value: Any, ctx: Context) -> Decision:
    """Return the samples of one process in one forward pass; with the accumulation they determine the global
    batch.
    """
    if not isinstance(value, int) or value < 1:
        return refused("a micro-batch is a whole number")
    return _with_global(ctx, ("train.micro_batch", value))


def accumulation(value: Any, ctx: Context) -> Decision:
    if not isinstance(value, int) or value < 1:
        return refused("accumulation is a whole number of micro-batches")
    if ctx.global_batch is None:
        return _with_global(ctx) if ctx.micro_batch is not None else _without_micro(value)
    if ctx.micro_batch is not None:
        return exact(note="follows from train.global_batch / (train.micro_batch x data ranks)")
    if ctx.data_ranks is not None and ctx.global_batch % (value * ctx.data_ranks) == 0:
        return exact(("train.micro_batch", ctx.global_batch // (value * ctx.data_ranks)))
    return changed(
        f"write train.micro_batch={ctx.global_batch // value}; {RANKS.replace('multiply', 'divide')}"
    )


def _without_micro(value: int) -> Decision:
    if value == 1:
        return default("without train.micro_batch there is no accumulation")
    return refused(
        f"no file names the micro-batch: write train.micro_batch, and train.global_batch {value} times it"
    )


def _with_global(ctx: Context, *targets: tuple[str, Any]) -> Decision:
    if ctx.global_batch is not None:
        return exact(*targets)
    assert ctx.micro_batch is not None
    whole = ctx.micro_batch * (ctx.accumulation or 1) * (ctx.data_ranks or 1)
    targets = (*targets, ("train.global_batch", whole))
    return (
        changed(f"train.global_batch is for one data rank; {RANKS}", *targets)
        if ctx.data_ranks is None
        else exact(*targets)
    )


def _first(sources: Sequence[Source], names: Sequence[str]) -> int | None:
    return next(
        (
            value
            for source in sources
            for name in names
            if isinstance(value := source.keys.get(name), int) and not isinstance(value, bool) and value > 0
        ),
        None,
    )


def _ranks(sources: Sequence[Source]) -> int | None:
    processes = _first(sources, ("num_processes",))
    per_node, nodes = _first(sources, ("nproc_per_node",)), _first(sources, ("nnodes",))
    return processes or (per_node * (nodes or 1) if per_node else None)


def _model_ranks(sources: Sequence[Source]) -> int:
    ranks = 1
    for source in sources:
        if source.format is Format.MEGATRON:
            for name in (
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "context_parallel_size",
            ):
                ranks *= _first([source], (name,)) or 1
    return ranks
