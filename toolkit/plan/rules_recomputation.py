"""Rules about activations that are recomputed or offloaded."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.recomputation import KEY, RecomputationMode
from toolkit.config.schema import OffloadDevice
from toolkit.errors import Problem
from toolkit.plan.rule_context import Rule, RuleContext, make_error
from toolkit.plan.transformer_engine import has_transformer_engine


def every_nth_block_exists(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.shape is not None and ctx.config.train.recomputation.every > ctx.shape.num_hidden_layers:
        yield make_error(
            ctx.config,
            f"{KEY} model.num_hidden_layers",
            f"every N-th block of the model's {ctx.shape.num_hidden_layers} is recomputed",
            f"write {KEY}={ctx.shape.num_hidden_layers} or less, full or none",
        )


def selective_fits_the_engine(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    if not config.train.recomputation.selective:
        return
    if ctx.megatron and has_transformer_engine(ctx.world) and not ctx.has_experts:
        yield make_error(
            config,
            f"{KEY} engine.name",
            "of cheap submodules Megatron-core has norms only, and Transformer Engine computes them within "
            "matrix products: nothing is left to recompute",
            f"write {KEY}=2, {KEY}=full, or engine=deepspeed",
        )
    if not ctx.deepspeed:
        return
    # Results of matrix products are stored, so nothing may change them in place: torch detects it, and fails.
    if config.parallel.tensor > 1:
        yield make_error(
            config,
            f"{KEY} parallel.tensor",
            "DeepSpeed's tensor parallelism sums results of matrix products in place, and selective "
            "recomputation would sum them twice",
            f"write {KEY}=full, or engine=megatron",
        )
    elif config.zero.stage == 3 and _has_linear_biases(ctx):
        yield make_error(
            config,
            f"{KEY} zero.stage",
            "DeepSpeed's linear layer under ZeRO 3 adds biases to results of matrix products in place, and "
            "selective recomputation would add them twice",
            f"write {KEY}=full, or zero=stage2",
        )


def _has_linear_biases(ctx: RuleContext) -> bool:
    """Whether a linear layer, which DeepSpeed replaces under ZeRO 3, has a bias."""
    dims = {spec.name: len(spec.shape) for spec in ctx.parameters}
    biases = (name.removesuffix(".bias") for name in dims if name.endswith(".bias"))
    linear = ctx.traits is None or ctx.traits.linear_layers
    return linear and any(dims.get(f"{layer}.weight") == 2 for layer in biases)


def activations_can_be_offloaded(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    device, recomputation = config.offload.activations, config.train.recomputation
    if device is OffloadDevice.none:
        return
    if device is OffloadDevice.nvme:
        yield make_error(
            config,
            "offload.activations",
            "activations are offloaded to host memory; a disk is slower than computing them again",
            f"write offload.activations=cpu {KEY}=full",
        )
    elif config.model.target is not None:
        yield make_error(
            config,
            "offload.activations model.target",
            "the inputs of recomputed blocks are offloaded, and a model of your own decides itself what to "
            "recompute",
            "write offload.activations=none, and use torch.autograd.graph.save_on_cpu in the model",
        )
    elif recomputation.mode is not RecomputationMode.full:
        yield make_error(
            config,
            f"offload.activations {KEY}",
            "inputs of recomputed blocks are offloaded; copying all that a block stores would take longer "
            "than computing it",
            f"write {KEY}=full, or offload.activations=none",
        )
    elif ctx.megatron and recomputation.every > 1:
        yield make_error(
            config,
            f"offload.activations {KEY} engine.name",
            "with Megatron-core the inputs of all blocks are offloaded, or of none",
            f"write {KEY}=full, or offload.activations=none",
        )


RULES: tuple[Rule, ...] = (every_nth_block_exists, selective_fits_the_engine, activations_can_be_offloaded)
