"""Rules of the axes beside data under ``local`` and DeepSpeed: one at a time with data, and each with the
ZeRO stages it goes with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.config.schema import EngineName, OffloadDevice, OptimizerName
from toolkit.errors import Problem
from toolkit.plan.deepspeed import cut_by_tensor
from toolkit.plan.rule_context import Rule, RuleContext, refuse

ZERO = "engine.deepspeed.zero_optimization"
AXES = ("tensor", "pipeline", "context", "expert")


def local_has_no_axes(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.config.engine.name is EngineName.local:
        for axis in _used(ctx):
            yield refuse(
                ctx.config,
                f"parallel.{axis} engine.name",
                "the local engine is one process",
                f"write parallel.{axis}=1, or engine=megatron",
            )


def one_axis_beside_data(ctx: RuleContext) -> Iterator[Problem]:
    """Each of DeepSpeed's is another engine inside: AutoTP, PipelineModule, Ulysses and its MoE layers do not
    know each other.
    """
    used = _used(ctx)
    if ctx.deepspeed and len(used) > 1:
        yield refuse(
            ctx.config,
            " ".join(f"parallel.{axis}" for axis in used) + " engine.name",
            "DeepSpeed has one axis beside data at a time: its tensor, pipeline, context and expert "
            "parallelism do not combine",
            "write engine=megatron, which combines them all",
        )


def axes_need_a_family(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.deepspeed and ctx.config.model.target is not None:
        for axis in _used(ctx):
            yield refuse(
                ctx.config,
                f"parallel.{axis} model.target",
                "how to cut a model is known for the families' models only",
                f"write parallel.{axis}=1 with zero=stage3, which shards any module",
            )


def pipeline_limits(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    if not ctx.deepspeed or config.parallel.pipeline == 1:
        return
    if config.zero.stage > 1:
        yield refuse(
            config,
            "zero.stage parallel.pipeline",
            "under DeepSpeed a pipeline goes with ZeRO stages 0 and 1",
            "write zero=stage1, or parallel.pipeline=1",
        )
    if {config.offload.optimizer, config.offload.parameters} != {OffloadDevice.none}:
        yield refuse(
            config,
            "offload.optimizer offload.parameters parallel.pipeline",
            "a pipeline of DeepSpeed keeps parameters and optimizer states on the devices of its stages",
            "write offload=none and raise parallel.pipeline, or parallel.pipeline=1 with zero=stage3",
        )
    if config.optim.name is OptimizerName.muon:
        yield refuse(
            config,
            "optim.name parallel.pipeline",
            "DeepSpeed adds up norms group by group over stages, and Muon's groups are not the same in all "
            "of them",
            "write optim=adamw, or parallel.pipeline=1",
        )
    if _zero_key(ctx, "overlap_comm", False):
        yield refuse(
            config,
            f"{ZERO}.overlap_comm parallel.pipeline",
            "DeepSpeed's pipeline reduces gradients after the last backward, and switches it off",
            f"leave {ZERO}.overlap_comm out",
        )
    if config.model.router_aux_loss_coef:
        yield refuse(
            config,
            "model.router_aux_loss_coef parallel.pipeline",
            "a stage of DeepSpeed's pipeline hands on activations alone, so the loss does not see the other "
            "stages' routers",
            "write model.router_aux_loss_coef=0, or parallel.pipeline=1",
        )


def tensor_limits(ctx: RuleContext) -> Iterator[Problem]:
    """AutoTP replaces linear layers. transformers' gpt2 has transposed ones (``Conv1D``), which its training
    does not know, and mixtral's experts are no layers; both would be left whole on every rank, without a
    word.
    """
    config = ctx.config
    if not ctx.deepspeed or config.parallel.tensor == 1:
        return
    left = next(
        (
            spec.name
            for spec in ctx.parameters
            if spec.layer is not None and spec.decays and not cut_by_tensor(spec.name)
        ),
        None,
    )
    if left is not None:
        yield refuse(
            config,
            "parallel.tensor model.family",
            f"DeepSpeed's tensor axis cuts linear layers, and {left} is none",
            "write engine=megatron, or parallel.tensor=1 with zero=stage3",
        )
    if config.optim.name is OptimizerName.muon:
        yield refuse(
            config,
            "optim.name parallel.tensor",
            "Muon orthogonalises whole matrices, of which a tensor rank has parts",
            "write optim=adamw, or parallel.tensor=1",
        )
    yield from _nvme(ctx, "tensor")
    if _zero_key(ctx, "zero_hpz_partition_size", 1) > 1:
        yield refuse(
            config,
            f"{ZERO}.zero_hpz_partition_size parallel.tensor",
            "its groups are neighbouring ranks, which under a tensor axis hold different parts of the "
            "weights",
            f"leave {ZERO}.zero_hpz_partition_size out, or write parallel.tensor=1",
        )


def expert_limits(ctx: RuleContext) -> Iterator[Problem]:
    """Without ZeRO DeepSpeed clips by the mean of norms of different experts (measured: 3e-4 in the loss);
    its ZeRO 3 asserts that no layer of its MoE type is there.
    """
    if not ctx.deepspeed or ctx.config.parallel.expert == 1:
        return
    if ctx.config.zero.stage not in (1, 2):
        yield refuse(
            ctx.config,
            "zero.stage parallel.expert",
            "under DeepSpeed an expert axis goes with ZeRO stages 1 and 2",
            "write zero=stage1, or engine=megatron",
        )
    yield from _nvme(ctx, "expert")
    for key in ("reduce_scatter", "contiguous_gradients"):
        if not _zero_key(ctx, key, True):
            yield refuse(
                ctx.config,
                f"{ZERO}.{key} parallel.expert",
                "DeepSpeed asserts it where there are experts",
                f"leave {ZERO}.{key} out",
            )


def _zero_key(ctx: RuleContext, key: str, default: Any) -> Any:
    """Of the user's own."""
    section = ctx.config.engine.deepspeed.get("zero_optimization")
    return section.get(key, default) if isinstance(section, Mapping) else default


def _nvme(ctx: RuleContext, axis: str) -> Iterator[Problem]:
    if OffloadDevice.nvme in (ctx.config.offload.optimizer, ctx.config.offload.parameters):
        yield refuse(
            ctx.config,
            f"offload.optimizer offload.parameters parallel.{axis}",
            f"with a DeepSpeed {axis} axis, offload to the CPU has been measured and to NVMe has not",
            "write offload=cpu",
        )


def heads_are_spread_over_context(ctx: RuleContext) -> Iterator[Problem]:
    """Ulysses (Jacobs et al., 2309.14509): for attention a rank has whole sequences of some heads. Too few
    key-value heads are copied.
    """
    context, shape, length = ctx.config.parallel.context, ctx.shape, ctx.config.train.sequence_length
    if not ctx.deepspeed or context == 1:
        return
    if length % context:
        yield refuse(
            ctx.config,
            "train.sequence_length parallel.context",
            "each context rank has an equal part of a sequence",
            f"write train.sequence_length={-(-length // context) * context}",
        )
    if ctx.config.model.router_aux_loss_coef:
        yield refuse(
            ctx.config,
            "model.router_aux_loss_coef parallel.context",
            "the router's load balance is of whole sequences, and a context rank of DeepSpeed routes its "
            "piece of each",
            "write model.router_aux_loss_coef=0, parallel.context=1, or engine=megatron",
        )
    if shape is not None and shape.num_attention_heads % context:
        yield Problem(
            "parallel.context",
            f"parallel.context={context}, model.num_attention_heads={shape.num_attention_heads}",
            "DeepSpeed's context axis spreads heads over its ranks, so it divides model.num_attention_heads",
            "write a divisor of the number of heads, or engine=megatron, which divides sequences alone",
        )


def _used(ctx: RuleContext) -> list[str]:
    return [axis for axis in AXES if getattr(ctx.config.parallel, axis) > 1]


RULES: tuple[Rule, ...] = (
    local_has_no_axes,
    one_axis_beside_data,
    axes_need_a_family,
    pipeline_limits,
    tensor_limits,
    expert_limits,
    heads_are_spread_over_context,
)
