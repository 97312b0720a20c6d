"""Rules about ZeRO++ (Wang et al., 2306.10209): hpZ, qwZ and qgZ in DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.schema import Precision
from toolkit.errors import Problem
from toolkit.plan.rule_context import Rule, RuleContext, make_error, make_warning
from toolkit.plan.types import Device


def needs_zero3_of_deepspeed(ctx: RuleContext) -> Iterator[Problem]:
    """Without ZeRO 3 DeepSpeed ignores all three."""
    used = _used(ctx)
    if not used:
        return
    if not ctx.deepspeed:
        yield make_error(
            ctx.config,
            f"{used[0]} engine.name",
            "only DeepSpeed has ZeRO++",
            "write engine=deepspeed zero=stage3, or leave it out",
        )
    elif ctx.config.zero.stage != 3:
        yield make_error(
            ctx.config,
            f"{used[0]} zero.stage",
            "ZeRO++ changes how ZeRO 3 gathers weights and reduces gradients",
            "write zero=stage3, or leave it out",
        )
    elif ctx.config.parallel.tensor > 1:
        yield make_error(
            ctx.config,
            f"{used[0]} parallel.tensor",
            "its groups are adjacent ranks, which have different shards of the weights under tensor "
            "parallelism",
            "write parallel.tensor=1, or leave it out",
        )


def hpz_divides_the_ranks(ctx: RuleContext) -> Iterator[Problem]:
    """DeepSpeed asserts this after the ranks have started, and silently uses fewer ranks if there are too
    few.
    """
    size, axes = ctx.config.zero.hpz_partition_size, ctx.axes
    if not _runs(ctx) or axes is None or size < 2:
        return
    ranks, node = axes.data * axes.context, ctx.world.ranks_per_node
    fitting = max(part for part in range(1, min(size, ranks) + 1) if ranks % part == 0)
    if fitting != size:
        yield Problem(
            "zero.hpz_partition_size",
            f"zero.hpz_partition_size={size} on {ranks} ranks",
            "each group of this many ranks, usually a node, keeps a second copy of the weights, so it "
            "must divide the number of ranks",
            f"write zero.hpz_partition_size={fitting}" if fitting > 1 else "leave it out",
        )
    elif ctx.world.nodes > 1 and node % size:
        yield make_warning(
            ctx.config,
            "zero.hpz_partition_size",
            f"a node has {node} ranks, so groups lie across nodes, and backward gathers over the network",
            f"write zero.hpz_partition_size={node}",
        )


def quantised_weights(ctx: RuleContext) -> Iterator[Problem]:
    if not _runs(ctx) or not ctx.config.zero.quantized_weights:
        return
    if ctx.world.device is Device.CPU:
        yield _on_cpus(ctx, "zero.quantized_weights")
    elif ctx.config.precision.name is Precision.fp32:
        yield make_error(
            ctx.config,
            "zero.quantized_weights precision.name",
            "DeepSpeed's kernel reads and writes 16 bits, so a run in fp32 would not compute in fp32",
            "write precision=bf16, or leave it out",
        )


def quantised_gradients(ctx: RuleContext) -> Iterator[Problem]:
    """The kernel (csrc/quantization/pt_binding.cpp, ``ds_swizzle_quant``) reads its input as fp16 whatever
    its dtype is, and ``__avg_scatter_grads`` (runtime/zero/stage3.py) uses it only on several nodes.
    """
    if not _runs(ctx) or not ctx.config.zero.quantized_gradients:
        return
    key = "zero.quantized_gradients"
    if ctx.world.device is Device.CPU:
        yield _on_cpus(ctx, key)
    elif ctx.config.precision.name is not Precision.fp16:
        yield make_error(
            ctx.config,
            f"{key} precision.name",
            "DeepSpeed's kernel interprets every gradient as fp16, so other dtypes are silently corrupted",
            "write precision=fp16, or leave it out",
        )
    elif ctx.world.nodes == 1:
        yield Problem(
            key,
            f"{key}=true on one node",
            "DeepSpeed quantises gradients only between nodes, so it would have no effect",
            "leave it out",
        )


def _on_cpus(ctx: RuleContext, key: str) -> Problem:
    return Problem(key, f"{key}=true on CPU ranks", "ZeRO++ quantisation runs on GPUs only", "leave it out")


def _runs(ctx: RuleContext) -> bool:
    """Whether the first rule is satisfied."""
    return ctx.deepspeed and ctx.config.zero.stage == 3 and ctx.config.parallel.tensor == 1


def _used(ctx: RuleContext) -> list[str]:
    zero = ctx.config.zero
    values = {
        "zero.hpz_partition_size": zero.hpz_partition_size > 1,
        "zero.quantized_weights": zero.quantized_weights,
        "zero.quantized_gradients": zero.quantized_gradients,
    }
    return [key for key, used in values.items() if used]


RULES: tuple[Rule, ...] = (
    needs_zero3_of_deepspeed,
    hpz_divides_the_ranks,
    quantised_weights,
    quantised_gradients,
)
