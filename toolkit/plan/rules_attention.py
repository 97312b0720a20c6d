"""Rules about ``model.attention``."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.data import DocumentMasking
from toolkit.config.kernels import AttentionKernel
from toolkit.errors import Problem
from toolkit.plan.attention import find_obstacle, has_dense_mask
from toolkit.plan.rule_context import Rule, RuleContext, format_keys, make_error, make_warning
from toolkit.plan.types import Device

# Settings of Transformer Engine's attention, which torch's attention ignores.
TRANSFORMER_ENGINE_SETTINGS = ("cp_comm_type", "fp8_dot_product_attention", "fp8_multi_head_attention")


def attention_kernel_is_possible(ctx: RuleContext) -> Iterator[Problem]:
    config, kernel = ctx.config, ctx.config.model.attention
    if kernel is AttentionKernel.auto:
        return
    if config.model.source_key == "model.target":
        yield make_error(
            config,
            "model.attention model.target",
            "a model of your own computes its own attention",
            "leave out model.attention",
        )
        return
    if not ctx.of_a_family and kernel is AttentionKernel.flash:
        yield make_error(
            config,
            "model.attention model.hf.architecture",
            "only the families' attention can be restricted to flash kernels; other models use them if torch "
            "can",
            "write model.attention=sdpa",
        )
        return
    obstacle = find_obstacle(kernel, config, ctx.world, ctx.shape)
    if obstacle is not None:
        yield make_error(config, f"model.attention {obstacle.keys}", obstacle.rule, obstacle.remedy)


def dense_masks_are_slow(ctx: RuleContext) -> Iterator[Problem]:
    """A mask of all pairs is slow on GPUs. On CPUs it is the plain path, with which GPU kernels are
    compared.
    """
    config = ctx.config
    if ctx.kernels is None or ctx.batch is None or ctx.world.device is Device.CPU:
        return
    choice = ctx.kernels.attention
    if not has_dense_mask(config, choice.name):
        return
    separate = config.data.documents is DocumentMasking.separate
    cause = "data.documents" if separate else "parallel.context"
    faster = AttentionKernel.flex if separate else AttentionKernel.flash
    obstacle = find_obstacle(faster, config, ctx.world, ctx.shape)
    queries, rows = config.train.sequence_length, ctx.batch.micro_batch if separate else 1
    if ctx.megatron:
        queries //= config.parallel.context
    size = rows * queries * config.train.sequence_length
    why = f", because {obstacle.rule}" if obstacle is not None else ""
    yield make_warning(
        config,
        f"model.attention {cause}",
        f"attention with a mask of all pairs of tokens{why}: flash kernels take none, and the mask of a "
        f"micro-batch has {size / 2**20:,.0f} MiB, and as many numbers again in every layer",
        f"write model.attention={faster.value}" if obstacle is None else obstacle.remedy,
    )


def megatron_attention_settings_have_an_effect(ctx: RuleContext) -> Iterator[Problem]:
    """Without this rule these keys would be ignored silently."""
    config = ctx.config
    separate = config.data.documents is DocumentMasking.separate
    chosen = config.model.attention is not AttentionKernel.auto
    if not ctx.megatron or not (separate or chosen):
        return
    cause, remedy = (
        ("data.documents", "data.documents=joined")
        if separate
        else ("model.attention", "model.attention=auto")
    )
    for name in TRANSFORMER_ENGINE_SETTINGS:
        value, key = config.engine.megatron.get(name), f"engine.megatron.{name}"
        if value is not None and value is not False and value != "none":
            yield Problem(
                key,
                f"{key}={value}, {format_keys(config, cause)}",
                "separate documents and model.attention use torch's attention, which replaces Transformer "
                "Engine's",
                f"leave out {key}, or write {remedy}",
            )


RULES: tuple[Rule, ...] = (
    attention_kernel_is_possible,
    dense_masks_are_slow,
    megatron_attention_settings_have_an_effect,
)
