"""Rules about what Megatron-core 0.16 can run, and what it would silently ignore or get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit.config.engine_keys_megatron import GPU_ONLY, TRANSFORMER_ENGINE
from toolkit.config.keys import format_value
from toolkit.config.recomputation import KEY, RecomputationMode
from toolkit.config.schema import Precision
from toolkit.config.vendors.installed import MEGATRON
from toolkit.errors import Problem, Severity
from toolkit.plan.kernels import LOSS_FUSION
from toolkit.plan.rule_context import Rule, RuleContext, make_error, make_warning
from toolkit.plan.transformer_engine import COST, TESTED, has_transformer_engine, install_command
from toolkit.plan.types import Device

ROOT = "engine.megatron"
STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
VIRTUAL, GROUP = "virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage"
# Submodules of the families' blocks that can be recomputed; Megatron-core's other submodules belong to other
# architectures.
RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe")


def is_installed(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.megatron and not MEGATRON.installed:
        yield make_error(
            ctx.config,
            "engine.name",
            "engine=megatron needs Megatron-core, which is not installed",
            "install it: pip install 'megatron-core==0.16.*'",
        )


def stage_three(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.megatron and ctx.config.zero.stage == 3:
        yield make_error(
            ctx.config,
            "zero.stage engine.name",
            "Megatron-core's distributed optimizer shards only optimizer states; parallel.tensor and "
            "parallel.pipeline shard parameters",
            "write zero=stage2, or engine=deepspeed",
        )


def model_is_a_familys(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.megatron and not ctx.of_a_family:
        yield make_error(
            ctx.config,
            f"{ctx.config.model.source_key} engine.name",
            "Megatron-core builds the families' models from its own layers",
            "write engine=deepspeed",
        )


# -- the user's own settings


def loss_fusion_fits(ctx: RuleContext) -> Iterator[Problem]:
    given = ctx.config.engine.megatron if ctx.megatron else {}
    implementation = given.get("cross_entropy_fusion_impl", "native")
    if not given.get(LOSS_FUSION):
        if "cross_entropy_fusion_impl" in given:
            yield make_error(
                ctx.config,
                f"{ROOT}.cross_entropy_fusion_impl",
                "it chooses the kernel of cross_entropy_loss_fusion, which is off",
                f"write +{ROOT}.{LOSS_FUSION}=true, or leave it out",
            )
    elif implementation == "te" and not has_transformer_engine(ctx.world):
        yield make_error(
            ctx.config,
            f"{ROOT}.cross_entropy_fusion_impl",
            "te is a GPU kernel of Transformer Engine, which is not installed",
            "write train.loss_kernel=fused and leave out both settings",
        )
    elif implementation == "native" and ctx.config.precision.name is not Precision.bf16:
        yield make_error(
            ctx.config,
            f"{ROOT}.{LOSS_FUSION} precision.name",
            "Megatron-core's fused cross-entropy rounds gradients to bf16 in every precision",
            "write train.loss_kernel=fused and leave it out, or write precision=bf16",
        )


def settings_fit_the_device(ctx: RuleContext) -> Iterator[Problem]:
    if not ctx.megatron:
        return
    for name, value in ctx.config.engine.megatron.items():
        if name in GPU_ONLY and ctx.world.device is Device.CPU:
            yield _key_problem(
                ctx,
                name,
                "it fails or has no effect on CPU ranks: its kernels and streams need a GPU",
                "leave it out on CPUs",
            )
        elif name in TRANSFORMER_ENGINE and ctx.world.device is Device.CPU:
            yield _key_problem(
                ctx,
                name,
                "only Transformer Engine's layers, which need a GPU, support it; other layers ignore it "
                "silently",
                "leave it out on CPUs",
            )
        elif name in TRANSFORMER_ENGINE and not has_transformer_engine(ctx.world):
            yield _key_problem(
                ctx,
                name,
                f"only the layers of Transformer Engine {TESTED} support it; other layers ignore it silently",
                f"leave it out, or install it: {install_command(ctx.world.torch_cuda)}",
            )
        elif (
            name == "gradient_accumulation_fusion"
            and value
            and ctx.world.device is Device.CPU
            and ctx.config.precision.name is not Precision.fp32
        ):
            yield _key_problem(
                ctx,
                name,
                "on CPUs torch has no matrix product of 16-bit factors with an fp32 sum",
                "leave it out on CPUs",
            )
        elif name == "moe_token_dispatcher_type" and value == "flex" and ctx.world.device is Device.CPU:
            yield _key_problem(
                ctx, name, "the flex dispatcher runs only on GPUs", f"write +{ROOT}.{name}=alltoall"
            )


def layers_are_transformer_engines(ctx: RuleContext) -> Iterator[Problem]:
    """Without it Megatron-core's own layers run, which is correct and slower."""
    world = ctx.world
    if ctx.megatron and world.device is Device.CUDA and not has_transformer_engine(world):
        installed = world.transformer_engine
        seen = "without Transformer Engine" if installed is None else f"with Transformer Engine {installed}"
        yield Problem(
            "engine.name",
            f"engine.name=megatron {seen}",
            f"Megatron-core 0.16 has fast layers for GPUs in Transformer Engine {TESTED}; {COST}",
            f"install it: {install_command(world.torch_cuda)}",
            Severity.WARNING,
        )


def sequence_parallel(ctx: RuleContext) -> Iterator[Problem]:
    """If the user does not set it, the plan uses it whenever it fits."""
    if not ctx.megatron:
        return
    config, name = ctx.config, "sequence_parallel"
    tensor, context = config.parallel.tensor, config.parallel.context
    length, wanted = config.train.sequence_length // context, config.engine.megatron.get(name)
    if wanted and tensor == 1:
        yield _key_problem(
            ctx,
            name,
            "sequence parallelism spreads norms and dropout over the tensor ranks, and there is one",
            "write parallel.tensor=2, or leave it out",
        )
    elif wanted and length % tensor:
        yield _key_problem(
            ctx,
            name,
            f"the {length} tokens of a context rank must be divisible by parallel.tensor={tensor}",
            f"write train.sequence_length={_round_up(length, tensor) * context}, or leave it out",
        )
    elif tensor > 1 and ctx.has_experts and wanted is False:
        yield _key_problem(
            ctx,
            name,
            "experts with tensor parallelism need sequence parallelism: otherwise each tensor rank routes "
            "all tokens",
            "leave it out",
        )
    elif tensor > 1 and ctx.has_experts and length % tensor:
        yield make_error(
            config,
            "train.sequence_length parallel.tensor",
            f"experts with tensor parallelism need sequence parallelism, so the {length} tokens of a context "
            f"rank must be divisible by it",
            f"write train.sequence_length={_round_up(length, tensor) * context}, or parallel.tensor=1",
        )


def recomputation(ctx: RuleContext) -> Iterator[Problem]:
    if not ctx.megatron:
        return
    given = ctx.config.engine.megatron
    names = [name for name in given if name.startswith("recompute_")]
    if ctx.config.train.recomputation.mode is not RecomputationMode.none:
        for name in names:
            yield _key_problem(
                ctx,
                name,
                f"{KEY}={ctx.config.train.activation_checkpointing} decides what is recomputed",
                "leave it out, or write train.activation_checkpointing=none",
            )
        return
    granularity = given.get("recompute_granularity")
    if names and granularity is None:
        yield _key_problem(
            ctx,
            names[0],
            "it has no effect without recompute_granularity",
            f"write +{ROOT}.recompute_granularity=full",
        )
    elif granularity == "full":
        for name, example in (("recompute_method", "uniform"), ("recompute_num_layers", "1")):
            if given.get(name) is None:
                yield _key_problem(
                    ctx,
                    "recompute_granularity",
                    f"full recomputation needs {name}",
                    f"write +{ROOT}.{name}={example}",
                )
    elif granularity == "selective":
        for name in ("recompute_method", "recompute_num_layers"):
            if given.get(name) is not None:
                yield _key_problem(ctx, name, "selective recomputation applies to all layers", "leave it out")
    modules = given.get("recompute_modules") or []
    wrong = (
        [str(module) for module in modules if module not in RECOMPUTED] if isinstance(modules, list) else []
    )
    if wrong:
        yield _key_problem(
            ctx,
            "recompute_modules",
            f"submodules that can be recomputed are {', '.join(RECOMPUTED)}",
            f"write +{ROOT}.recompute_modules=[core_attn]",
        )
    if "mlp" in modules and ctx.traits is not None and ctx.traits.biases:
        yield _key_problem(
            ctx,
            "recompute_modules",
            "recomputing the mlp hangs in families whose linear layers have biases: Megatron-core returns "
            "the bias "
            "separately and tries to recompute it",
            "leave out mlp, or recompute blocks: train.activation_checkpointing=full",
        )


def overlaps(ctx: RuleContext) -> Iterator[Problem]:
    """On GPUs the plan overlaps communication by default; the user's keys must be consistent with that."""
    if not ctx.megatron:
        return
    given, gpu, sharded = (
        ctx.config.engine.megatron,
        ctx.world.device is Device.CUDA,
        ctx.config.zero.stage > 0,
    )
    reduces, gathers = (
        given.get("overlap_grad_reduce", gpu),
        given.get("overlap_param_gather", gpu and sharded),
    )
    if given.get("overlap_param_gather") and not sharded:
        yield _key_problem(
            ctx,
            "overlap_param_gather",
            "only the distributed optimizer gathers parameters",
            "write zero=stage1",
        )
    elif gathers and not reduces:
        name = "overlap_param_gather" if "overlap_param_gather" in given else "overlap_grad_reduce"
        yield _key_problem(
            ctx,
            name,
            "overlapping the gather needs overlapping reductions",
            f"write +{ROOT}.overlap_grad_reduce=true, or +{ROOT}.overlap_param_gather=false",
        )
    elif given.get("align_param_gather") and not gathers:
        yield _key_problem(
            ctx,
            "align_param_gather",
            "it aligns overlapping gathers",
            f"write +{ROOT}.overlap_param_gather=true",
        )
    elif given.get("bucket_size") is not None and not reduces:
        yield _key_problem(
            ctx,
            "bucket_size",
            "gradients are reduced in buckets only if the reduction overlaps",
            f"write +{ROOT}.overlap_grad_reduce=true, or leave it out",
        )


# -- stages


def first_and_last_stage(ctx: RuleContext) -> Iterator[Problem]:
    """After ``num_layers_in_{first,last}_pipeline_stage``, the other stages divide the rest evenly."""
    given = {name: ctx.config.engine.megatron.get(name) for name in STAGES} if ctx.megatron else {}
    written = {name: value for name, value in given.items() if isinstance(value, int)}
    stages, shape = ctx.config.parallel.pipeline, ctx.shape
    if not written or shape is None:
        return
    first = next(iter(written))
    if stages == 1:
        yield _key_problem(
            ctx,
            first,
            "it sets the size of a pipeline stage, and there is no pipeline",
            "write parallel.pipeline=2, or leave it out",
        )
        return
    between, left = stages - len(written), shape.num_hidden_layers - sum(written.values())
    if min(written.values()) < 1 or left < between or (between == 0 and left) or (between and left % between):
        layers = f"model.num_hidden_layers={shape.num_hidden_layers}"
        rest = f"{layers} minus {sum(written.values())} leaves {left} for {between} stages"
        yield _key_problem(
            ctx,
            first,
            f"each stage has at least one layer, and the other stages have equally many: {rest}",
            f"write +{ROOT}.{first}={_nearest_fitting_size(shape.num_hidden_layers, stages, written, first)}",
        )


def virtual_stages(ctx: RuleContext) -> Iterator[Problem]:
    if not ctx.megatron:
        return
    config, given, shape = ctx.config, ctx.config.engine.megatron, ctx.shape
    chunks, stages = given.get(VIRTUAL), config.parallel.pipeline
    if not isinstance(chunks, int) or isinstance(chunks, bool):
        if given.get(GROUP) is not None:
            yield _key_problem(
                ctx,
                GROUP,
                "it groups the micro-batches of virtual stages, and there are no virtual stages",
                f"write +{ROOT}.{VIRTUAL}=2",
            )
        return
    if chunks < 2:
        yield _key_problem(
            ctx, VIRTUAL, "a rank has at least two virtual stages, or one plain stage", "leave it out"
        )
        return
    if stages == 1:
        yield _key_problem(
            ctx, VIRTUAL, "virtual stages need a pipeline", "write parallel.pipeline=2, or leave it out"
        )
        return
    if shape is not None:
        uneven = [given[name] for name in STAGES if isinstance(given.get(name), int)]
        layers = shape.num_hidden_layers
        if any(size % chunks for size in uneven) or (not uneven and layers % (stages * chunks)):
            yield _key_problem(
                ctx,
                VIRTUAL,
                f"model.num_hidden_layers={layers} must be divisible by parallel.pipeline x virtual stages = "
                f"{stages * chunks}, and a stage with its own size by {chunks}",
                f"write model.num_hidden_layers={_round_up(layers, stages * chunks)}, or leave it out"
                if ctx.sizes_are_free
                else "leave it out",
            )
    if ctx.batch is None:
        return
    group = given.get(GROUP)
    for accumulation in sorted(set(ctx.batch.accumulations)):
        size = group if isinstance(group, int) else stages
        left = accumulation % size if size else 0
        if not stages <= size <= accumulation or 0 < left < stages:
            whole = _round_up(accumulation, stages) * ctx.batch.micro_batch * ctx.batch.data_parallel
            yield _key_problem(
                ctx,
                VIRTUAL,
                f"interleaved stages process {stages} micro-batches at a time (parallel.pipeline), and a "
                f"step has "
                f"{accumulation}",
                f"write train.global_batch={whole}, a smaller train.micro_batch, or leave it out",
            )
            return


def pipeline_is_filled(ctx: RuleContext) -> Iterator[Problem]:
    """The bubble of 1F1B is (p - 1) / (v m) of the time (Narayanan et al., 2104.04473, section 2.2)."""
    stages, batch = ctx.config.parallel.pipeline, ctx.batch
    if stages == 1 or batch is None or ctx.world.device is Device.CPU:
        return
    micro_batches = batch.accumulation
    if micro_batches < stages:
        yield make_warning(
            ctx.config,
            "train.micro_batch parallel.pipeline",
            f"a step has {micro_batches} micro-batches for {stages} stages, so stages are idle most of the "
            f"time",
            "write a smaller train.micro_batch, or a larger train.global_batch",
        )


def _key_problem(ctx: RuleContext, name: str, rule: str, remedy: str) -> Problem:
    value: Any = ctx.config.engine.megatron[name]
    return Problem(f"{ROOT}.{name}", f"{ROOT}.{name}={format_value(value)}", rule, remedy)


def _round_up(value: int, multiple: int) -> int:
    return max(1, -(-value // multiple)) * multiple


def _nearest_fitting_size(layers: int, stages: int, written: dict[str, int], name: str) -> int:
    """Return the nearest size of the stage ``name`` that leaves a whole number of layers for the stages
    between.
    """
    others = sum(size for other, size in written.items() if other != name)
    between = stages - len(written)
    fits = [
        size
        for size in range(1, layers)
        if (left := layers - others - size) >= between and not (left % between if between else left)
    ]
    return min(fits, key=lambda size: abs(size - written[name]), default=1)


RULES: tuple[Rule, ...] = (
    is_installed,
    stage_three,
    model_is_a_familys,
    settings_fit_the_device,
    loss_fusion_fits,
    layers_are_transformer_engines,
    sequence_parallel,
    recomputation,
    overlaps,
    first_and_last_stage,
    virtual_stages,
    pipeline_is_filled,
)
