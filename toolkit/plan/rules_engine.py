"""Rules about what the local engine and DeepSpeed 0.19.8 can run, and what DeepSpeed silently gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from toolkit.commands import command_line
from toolkit.config.schema import EngineName, OffloadDevice, Precision
from toolkit.errors import Problem
from toolkit.plan.deepspeed import accumulates_in_fp32
from toolkit.plan.rule_context import Rule, RuleContext, make_error, make_warning
from toolkit.plan.types import Device


def local_is_one_rank(ctx: RuleContext) -> Iterator[Problem]:
    if ctx.config.engine.name is EngineName.local and ctx.world.ranks > 1:
        yield Problem(
            "engine.name",
            f"engine.name=local with {ctx.world.ranks} ranks",
            "the local engine is one process",
            f"write engine=deepspeed, or start one rank: {command_line('train')} cluster.nodes=1 "
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
        yield make_error(
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
    steps = ctx.batch.accumulation
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
        yield make_warning(
            config,
            "zero.stage precision.name offload.optimizer",
            f"the gradients of {steps} micro-batches accumulate in bf16, which loses small values",
            f"{better}, or raise train.micro_batch",
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


def _without_nvme(value: Any, ctx: RuleContext) -> bool:
    offload = ctx.config.offload
    return OffloadDevice.nvme not in (offload.optimizer, offload.parameters)


def _optimizer_stays(value: Any, ctx: RuleContext) -> bool:
    return ctx.config.offload.optimizer is OffloadDevice.none


def _parameters_stay(value: Any, ctx: RuleContext) -> bool:
    return ctx.config.offload.parameters is OffloadDevice.none


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
    (
        "aio",
        _without_nvme,
        "it is for offload to nvme",
        "leave it out, or write zero=stage3 offload=nvme offload.nvme_path=FOLDER",
    ),
    (
        "zero_optimization.offload_optimizer",
        _optimizer_stays,
        "the optimizer is not offloaded",
        "leave it out, or write zero=stage2 offload=cpu_optimizer",
    ),
    (
        "zero_optimization.offload_param",
        _parameters_stay,
        "the parameters are not offloaded",
        "leave it out, or write zero=stage3 offload=cpu",
    ),
)


def silently_wrong_keys(ctx: RuleContext) -> Iterator[Problem]:
    for key, wrong, why, remedy in SILENT:
        value = _get(ctx.config.engine.deepspeed, key)
        if value is not None and wrong(value, ctx):
            shown = "..." if isinstance(value, Mapping) else value
            yield Problem(f"engine.deepspeed.{key}", f"engine.deepspeed.{key}={shown}", why, remedy)


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
    sixteen_bits_need_a_stage,
    gradients_accumulate_in_bf16,
)
