"""Rules about parallelism in every engine: divisible sizes, and ranks that may share a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from toolkit.config.schema import Precision
from toolkit.errors import Problem
from toolkit.plan.devices import memory_bytes
from toolkit.plan.rule_context import Rule, RuleContext, make_error, make_warning
from toolkit.plan.rules_megatron import STAGES
from toolkit.plan.types import Device


def heads_divide(ctx: RuleContext) -> Iterator[Problem]:
    """A padded (Megatron-core) or replicated (DeepSpeed, tied) vocabulary need not be divisible."""
    tensor, shape = ctx.config.parallel.tensor, ctx.shape
    if shape is None or tensor == 1:
        return
    for name in (
        "num_attention_heads",
        "intermediate_size",
        *(() if ctx.megatron or shape.tie_word_embeddings else ("vocab_size",)),
    ):
        if getattr(shape, name) % tensor:
            yield _divides(ctx, f"model.{name}", "parallel.tensor", getattr(shape, name), tensor)
    keys = shape.num_key_value_heads
    if keys % tensor and (tensor % keys or not ctx.megatron):
        whole = "a rank has whole key-value heads" + (", or shares one" if ctx.megatron else "")
        yield Problem(
            "model.num_key_value_heads",
            f"model.num_key_value_heads={keys}, parallel.tensor={tensor}",
            f"one of the two must divide the other: {whole}"
            if ctx.megatron
            else f"parallel.tensor must divide it: {whole}",
            f"write parallel.tensor={_divisor_near(keys, tensor)}"
            + ("" if ctx.megatron else ", or engine=megatron"),
        )


def layers_divide(ctx: RuleContext) -> Iterator[Problem]:
    """DeepSpeed balances uneven stages. rules_megatron.py checks Megatron-core's keys for the sizes of
    stages.
    """
    stages, shape = ctx.config.parallel.pipeline, ctx.shape
    if shape is None or stages == 1:
        return
    if shape.num_hidden_layers < stages:
        yield _divides(ctx, "model.num_hidden_layers", "parallel.pipeline", shape.num_hidden_layers, stages)
    elif (
        ctx.megatron
        and shape.num_hidden_layers % stages
        and not any(ctx.config.engine.megatron.get(name) for name in STAGES)
    ):
        divided = _divides(
            ctx, "model.num_hidden_layers", "parallel.pipeline", shape.num_hidden_layers, stages
        )
        yield replace(
            divided, remedy=f"{divided.remedy}, or set a stage's size: +engine.megatron.{STAGES[0]}=N"
        )


def sequence_divides(ctx: RuleContext) -> Iterator[Problem]:
    context, length = ctx.config.parallel.context, ctx.config.train.sequence_length
    if ctx.megatron and context > 1 and length % (2 * context):
        yield make_error(
            ctx.config,
            "train.sequence_length parallel.context",
            "train.sequence_length must be divisible by 2 x parallel.context: a rank has a part of each half "
            "of a causal sequence",
            f"write train.sequence_length={-(-length // (2 * context)) * 2 * context}",
        )


def experts_divide(ctx: RuleContext) -> Iterator[Problem]:
    expert, shape = ctx.config.parallel.expert, ctx.shape
    if expert == 1 or shape is None:
        return
    if not shape.num_local_experts:
        yield make_error(
            ctx.config,
            "parallel.expert model.family",
            "expert parallelism needs a model with experts",
            "write parallel.expert=1" + (", or model=mixtral" if ctx.sizes_are_free else ""),
        )
    elif shape.num_local_experts % expert:
        yield _divides(ctx, "model.num_local_experts", "parallel.expert", shape.num_local_experts, expert)
    if ctx.axes is not None and (ctx.axes.data * ctx.axes.context) % expert:
        yield Problem(
            "parallel.expert",
            f"parallel.expert={expert} over {ctx.axes.data * ctx.axes.context} data and context ranks",
            "expert parallelism regroups data and context ranks, so it must divide their number",
            f"write parallel.expert={_divisor_near(ctx.axes.data * ctx.axes.context, expert)}",
        )


def experts_are_aligned(ctx: RuleContext) -> Iterator[Problem]:
    """transformers multiplies all experts in one ``grouped_mm``, which needs strides of 16-byte multiples."""
    shape = ctx.shape
    if ctx.megatron or shape is None or not ctx.has_experts:
        return
    multiple = 4 if ctx.config.precision.name is Precision.fp32 else 8
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(shape, name)
        if size % multiple:
            yield Problem(
                f"model.{name}",
                f"model.{name}={size}, precision.name={ctx.config.precision.name.value}",
                f"rows of an expert are multiples of 16 bytes, so model.{name} must be divisible by "
                f"{multiple}",
                f"write model.{name}={-(-size // multiple) * multiple}"
                if ctx.sizes_are_free
                else "write engine=megatron, whose experts are separate layers",
            )


def tensor_axis_stays_in_a_node(ctx: RuleContext) -> Iterator[Problem]:
    tensor, per_node = ctx.config.parallel.tensor, ctx.world.ranks_per_node
    if tensor > 1 and per_node % tensor:
        yield Problem(
            "parallel.tensor",
            f"parallel.tensor={tensor}, {per_node} ranks a node",
            "the ranks that share a matrix are on one node: they communicate several times per layer",
            f"write parallel.tensor={_divisor_near(per_node, tensor)} and raise parallel.pipeline or "
            f"zero.stage instead",
        )


def model_parallelism_without_need(ctx: RuleContext) -> Iterator[Problem]:
    """Warn if sharded 16-bit states would leave half the device free.

    States are 18 bytes per parameter with fp32 gradients, of which Megatron-core replicates 6.
    """
    parallel, memory = ctx.config.parallel, memory_bytes(ctx.world)
    if (
        parallel.tensor * parallel.pipeline == 1
        or memory is None
        or ctx.world.device is not Device.CUDA
        or not ctx.numel
    ):
        return
    whole = 6 if ctx.megatron else 0
    if (whole + (18 - whole) / ctx.world.ranks) * ctx.numel < memory / 2:
        yield make_warning(
            ctx.config,
            "parallel.tensor parallel.pipeline",
            "the model's states fit without model parallelism, which communicates in every layer",
            f"write parallel.tensor=1 parallel.pipeline=1 with zero=stage{1 if ctx.megatron else 3}, and "
            f"compare tokens/s",
        )


def _divides(ctx: RuleContext, whole: str, part: str, size: int, by: int) -> Problem:
    return Problem(
        part,
        f"{part}={by}, {whole}={size}",
        f"{whole} must be divisible by {part}",
        f"write {part}={_divisor_near(size, by)}"
        + (f", or {whole}={-(-size // by) * by}" if ctx.sizes_are_free else ""),
    )


def _divisor_near(size: int, wanted: int) -> int:
    return max(divisor for divisor in range(1, wanted + 1) if size % divisor == 0)


def replicas_compute_alike(ctx: RuleContext) -> Iterator[Problem]:
    """Whether ``monitor.computation_every`` can compare data ranks to the bit, without changing the run."""
    config = ctx.config
    if not config.monitor.computation_every:
        return
    if config.parallel.expert > 1:
        yield make_error(
            config,
            "monitor.computation_every parallel.expert",
            "ranks with different experts compute different parts of a micro-batch",
            "write monitor.computation_every=0, or parallel.expert=1",
        )
    if ctx.megatron and config.precision.fp8:
        yield make_error(
            config,
            "monitor.computation_every precision.fp8",
            "Transformer Engine stores scales of fp8 outside of buffers, and a forward pass may change them",
            "write monitor.computation_every=0, or precision=bf16",
        )


RULES: tuple[Rule, ...] = (
    replicas_compute_alike,
    heads_divide,
    layers_divide,
    sequence_divides,
    experts_divide,
    experts_are_aligned,
    tensor_axis_stays_in_a_node,
    model_parallelism_without_need,
)
