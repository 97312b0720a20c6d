"""Rules about what the local engine and DeepSpeed 0.19.8 can run, and what DeepSpeed silently gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from toolkit.config.schema import EngineName, OffloadDevice, OptimizerKernel, OptimizerName, Precision
from toolkit.errors import Problem
from toolkit.plan.deepspeed import accumulates_in_fp32
from toolkit.plan.rule_context import Rule, RuleContext, refuse, warn
from toolkit.plan.types import Device


def local_is_one_rank(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.config.engine.name is EngineName.local and ctx.world.ranks > 1:
        yield Problem(
            "engine.name",
            f"engine.name=local with {ctx.world.ranks} ranks",
            "the local engine is one process",
            "write engine=deepspeed, or start one rank: python launch/train.py cluster.nodes=1 "
            "cluster.cpu_ranks=1 "
            "(cluster.gpus_per_node=1 on GPUs)",
        )


def vendor_keys(ctx: RuleContext) -> Iterator[Problem]:
    yield from ctx.engine_problems


def sixteen_bits_need_a_stage(ctx: RuleContext) -> Iterator[Problem]:
    """The constructors of BF16_Optimizer and the FP16 optimizers take a step with zero gradients.

    Adam's step count starts at 1, and the weights decay once. Measured: 1.4e-2 in the loss.
    """
    if ctx.deepspeed and ctx.config.zero.stage == 0 and ctx.config.precision.name is not Precision.fp32:
        yield refuse(
            ctx.config,
            "zero.stage precision.name",
            "in 16 bits DeepSpeed's stage 0 takes a hidden optimizer step at the start",
            "write zero=stage1, which computes what stage 0 should",
        )


def gradients_accumulate_in_bf16(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    if (
        not ctx.deepspeed
        or config.precision.name is not Precision.bf16
        or accumulates_in_fp32(config)
        or ctx.batch is None
    ):
        return
    steps = ctx.batch.global_batch // (ctx.batch.micro_batch * ctx.batch.data_parallel)
    if (
        steps > 1
        and config.zero.stage in (1, 2)
        and _get(config.engine.deepspeed, "data_types.grad_accum_dtype") is None
    ):
        better = (
            "write zero=stage2, which accumulates in fp32"
            if config.zero.stage == 1 and config.offload.optimizer is OffloadDevice.none
            else "write zero=stage3, which accumulates in fp32"
        )
        if config.parallel.pipeline > 1:
            better = "write +engine.deepspeed.data_types.grad_accum_dtype=fp32"
        yield warn(
            config,
            "zero.stage precision.name offload.optimizer",
            f"the gradients of {steps} micro-batches accumulate in bf16, which loses small values",
            f"{better}, or raise train.micro_batch",
        )


def kernel_fits(ctx: RuleContext) -> Iterator[Problem]:
    config, kernel = ctx.config, ctx.config.optim.kernel
    offloaded = config.offload.optimizer is not OffloadDevice.none
    if kernel in (OptimizerKernel.auto, OptimizerKernel.torch) or ctx.megatron:
        return
    if config.optim.name is not OptimizerName.adamw:
        yield refuse(
            config,
            "optim.kernel optim.name",
            "only adamw has kernels other than torch's",
            "write optim.kernel=auto",
        )
    elif kernel is OptimizerKernel.cpu and not (ctx.deepspeed and offloaded):
        yield refuse(
            config,
            "optim.kernel offload.optimizer engine.name",
            "DeepSpeed's CPU Adam runs only if the optimizer is offloaded",
            "write offload=cpu_optimizer, or optim.kernel=auto",
        )
    elif kernel is OptimizerKernel.cpu and not ctx.world.has_compiler:
        yield Problem(
            "optim.kernel",
            "optim.kernel=cpu on a machine without a C++ compiler",
            "DeepSpeed compiles its CPU Adam on first use",
            "install g++, or write optim.kernel=torch",
        )
    elif kernel is OptimizerKernel.fused and (ctx.world.device is Device.CPU or offloaded):
        yield Problem(
            "optim.kernel",
            f"optim.kernel=fused on {ctx.world.device}, offload.optimizer={config.offload.optimizer.value}",
            "the fused kernel runs on a GPU that has the optimizer's states",
            "write optim.kernel=auto",
        )


def muon_limits(ctx: RuleContext) -> Iterator[Problem]:
    """DeepSpeed applies Muon to tensors with two or more dims and no ``embed`` or ``lm_head`` in the name."""
    config, optim = ctx.config, ctx.config.optim
    if optim.name is not OptimizerName.muon:
        return
    if not optim.momentum:
        yield warn(
            config,
            "optim.momentum optim.name",
            "Muon orthogonalises a running average of gradients, and momentum 0 disables the average",
            "write optim.momentum=0.95",
        )
    if not ctx.deepspeed:
        return
    if optim.clip:
        yield refuse(
            config,
            "optim.clip optim.name",
            "Muon runs without clipping: DeepSpeed would clip updates under ZeRO 1-3, and gradients under "
            "ZeRO 0",
            "write optim.clip=0",
        )
    if ctx.traits is not None and ctx.traits.muon is not None:
        yield refuse(config, "optim.name model.family", ctx.traits.muon, "write optim=adamw")
    if OffloadDevice.nvme in (config.offload.optimizer, config.offload.parameters):
        yield refuse(
            config,
            "optim.name offload.optimizer",
            "Muon's momentum cannot be offloaded to NVMe",
            "write offload=cpu, or optim=adamw",
        )


# -- DeepSpeed keys of the user that silently change the run or have no effect, depending on the run. Keys
# that are wrong in every run are refused by config/engine_keys.py.

Condition = Callable[[Any, RuleContext], bool]


def _on(value: Any, ctx: RuleContext) -> bool:
    return bool(value)


def _off(value: Any, ctx: RuleContext) -> bool:
    return value is False


def _on_cpu(value: Any, ctx: RuleContext) -> bool:
    return bool(value) and ctx.world.device is Device.CPU


def _partial_below_stage3(value: Any, ctx: RuleContext) -> bool:
    return isinstance(value, int | float) and value < 1 and ctx.config.zero.stage != 3


def _other_precision(value: Any, ctx: RuleContext) -> bool:
    """fp32 is exact in every run."""
    return value not in (None, Precision.fp32.value, ctx.config.precision.name.value)


def _hpz_below_stage3(value: Any, ctx: RuleContext) -> bool:
    return isinstance(value, int) and value > 1 and ctx.config.zero.stage != 3


# (key, condition, rule, remedy)
SILENT: tuple[tuple[str, Condition, str, str], ...] = (
    (
        "bf16.check_grad_overflow",
        _off,
        "every engine skips steps with a non-finite gradient (train.on_nonfinite)",
        "leave it out",
    ),
    (
        "zero_optimization.compute_grad_norm",
        _off,
        "clipping and the metric grad_norm need the norm",
        "leave it out",
    ),
    (
        "zero_optimization.zenflow",
        _on,
        "ZenFlow updates weights with old gradients, so no other engine can reproduce the run",
        "leave it out",
    ),
    (
        "zero_optimization.zero_quantized_gradients",
        _on_cpu,
        "ZeRO++ quantisation runs on GPUs only",
        "leave it out on CPUs",
    ),
    (
        "zero_optimization.zero_quantized_weights",
        _on_cpu,
        "ZeRO++ quantisation runs on GPUs only",
        "leave it out on CPUs",
    ),
    (
        "zero_optimization.offload_optimizer.super_offload",
        _on_cpu,
        "SuperOffload runs on GPUs only",
        "leave it out on CPUs",
    ),
    (
        "zero_optimization.offload_optimizer.ratio",
        _partial_below_stage3,
        "partial offload needs ZeRO 3",
        "write zero=stage3, or leave it out",
    ),
    (
        "zero_optimization.zero_hpz_partition_size",
        _hpz_below_stage3,
        "hpZ keeps a second copy of the weights that ZeRO 3 shards",
        "write zero=stage3, or leave it out",
    ),
    *(
        (
            key,
            _other_precision,
            "gradients would be rounded to another precision than the run's, and no other engine could "
            "reproduce it",
            "leave it out, or write precision=bf16 or precision=fp16",
        )
        for key in (
            "communication_data_type",
            "seq_parallel_communication_data_type",
            "data_types.grad_accum_dtype",
        )
    ),
    ("compile.deepcompile", _on_cpu, "DeepCompile runs on GPUs only", "leave it out on CPUs"),
)


def silently_wrong_keys(ctx: RuleContext) -> Iterator[Problem]:
    for key, wrong, why, remedy in SILENT:
        value = _get(ctx.config.engine.deepspeed, key)
        if value is not None and wrong(value, ctx):
            shown = "..." if isinstance(value, Mapping) else value
            yield Problem(f"engine.deepspeed.{key}", f"engine.deepspeed.{key}={shown}", why, remedy)


def hpz_divides_the_ranks(ctx: RuleContext) -> Iterator[Problem]:
    """DeepSpeed asserts this after the ranks have started, and silently uses fewer ranks if there are too
    few.

    Another rule refuses hpZ with tensor parallelism.
    """
    key = "zero_optimization.zero_hpz_partition_size"
    size, axes = _get(ctx.config.engine.deepspeed, key), ctx.axes
    if (
        not ctx.deepspeed
        or axes is None
        or not isinstance(size, int)
        or size < 2
        or ctx.config.zero.stage != 3
        or axes.tensor > 1
    ):
        return
    ranks = axes.data * axes.context
    fitting = max(part for part in range(1, min(size, ranks) + 1) if ranks % part == 0)
    if fitting != size:
        remedy = f"write +engine.deepspeed.{key}={fitting}" if fitting > 1 else "leave it out"
        yield Problem(
            f"engine.deepspeed.{key}",
            f"engine.deepspeed.{key}={size} on {ranks} ranks",
            "each group of this many ranks, usually a node, keeps a second copy of the weights, so it "
            "divides the number of ranks",
            remedy,
        )


def _get(keys: Mapping[str, Any], path: str) -> Any:
    value: Any = keys
    for part in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


RULES: tuple[Rule, ...] = (
    local_is_one_rank,
    vendor_keys,
    silently_wrong_keys,
    hpz_divides_the_ranks,
    sixteen_bits_need_a_stage,
    gradients_accumulate_in_bf16,
    kernel_fits,
    muon_limits,
)
