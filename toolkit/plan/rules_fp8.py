"""Rules about ``precision=fp8``: fp8 matrix products in decoder layers."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.schema import Precision
from toolkit.errors import Problem, Severity
from toolkit.plan.devices import find_gpu
from toolkit.plan.rule_context import Rule, RuleContext, make_error
from toolkit.plan.transformer_engine import TESTED, has_transformer_engine, install_command
from toolkit.plan.types import Device


def fp8_fits_the_machine(ctx: RuleContext) -> Iterator[Problem]:
    if not ctx.config.precision.fp8:
        return
    gpu = find_gpu(ctx.world.gpu)
    if gpu is not None and not gpu.has_fp8:
        yield Problem(
            "precision.fp8",
            f"precision.fp8=true on {ctx.world.gpu}",
            "fp8 needs a GPU of compute capability 8.9 (Ada, Hopper, Blackwell) or later",
            "write precision=bf16",
        )
    if ctx.world.device is Device.CPU and not ctx.megatron:
        yield Problem(
            "precision.fp8",
            "precision.fp8=true on a CPU",
            "CPUs emulate fp8: the numbers are those of fp8, and it is slower than bf16",
            "write precision=bf16, unless this is a test of convergence",
            Severity.WARNING,
        )


def fp8_fits_the_run(ctx: RuleContext) -> Iterator[Problem]:
    config = ctx.config
    if not config.precision.fp8:
        return
    if config.precision.name is not Precision.bf16:
        yield make_error(
            config,
            "precision.fp8 precision.name",
            "fp8 replaces matrix products of a bf16 run",
            "write precision=fp8, which sets precision.name=bf16",
        )
    if not ctx.of_a_family:
        yield make_error(
            config,
            f"precision.fp8 {config.model.source_key}",
            "only the families' linear layers compute in fp8",
            "write precision=bf16",
        )
    elif ctx.traits is not None and (ctx.traits.experts or not ctx.traits.linear_layers):
        kind = "experts" if ctx.traits.experts else "layers of their own kind instead of linear layers"
        yield make_error(
            config,
            "precision.fp8 model.family",
            f"only linear layers compute in fp8, and models of this family have {kind}",
            "write precision=bf16",
        )
    if ctx.megatron and not has_transformer_engine(ctx.world):
        yield make_error(
            config,
            "precision.fp8 engine.name",
            f"Megatron-core computes in fp8 through Transformer Engine {TESTED}, which is not installed",
            f"install it: {install_command(ctx.world.torch_cuda)}, or write precision=bf16",
        )
    if ctx.deepspeed and config.zero.stage == 3:
        yield make_error(
            config,
            "precision.fp8 zero.stage",
            "fp8 is supported under ZeRO 0 to 2, which keep whole weights",
            "write zero=stage2, or precision=bf16",
        )
    if ctx.deepspeed and config.parallel.tensor > 1:
        yield make_error(
            config,
            "precision.fp8 parallel.tensor",
            "DeepSpeed's tensor-parallel layers compute in bf16",
            "write parallel.tensor=1, or precision=bf16",
        )


RULES: tuple[Rule, ...] = (fp8_fits_the_machine, fp8_fits_the_run)
