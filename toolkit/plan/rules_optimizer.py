"""Rules about the optimizer, which read what ``toolkit/optimizers`` states about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec

from toolkit.config.optim import OptimConfig, OptimizerKernel
from toolkit.config.schema import OffloadDevice
from toolkit.errors import Problem
from toolkit.optimizers import get_optimizer
from toolkit.optimizers.base import whole_parameters
from toolkit.plan.rule_context import Rule, RuleContext, make_error, make_warning
from toolkit.plan.types import Device

KERNELS = (OptimizerKernel.auto, OptimizerKernel.torch)


def optimizer_limits(ctx: RuleContext) -> Iterator[Problem]:
    """The optimizer's own rules, and those of the engine about it."""
    config = ctx.config
    spec = get_optimizer(config.optim.name)
    if ctx.megatron and spec.not_on_megatron is not None:
        yield make_error(config, "optim.name engine.name", *spec.not_on_megatron)
    for violation in spec.find_violations(config):
        yield (make_warning if violation.warning else make_error)(
            config, violation.keys, violation.rule, violation.remedy
        )
    if ctx.deepspeed and ctx.traits is not None and spec.name in ctx.traits.unsupported_optimizers:
        rule = ctx.traits.unsupported_optimizers[spec.name]
        yield make_error(config, "optim.name model.family", rule, "write optim=adamw")
    if ctx.deepspeed and spec.needs_whole_parameters is not None and not whole_parameters(config):
        key = (
            "zero.stage"
            if config.zero.stage
            else next(
                f"parallel.{axis}"
                for axis in ("tensor", "pipeline", "expert")
                if getattr(config.parallel, axis) > 1
            )
        )
        yield make_error(
            config,
            f"optim.name {key}",
            f"{spec.name} needs whole parameters on each rank, because {spec.needs_whole_parameters}",
            f"write {'zero=stage0' if key == 'zero.stage' else f'{key}=1'}, or optim=adamw",
        )


def package_is_installed(ctx: RuleContext) -> Iterator[Problem]:
    package = get_optimizer(ctx.config.optim.name).package
    if package is not None and find_spec(package[1]) is None:
        yield make_error(
            ctx.config,
            "optim.name",
            f"this optimizer is in the package {package[1]}, which is not installed",
            f"install it: pip install '{package[0]}'",
        )


def settings_are_used(ctx: RuleContext) -> Iterator[Problem]:
    """Settings that the optimizer would ignore."""
    config, optim, spec = ctx.config, ctx.config.optim, get_optimizer(ctx.config.optim.name)
    if optim.momentum and "momentum" not in spec.settings:
        betas = (
            f"leave optim.momentum out and write optim.betas=[{optim.momentum},{optim.betas[1]}], or "
            if "betas" in spec.settings
            else ""
        )
        yield make_error(
            config,
            "optim.momentum optim.name",
            f"{spec.name} has no setting optim.momentum",
            f"{betas or 'write optim.momentum=0, or '}leave optim.momentum out",
        )
    defaults = {field.name: getattr(OptimConfig(), field.name) for field in fields(OptimConfig)}
    for name in ("betas", "eps"):
        if name not in spec.settings and getattr(optim, name) != defaults[name]:
            yield make_warning(
                config,
                f"optim.{name} optim.name",
                f"{spec.name} has no setting optim.{name}",
                f"leave optim.{name} out",
            )
    if optim.target is not None and spec.name != "custom":
        yield make_error(
            config,
            "optim.target optim.name",
            "an optimizer has one source",
            f"write optim=custom optim.target={optim.target}, or leave optim.target out",
        )
    unknown = [name for name in optim.arguments if name not in spec.arguments]
    if unknown and spec.name != "custom":
        accepted = ", ".join(spec.arguments) or "none"
        yield Problem(
            "optim.arguments",
            f"optim.arguments has {', '.join(unknown)}, optim.name={spec.name}",
            f"the arguments of {spec.name} are {accepted}",
            "leave it out, or write a key of optim, such as optim.betas=[0.9,0.95]",
        )


def kernel_fits(ctx: RuleContext) -> Iterator[Problem]:
    config, kernel = ctx.config, ctx.config.optim.kernel
    offloaded = config.offload.optimizer is not OffloadDevice.none
    if kernel in KERNELS:
        return
    if ctx.megatron:
        yield make_error(
            config,
            "optim.kernel engine.name",
            "Megatron-core uses Transformer Engine's or Apex's fused optimizer if one is installed, else "
            "torch's",
            "write optim.kernel=auto",
        )
    elif kernel not in get_optimizer(config.optim.name).kernels:
        yield make_error(
            config,
            "optim.kernel optim.name",
            f"{config.optim.name} has no kernel {kernel.value}",
            "write optim.kernel=auto",
        )
    elif kernel is OptimizerKernel.cpu and not (ctx.deepspeed and offloaded):
        yield make_error(
            config,
            "optim.kernel offload.optimizer engine.name",
            "DeepSpeed's CPU kernel runs only if the optimizer is offloaded",
            "write zero=stage2 offload=cpu_optimizer, or optim.kernel=auto",
        )
    elif kernel is OptimizerKernel.cpu and not ctx.world.has_compiler:
        yield Problem(
            "optim.kernel",
            "optim.kernel=cpu on a machine without a C++ compiler",
            "DeepSpeed compiles its CPU kernel on first use",
            "install g++, or write optim.kernel=torch",
        )
    elif kernel is OptimizerKernel.fused and (ctx.world.device is Device.CPU or offloaded):
        yield Problem(
            "optim.kernel",
            f"optim.kernel=fused on {ctx.world.device}, offload.optimizer={config.offload.optimizer.value}",
            "the fused kernel runs on a GPU that has the optimizer's states",
            "write optim.kernel=auto",
        )


RULES: tuple[Rule, ...] = (optimizer_limits, package_is_installed, settings_are_used, kernel_fits)
