"""Compare the formulas for a family with a trace of its module (``plan.py --trace``).

The module is the whole model on one rank with one micro-batch, because axes other than data divide it only
inside the engines. So ``whole_model(plan)`` is traced, and the formulas are those of the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.config.kernels import CompileMode
from toolkit.config.optim import OptimizerKernel
from toolkit.config.schema import EngineConfig, EngineName, OffloadConfig, ParallelConfig, ZeroConfig
from toolkit.layout.axes import Axes
from toolkit.plan.flops import hardware_flops, model_flops
from toolkit.plan.kernels import choose_kernels
from toolkit.plan.memory import plan_memory
from toolkit.plan.trace import ModuleTrace, NotTraced
from toolkit.plan.types import BatchPlan, KernelChoice, RampStage, RunPlan

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class FormulaCheck:
    """A figure of one micro-batch: by the formula of the plan, and as traced."""

    name: str
    formula: float
    traced: float

    @property
    def difference(self) -> float:
        """The relative difference of the formula from the trace."""
        return self.formula / self.traced - 1


def whole_model(plan: RunPlan) -> RunPlan:
    """Return the plan of one micro-batch of the same model with plain torch on one rank, without
    torch.compile.
    """
    config = replace(
        plan.config,
        engine=EngineConfig(name=EngineName.local),
        parallel=ParallelConfig(),
        zero=ZeroConfig(),
        offload=OffloadConfig(),
        compile=replace(plan.config.compile, mode=CompileMode.none),
    )
    world = replace(plan.world, ranks=1, ranks_per_node=1)
    size = plan.batch.micro_batch
    batch = BatchPlan(
        micro_batch=size, global_batch=size, data_parallel=1, stages=(RampStage(size, 0, 0, None),)
    )
    axes = Axes(data=1)
    kernels = choose_kernels(config, world, plan.shape, size * config.train.sequence_length)
    # A fused optimizer has no copies in its step, which a trace does not have either.
    fused = KernelChoice(OptimizerKernel.fused.value, "the step is not traced")
    kernels = replace(kernels, optimizer=fused)
    memory = plan_memory(
        config, plan.shape, plan.parameters, axes, batch, world.device, None, kernels=kernels
    )
    return replace(plan, config=config, world=world, axes=axes, batch=batch, kernels=kernels, memory=memory)


@dataclass(frozen=True, slots=True)
class CheckedFormulas:
    """The figures of ``plan``, a :func:`whole_model`, and its trace."""

    plan: RunPlan
    trace: ModuleTrace | NotTraced

    def checks(self) -> Iterator[FormulaCheck]:
        """Compare each figure; nothing if the model could not be traced."""
        plan, trace = self.plan, self.trace
        if isinstance(trace, NotTraced):
            return
        yield FormulaCheck("parameters", sum(spec.numel for spec in plan.parameters), trace.numel)
        assert plan.memory is not None, "a family's memory is planned"
        assert plan.memory.activations is not None, "a family's activations are planned"
        peak = plan.memory.activations + plan.memory.temporaries
        yield FormulaCheck("activations at the peak, bytes", peak, trace.peak_bytes)
        model, hardware = model_flops(plan), hardware_flops(plan)
        assert model is not None, "a family's FLOPs are planned"
        assert hardware is not None, "a family's FLOPs are planned"
        units = trace.micro_batch * plan.units_per_sample
        yield FormulaCheck("model FLOPs", model * units, trace.model_flops)
        yield FormulaCheck("FLOPs with recomputation", hardware * units, trace.hardware_flops)

    def to_json(self) -> dict[str, Any]:
        """Return the trace, and under ``checks`` the comparison."""
        checks = [{**asdict(check), "difference": check.difference} for check in self.checks()]
        return {**self.trace.to_json(), "checks": checks}

    def format(self) -> RenderableType:
        """Return the comparison as a table for the terminal."""
        from rich.table import Table
        from rich.text import Text

        if isinstance(self.trace, NotTraced):
            return Text(f"not traced, because {self.trace.reason}")
        size, length = self.plan.batch.micro_batch, self.plan.config.train.sequence_length
        shown = Table(
            title=f"a trace of the whole model with {size} x {length} tokens on one rank",
            title_justify="left",
        )
        shown.add_column("of one micro-batch")
        for name in ("formula", "trace", "difference"):
            shown.add_column(name, justify="right")
        for check in self.checks():
            difference = f"{check.difference:+.2%}"
            shown.add_row(check.name, f"{check.formula:.5g}", f"{check.traced:.5g}", difference)
        return shown
