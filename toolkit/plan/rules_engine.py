"""Rules of the engines: what each can carry out, and what DeepSpeed 0.19.8 would do wrong without saying so."""

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
    """BF16_Optimizer and the FP16 optimizers take a step with zero gradients while they are made: Adam's step
    count starts at 1 and the weights decay once. Measured: 1.4e-2 in the loss.
    """
    if ctx.deepspeed and ctx.config.zero.stage == 0 and ctx.config.precision.name is not Precision.fp32:
        yield refuse(
            ctx.config,
            "zero.stage precision.name",
            "in 16 bits DeepSpeed's stage 0 takes a hidden optimizer step at the start",
            "write zero=stage1, which computes what stage 0 should",
        )


def bf16_sums(ctx: RuleContext) -> Iterator[Problem]:
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
            "write zero=stage2, which sums in fp32"
            if config.zero.stage == 1 and config.offload.optimizer is OffloadDevice.none
            else "write zero=stage3, which sums in fp32"
        )
        if config.parallel.pipeline > 1:
            better = "write +engine.deepspeed.data_types.grad_accum_dtype=fp32"
        yield warn(
            config,
            "zero.stage precision.name offload.optimizer",
            f"the gradients of {steps} micro-batches are summed in bf16, which loses small ones",
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
            "only adamw has other kernels than torch's",
            "write optim.kernel=auto",
        )
    elif kernel is OptimizerKernel.cpu and not (ctx.deepspeed and offloaded):
        yield refuse(
            config,
            "optim.kernel offload.optimizer engine.name",
            "DeepSpeed's CPU Adam runs where the optimizer is offloaded",
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
            "the fused kernel runs on a GPU that holds the optimizer's states",
            "write optim.kernel=auto",
        )


def muon_limits(ctx: RuleContext) -> Iterator[Problem]:
    """DeepSpeed gives to Muon each tensor of two or more dims whose name has neither ``embed`` nor
    ``lm_head``.
    """
    config, optim = ctx.config, ctx.config.optim
    if optim.name is not OptimizerName.muon:
        return
    if not optim.momentum:
        yield warn(
            config,
            "optim.momentum optim.name",
            "Muon orthogonalises a running average of gradients; momentum 0 keeps none",
            "write optim.momentum=0.95",
        )
    if not ctx.deepspeed:
        return
    if optim.clip:
        yield refuse(
            config,
            "optim.clip optim.name",
            "Muon runs unclipped: DeepSpeed clips updates under ZeRO 1-3, gradients under 0",
            "write optim.clip=0",
        )
    if ctx.traits is not None and ctx.traits.muon is not None:
        yield refuse(config, "optim.name model.family", ctx.traits.muon, "write optim=adamw")
    if OffloadDevice.nvme in (config.offload.optimizer, config.offload.parameters):
        yield refuse(
            config,
            "optim.name offload.optimizer",
            "Muon's momentum does not go to NVMe",
            "write offload=cpu, or optim=adamw",
        )


# -- Keys of the user's own that DeepSpeed accepts and that change the run silently, or not at all. Those that are wrong in every run
# are refused by config/vendor.py; these depend on the run.

Test = Callable[[Any, RuleContext], bool]


def _on(value: Any, ctx: RuleContext) -> bool:
    return bool(value)


def _off(value: Any, ctx: RuleContext) -> bool:
    return value is False


def _on_cpu(value: Any, ctx: RuleContext) -> bool:
    return bool(value) and ctx.world.device is Device.CPU


def _partial_below_stage3(value: Any, ctx: RuleContext) -> bool:
    return isinstance(value, int | float) and value < 1 and ctx.config.zero.stage != 3


def _other_than_the_runs(value: Any, ctx: RuleContext) -> bool:
    """fp32 is exact in any run."""
    return value not in (None, Precision.fp32.value, ctx.config.precision.name.value)


def _hpz_below_stage3(value: Any, ctx: RuleContext) -> bool:
    return isinstance(value, int) and value > 1 and ctx.config.zero.stage != 3


# key, when it is wrong, why, what to do
SILENT: tuple[tuple[str, Test, str, str], ...] = (
    (
        "bf16.check_grad_overflow",
        _off,
        "every engine skips a step whose gradient is not finite (train.on_nonfinite)",
        "leave it out",
    ),
    (
        "zero_optimization.compute_grad_norm",
        _off,
        "without a norm there is no clipping, and metrics have no grad_norm",
        "leave it out",
    ),
    (
        "zero_optimization.zenflow",
        _on,
        "ZenFlow updates weights with old gradients, so no other engine repeats the run",
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
        "hpZ keeps a second copy of weights that ZeRO 3 cuts",
        "write zero=stage3, or leave it out",
    ),
    *(
        (
            key,
            _other_than_the_runs,
            "gradients are rounded to it, which the run's precision does not, so no other engine repeats the "
            "run",
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
    """DeepSpeed asserts it when the ranks have started, and takes fewer ranks without a message if there are
    not as many. With a tensor axis another rule refuses hpZ.
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
            "groups of as many ranks, usually those of a node, keep a second copy of the weights, so it "
            "divides their number",
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
    bf16_sums,
    kernel_fits,
    muon_limits,
)
