"""Rules about tensor, pipeline, context and expert parallelism under ``local`` and DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.config.schema import EngineName, OffloadDevice
from toolkit.errors import Problem
from toolkit.plan.deepspeed import is_tensor_parallel
from toolkit.plan.rule_context import Rule, RuleContext, make_error

ZERO = "engine.deepspeed.zero_optimization"
AXES = ("tensor", "pipeline", "context", "expert")


def local_has_no_axes(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.config.engine.name is EngineName.local:
        for axis in _used(ctx):
            yield make_error(
                ctx.config,
                f"parallel.{axis} engine.name",
                "the local engine is one process",
                f"write parallel.{axis}=1, or engine=megatron",
            )


def deepspeed_axes_do_not_combine(ctx: RuleContext) -> Iterator[Problem]:
    """AutoTP, PipelineModule, Ulysses and the MoE layers are separate implementations inside DeepSpeed."""
    used = _used(ctx)
    if ctx.deepspeed and len(used) > 1:
        yield make_error(
            ctx.config,
            " ".join(f"parallel.{axis}" for axis in used) + " engine.name",
            "DeepSpeed combines only one of tensor, pipeline, context and expert parallelism with data "
            "parallelism",
            "write engine=megatron, which combines all of them",
        )


def axes_need_a_family(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.deepspeed and not ctx.of_a_family:
        for axis in _used(ctx):
            yield make_error(
                ctx.config,
                f"parallel.{axis} {ctx.config.model.source_key}",
                "only the families' models can be split",
                f"write parallel.{axis}=1 with zero=stage3, which shards any module",
            )


def pipeline_limits(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    if not ctx.deepspeed or config.parallel.pipeline == 1:
        return
    if config.zero.stage > 1:
        yield make_error(
            config,
            "zero.stage parallel.pipeline",
            "DeepSpeed's pipeline works with ZeRO stages 0 and 1",
            "write zero=stage1, or parallel.pipeline=1",
        )
    if {config.offload.optimizer, config.offload.parameters} != {OffloadDevice.none}:
        yield make_error(
            config,
            "offload.optimizer offload.parameters parallel.pipeline",
            "DeepSpeed's pipeline keeps parameters and optimizer states on the devices of its stages",
            "write offload=none and raise parallel.pipeline, or parallel.pipeline=1 with zero=stage3",
        )
    if _zero_key(ctx, "overlap_comm", False):
        yield make_error(
            config,
            f"{ZERO}.overlap_comm parallel.pipeline",
            "DeepSpeed's pipeline reduces gradients after the last backward pass, and turns it off",
            f"leave out {ZERO}.overlap_comm",
        )
    if config.model.router_aux_loss_coef:
        yield make_error(
            config,
            "model.router_aux_loss_coef parallel.pipeline",
            "stages of DeepSpeed's pipeline exchange only activations, so the loss does not include other "
            "stages' routers",
            "write model.router_aux_loss_coef=0, or parallel.pipeline=1",
        )


def tensor_limits(ctx: RuleContext) -> Iterator[Problem]:
    """AutoTP replaces linear layers.

    It does not support the transposed layers (``Conv1D``) of transformers' gpt2 in training, and mixtral's
    experts are not layers. Both would silently stay replicated on every rank.
    """
    config = ctx.config
    if not ctx.deepspeed or config.parallel.tensor == 1:
        return
    left = next(
        (
            spec.name
            for spec in ctx.parameters
            if spec.layer is not None and spec.decays and not is_tensor_parallel(spec.name)
        ),
        None,
    )
    if left is not None:
        yield make_error(
            config,
            "parallel.tensor model.family",
            f"DeepSpeed's tensor parallelism splits linear layers, and {left} is not in one",
            "write engine=megatron, or parallel.tensor=1 with zero=stage3",
        )
    yield from _nvme(ctx, "tensor")


def expert_limits(ctx: RuleContext) -> Iterator[Problem]:
    """Without ZeRO, DeepSpeed clips by the mean norm over different experts (measured: 3e-4 in the loss).

    Its ZeRO 3 asserts that the model has no MoE layers.
    """
    if not ctx.deepspeed or ctx.config.parallel.expert == 1:
        return
    if ctx.config.zero.stage not in (1, 2):
        yield make_error(
            ctx.config,
            "zero.stage parallel.expert",
            "DeepSpeed's expert parallelism works with ZeRO stages 1 and 2",
            "write zero=stage1, or engine=megatron",
        )
    yield from _nvme(ctx, "expert")
    for key in ("reduce_scatter", "contiguous_gradients"):
        if not _zero_key(ctx, key, True):
            yield make_error(
                ctx.config,
                f"{ZERO}.{key} parallel.expert",
                "DeepSpeed asserts it for models with experts",
                f"leave out {ZERO}.{key}",
            )


def _zero_key(ctx: RuleContext, key: str, default: Any) -> Any:
    """The user's value of a key of ``zero_optimization``."""
    section = ctx.config.engine.deepspeed.get("zero_optimization")
    return section.get(key, default) if isinstance(section, Mapping) else default


def _nvme(ctx: RuleContext, axis: str) -> Iterator[Problem]:
    if OffloadDevice.nvme in (ctx.config.offload.optimizer, ctx.config.offload.parameters):
        yield make_error(
            ctx.config,
            f"offload.optimizer offload.parameters parallel.{axis}",
            f"with DeepSpeed's {axis} parallelism, offload to the CPU was tested, and offload to NVMe was "
            f"not",
            "write offload=cpu",
        )


def context_divides_heads(ctx: RuleContext) -> Iterator[Problem]:
    """In Ulysses (Jacobs et al., 2309.14509) a rank computes attention for some heads on full sequences.

    Key-value heads are replicated if there are fewer heads than ranks.
    """
    context, shape, length = ctx.config.parallel.context, ctx.shape, ctx.config.train.sequence_length
    if not ctx.deepspeed or context == 1:
        return
    if length % context:
        yield make_error(
            ctx.config,
            "train.sequence_length parallel.context",
            "each context rank has an equal part of a sequence",
            f"write train.sequence_length={-(-length // context) * context}",
        )
    if ctx.config.model.router_aux_loss_coef:
        yield make_error(
            ctx.config,
            "model.router_aux_loss_coef parallel.context",
            "the load balancing loss needs whole sequences, and a context rank of DeepSpeed routes a part of "
            "each",
            "write model.router_aux_loss_coef=0, parallel.context=1, or engine=megatron",
        )
    if shape is not None and shape.num_attention_heads % context:
        yield Problem(
            "parallel.context",
            f"parallel.context={context}, model.num_attention_heads={shape.num_attention_heads}",
            "DeepSpeed's context parallelism spreads heads over its ranks, so it must divide "
            "model.num_attention_heads",
            "write a divisor of the number of heads, or engine=megatron, which divides only sequences",
        )


def _used(ctx: RuleContext) -> list[str]:
    return [axis for axis in AXES if getattr(ctx.config.parallel, axis) > 1]


RULES: tuple[Rule, ...] = (
    local_has_no_axes,
    deepspeed_axes_do_not_combine,
    axes_need_a_family,
    pipeline_limits,
    tensor_limits,
    expert_limits,
    context_divides_heads,
)
