"""The limits of torch.compile (``compile.mode``), shared by a rule and the choice of ``auto``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.config.kernels import CompileBackend, CompileMode
from toolkit.config.schema import EngineName, OffloadDevice, RunConfig
from toolkit.errors import Problem
from toolkit.plan.rule_context import Rule, RuleContext, make_error
from toolkit.plan.types import Device, World

# What inductor needs on a machine -> how to install it. Triton compiles its launchers with a C compiler.
INSTALL = {
    "a C++ compiler": "install g++ (apt-get install g++)",
    "Python.h": "install Python's headers (apt-get install python3-dev)",
    "triton": "pip install triton",
}


@dataclass(frozen=True, slots=True)
class CompileObstacle:
    """Why a run cannot be compiled: the keys at fault, the rule and the remedy, as in ``make_error``."""

    keys: str
    rule: str
    remedy: str


def compile_obstacles(config: RunConfig, world: World, mode: CompileMode) -> Iterator[CompileObstacle]:
    """Yield every reason why ``mode``, layers or full, is impossible."""
    key, parallel = "compile.mode", config.parallel
    if config.engine.name is EngineName.megatron:
        yield CompileObstacle(
            f"{key} engine.name", "Megatron-core fuses operations of its layers itself", "write compile=none"
        )
        return
    if config.compile.backend is CompileBackend.inductor:
        for name in lacking(world):
            yield CompileObstacle(
                f"{key} compile.backend",
                f"torch.compile needs {name}, which this machine lacks",
                f"{INSTALL[name]}, or write compile=none",
            )
    if mode is CompileMode.full:
        axes = [axis for axis in ("tensor", "pipeline", "context", "expert") if getattr(parallel, axis) > 1]
        if config.engine.name is EngineName.deepspeed and config.zero.stage == 3:
            yield CompileObstacle(
                f"{key} zero.stage",
                "ZeRO 3 gathers weights in hooks, which cut a graph of the whole model into pieces",
                "write compile=layers",
            )
        if config.offload.activations is not OffloadDevice.none:
            yield CompileObstacle(
                f"{key} offload.activations",
                "hooks of the layers move activations to the host, between the graphs of two layers",
                "write compile=layers, or offload.activations=none",
            )
        if axes:
            yield CompileObstacle(
                " ".join([key, *(f"parallel.{axis}" for axis in axes)]),
                "the whole model is one graph only if a rank has the whole model",
                "write compile=layers" if parallel.expert == 1 else "write compile=none",
            )
        return
    if parallel.expert > 1:
        yield CompileObstacle(
            f"{key} parallel.expert",
            "the number of tokens that a rank's experts receive is read on the host, which breaks a graph",
            "write compile=none, or parallel.expert=1",
        )
    if config.model.source_key == "model.family" and config.model.router_aux_loss_coef:
        yield CompileObstacle(
            f"{key} model.router_aux_loss_coef",
            "transformers records the routers' outputs in hooks that torch.compile cannot trace",
            "write compile=none, or model.router_aux_loss_coef=0",
        )
    if config.zero.stage == 3 and config.offload.parameters is OffloadDevice.nvme:
        yield CompileObstacle(
            f"{key} offload.parameters",
            "ZeRO 3 gathers a compiled layer at once, and has buffers for a few weights of the NVMe disk",
            "write compile=none, or offload=cpu",
        )


def lacking(world: World) -> tuple[str, ...]:
    """Return the packages and tools that inductor needs and the machine lacks."""
    return tuple(
        name for name in world.lacking_for_compile if name != "triton" or world.device is Device.CUDA
    )


def run_can_be_compiled(ctx: RuleContext) -> Iterator[Problem]:
    mode = ctx.config.compile.mode
    if mode in (CompileMode.layers, CompileMode.full):
        for obstacle in compile_obstacles(ctx.config, ctx.world, mode):
            yield make_error(ctx.config, obstacle.keys, obstacle.rule, obstacle.remedy)


RULES: tuple[Rule, ...] = (run_can_be_compiled,)
