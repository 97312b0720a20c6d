"""Show a plan: ``plan.json`` for programs, a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from toolkit.config.checkpoint import parse_cadence
from toolkit.config.schema import EngineName
from toolkit.estimate.budget import budget_warning, forecast_budget, format_budget
from toolkit.estimate.cost import format_cost, run_cost
from toolkit.estimate.goodput import estimate_goodput, format_goodput
from toolkit.estimate.profile import load_profile
from toolkit.estimate.save_interval import choose_interval, first_costs
from toolkit.estimate.step import estimate_step, why_no_estimate
from toolkit.estimate.types import StepEstimate
from toolkit.plan.devices import memory_bytes
from toolkit.plan.flops import flops_per_step, hardware_flops, model_flops, peak_flops, why_no_utilisation
from toolkit.plan.memory_verdict import judge_memory, least_bytes, most_bytes
from toolkit.plan.replica_check_gaps import replica_check_gaps
from toolkit.plan.schedule import learning_rate, shown_steps
from toolkit.plan.trace import ModuleTrace, NotTraced
from toolkit.plan.types import Device, KernelChoice, MemoryPlan, RunPlan
from toolkit.progress import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

FORMAT_VERSION = 1
SHOWN_PART = 0.005  # of a step, below which the table leaves out a part
KERNEL_TITLES = {"optimizer": "optimizer kernel"}
# Fields of MemoryPlan: title, and what the bytes are. Their sources are in the modules that count them.
MEMORY_LINES = {
    "parameters": ("parameters", "the weights that forward uses"),
    "gradients": ("gradients", "of all micro-batches, added up"),
    "optimizer": ("optimizer", "fp32 copies of weights, and moments"),
    "activations": ("activations", "saved for the backward pass, of all micro-batches in flight"),
    "buffers": ("buffers", "reduction buckets; gathered weights and activations"),
    "temporaries": ("temporaries", "gradients inside a block, or copies in the optimizer's step"),
    "messages": ("messages", "activations and gradients between pipeline stages"),
    "cublas": ("cuBLAS", "workspaces of matrix products"),
    "fragmentation": ("fragmentation", "reserved by torch's allocator, and unused"),
    "nccl": ("NCCL", "buffers of a communicator for each process group"),
    "cuda_context": ("CUDA context", "the driver's state and loaded kernels"),
}
OVERHEAD = ("temporaries", "messages", "cublas", "fragmentation", "nccl", "cuda_context")


def to_json(plan: RunPlan) -> dict[str, Any]:
    """Return the content of ``plan.json``: plain JSON types, sizes in bytes and sequences, stable keys.

    Unknown values are null.
    """
    memory, estimate = plan.memory, _estimate(plan)
    goodput = None if estimate is None else estimate_goodput(plan, estimate)
    verdict = judge_memory(memory, plan.world)
    return {
        "format_version": FORMAT_VERSION,
        "run_dir": plan.run_dir,
        "identity": plan.identity,
        "engine": plan.config.engine.name.value,
        "world": {
            **asdict(plan.world),
            "device": plan.world.device.value,
            "nodes": plan.world.nodes,
            "lacking_for_compile": list(plan.world.lacking_for_compile),
        },
        "axes": asdict(plan.axes),
        "batch": {
            "micro_batch": plan.batch.micro_batch,
            "global_batch": plan.batch.global_batch,
            "data_parallel": plan.batch.data_parallel,
            "accumulation": plan.batch.accumulation,
            f"{plan.unit}_per_step": plan.units_per_step,
            "stages": [asdict(stage) for stage in plan.batch.stages],
        },
        "model": None if plan.shape is None else asdict(plan.shape),
        "parameters": sum(spec.numel for spec in plan.parameters) if plan.parameters else None,
        "flops_per_step": flops_per_step(plan),
        "flops": _flops(plan),
        "step_seconds": None
        if estimate is None
        else {**asdict(estimate), "assumptions": list(estimate.assumptions)},
        "cost": None if estimate is None else run_cost(plan, estimate).to_json(),
        "step_unknown": _why_no_estimate(plan) if estimate is None else None,
        "goodput": None if goodput is None else goodput.to_json(),
        "budget": None
        if estimate is None
        else [forecast.to_json() for forecast in forecast_budget(plan, estimate)],
        "memory": None if memory is None else {**asdict(memory), **memory_totals(memory)},
        "verdict": None if verdict is None else str(verdict),
        "kernels": asdict(plan.kernels),
        "saves": {**asdict(plan.saves), "first_auto_interval": _first_auto_interval(plan)},
        "device_memory_bytes": memory_bytes(plan.world),
        "not_compared": replica_check_gaps(plan),
        "deepspeed": plan.deepspeed,
        "megatron": plan.megatron,
        "trace": None if plan.trace is None else plan.trace.to_json(),
        "warnings": [{**asdict(problem), "severity": problem.severity.value} for problem in plan.warnings],
    }


def warn_about_budget(plan: RunPlan, *, device_hours: float = 0.0, completed: int = 0) -> RunPlan:
    """Return the plan with a warning if its budget is predicted to end the run before its last step.

    Args:
        device_hours, completed: see :func:`toolkit.estimate.budget.forecast_budget`.
    """
    if not plan.config.budget.is_set or (estimate := _estimate(plan)) is None:
        return plan
    found = forecast_budget(plan, estimate, device_hours=device_hours, completed=completed)
    warning = budget_warning(plan, found)
    return plan if warning is None else replace(plan, warnings=(*plan.warnings, warning))


def format_plan(plan: RunPlan) -> RenderableType:
    """Return the plan as tables for the terminal."""
    from rich.console import Group
    from rich.json import JSON
    from rich.table import Table
    from rich.text import Text

    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, value in _facts(plan):
        facts.add_row(name, value)
    parts: list[RenderableType] = [Text(f"warning: {problem}", style="yellow") for problem in plan.warnings]
    parts += [*[Text()] * bool(parts), facts, Text()]
    if plan.memory is not None:
        parts += [_memory_table(plan), Text()]
    if plan.deepspeed is not None:
        parts += [Text("DeepSpeed gets", style="bold"), JSON.from_data(plan.deepspeed, indent=2), Text()]
    if plan.megatron is not None:
        parts += [Text("Megatron-core gets", style="bold"), JSON.from_data(plan.megatron, indent=2), Text()]
    return Group(*parts)


def describe_axes(plan: RunPlan) -> str:
    """Name the axes of several ranks: ``data 16, tensor 8``."""
    return ", ".join(f"{name} {size}" for name, size in asdict(plan.axes).items() if size > 1) or "one rank"


def kernel_choices(plan: RunPlan) -> Iterator[tuple[str, KernelChoice]]:
    """Yield the rows of ``plan.kernels`` with their titles."""
    for field in fields(plan.kernels):
        yield KERNEL_TITLES.get(field.name, field.name), getattr(plan.kernels, field.name)


def _facts(plan: RunPlan) -> Iterator[tuple[str, str]]:
    config, world = plan.config, plan.world
    yield "run", f"{plan.run_dir}  (identity {plan.identity})"
    yield "world", f"{world.ranks} x {world.hardware} on {world.nodes} node{'s' * (world.nodes > 1)}"
    yield "engine", _engine(plan)
    yield "axes", describe_axes(plan)
    fp8 = ", matrix products of decoder layers in fp8" if config.precision.fp8 else ""
    yield "precision", f"{config.precision.name.value}{fp8}"
    yield "model", _model(plan)
    if isinstance(plan.trace, ModuleTrace):
        yield "trace", _describe_trace(plan.trace)
    elif isinstance(plan.trace, NotTraced):
        yield "not known", f"activation memory, FLOPs and MFU, because {plan.trace.reason}"
    yield from _batch_facts(plan)
    yield "optimizer", _optimizer(plan)
    for title, choice in kernel_choices(plan):
        yield title, f"{choice.name}: {choice.reason}"
    yield "learning rate", _rates(plan)
    place = "background" if plan.saves.background else "foreground"
    yield "saves", f"in the {place}: {plan.saves.reason}"
    if (seconds := _first_auto_interval(plan)) is not None:
        yield "", f"checkpoint.every=auto: at first after {duration(seconds)} of training, then as measured"
    yield from _predictions(plan)


def _model(plan: RunPlan) -> str:
    shape, model = plan.shape, plan.config.model
    count = sum(spec.numel for spec in plan.parameters)
    if shape is not None:
        return (
            f"{shape.family}, {count:,} parameters: {shape.num_hidden_layers} layers of {shape.hidden_size}, "
            f"{shape.num_attention_heads}/{shape.num_key_value_heads} heads, vocabulary {shape.vocab_size:,}"
        )
    if plan.parameters:
        return f"{model.hf.architecture} of {model.hf.model_type}, {count:,} parameters"
    if isinstance(plan.trace, ModuleTrace):
        return f"{model.target}, {plan.trace.numel:,} parameters"
    return f"{model.target}"


def _batch_facts(plan: RunPlan) -> Iterator[tuple[str, str]]:
    batch, train = plan.batch, plan.config.train
    samples = f"sequences of {train.sequence_length}" if plan.unit == "tokens" else plan.unit
    factors = f"{batch.data_parallel} data ranks x accumulation {batch.accumulation}"
    yield "batch", f"{batch.global_batch} {samples} = micro-batch {batch.micro_batch} x {factors}"
    if len(batch.stages) > 1:
        first, last = batch.stages[0], batch.stages[-1]
        stages = f"{len(batch.stages) - 1} stages"
        yield "batch ramp", f"from {first.size} in {stages}; full from step {last.first_step:,} on"
    total = batch.at(train.steps).first_sample * plan.units_per_sample
    yield plan.unit, f"{plan.units_per_step:,} a step, {total:,} in {train.steps:,} steps"


def _predictions(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield the rows of what is computed from the plan: FLOPs, time, cost, goodput, budget and memory."""
    if flops_per_step(plan) is not None:
        yield "compute", _compute(plan)
    yield "step", _step(plan)
    if (estimate := _estimate(plan)) is not None:
        if estimate.assumptions:
            yield "assumed", "; ".join(estimate.assumptions)
        yield from format_cost(run_cost(plan, estimate))
        if (goodput := estimate_goodput(plan, estimate)) is not None:
            yield from format_goodput(goodput)
        yield from format_budget(plan, forecast_budget(plan, estimate))
    if plan.memory is not None:
        yield "memory", _fit(plan)
    if plan.world.device is Device.CUDA:
        peak = peak_flops(plan)
        of = "" if peak is None else f"of {peak / 1e12:.1f} TFLOP/s a GPU, the dense 16-bit peak of "
        yield "MFU", f"{of}{plan.world.gpu}" if of else f"none: {why_no_utilisation(plan)}"


def _describe_trace(trace: ModuleTrace) -> str:
    """Describe the source of the figures of a model without a family."""
    text = f"memory and FLOPs of {trace.operators:,} operators of a forward and backward pass on fake tensors"
    if trace.traced_blocks is None:
        return text
    *counts, blocks = trace.traced_blocks
    return f"{text}, extrapolated from {', '.join(map(str, counts))} of {blocks} equal blocks"


def _first_auto_interval(plan: RunPlan) -> float | None:
    """Return the seconds of training before the first save of ``checkpoint.every=auto``; None with another
    cadence.
    """
    if not parse_cadence(plan.config.checkpoint.every).auto:
        return None
    return choose_interval(first_costs(plan))


def _estimate(plan: RunPlan) -> StepEstimate | None:
    profile = load_profile(plan.config.cluster, plan.world)
    return None if profile is None else estimate_step(plan, profile)


def _why_no_estimate(plan: RunPlan) -> str:
    return why_no_estimate(plan, load_profile(plan.config.cluster, plan.world)) or ""


def _step(plan: RunPlan) -> str:
    """Return the predicted time of a step with its 80% interval, utilisation and parts."""
    estimate = _estimate(plan)
    if estimate is None:
        return f"no estimate: {_why_no_estimate(plan)}"
    seconds = estimate.seconds
    text = f"about {seconds:.3g} s ({estimate.low:.3g} to {estimate.high:.3g})"
    flops, peak = flops_per_step(plan), peak_flops(plan)
    if flops is not None and peak is not None:
        rate = flops / seconds / plan.world.ranks
        text += f", {rate / 1e12:.0f} TFLOP/s a GPU, MFU {rate / peak:.0%}"
    largest = sorted(estimate.parts.items(), key=lambda part: -part[1])
    return f"{text}: " + ", ".join(
        f"{name} {value / seconds:.0%}" for name, value in largest if value >= SHOWN_PART * seconds
    )


def _flops(plan: RunPlan) -> dict[str, float | None]:
    """Return the constants from which throughput and utilisation are computed (plan/flops.py).

    Unknown values are None.
    """
    return {
        "model_per_token": model_flops(plan),
        "hardware_per_token": hardware_flops(plan),
        "peak_per_gpu": peak_flops(plan),
    }


def _compute(plan: RunPlan) -> str:
    per_step, model, hardware = flops_per_step(plan), model_flops(plan), hardware_flops(plan)
    assert per_step is not None
    assert model is not None
    assert hardware is not None
    text = f"{per_step:.3g} model FLOPs a step, {model:.3g} a {plan.unit.removesuffix('s')}"
    if hardware > model:
        text += f" (x {hardware / model:.2f} with recomputation)"
    return text


def _engine(plan: RunPlan) -> str:
    """Describe the engine, and what it shards over the data ranks."""
    config, name = plan.config, plan.config.engine.name.value
    if config.engine.name is EngineName.deepspeed:
        return f"{name}, ZeRO stage {config.zero.stage}"
    if config.engine.name is EngineName.megatron:
        sharded = "distributed optimizer: states" if config.zero.stage else "nothing"
        return f"{name}, {sharded} sharded over data and context ranks"
    return name


def memory_totals(memory: MemoryPlan) -> dict[str, int]:
    """Return sums of the plan's bytes, and the range in which a run's bytes are expected."""
    return {
        "allocated": memory.allocated,
        "device_total": memory.device_total,
        "device_least": least_bytes(memory),
        "device_most": most_bytes(memory),
    }


def _fit(plan: RunPlan) -> str:
    """Return whether the run fits in memory. A run that does not fit has no plan."""
    memory, have = plan.memory, memory_bytes(plan.world)
    assert memory is not None
    if plan.world.device is Device.CPU:
        return f"{_gb(memory.device_total)} GB a rank"
    if have is None:
        why = "the GPU's memory is not known: name the GPU with cluster.gpu=KIND"
        return f"{_gb(memory.device_total)} GB a rank; {why}"
    verdict = judge_memory(memory, plan.world) or "unknown, as activations are"
    return (
        f"{verdict}: {_gb(memory.device_total)} GB of {_gb(have)} GB a GPU ({memory.device_total / have:.0%})"
    )


def _optimizer(plan: RunPlan) -> str:
    optim = plan.config.optim
    if optim.target is not None:
        return f"{optim.target}; memory is planned for two fp32 states per parameter"
    return optim.name


def _rates(plan: RunPlan) -> str:
    schedule = plan.config.schedule
    shown = ", ".join(
        f"{learning_rate(plan, step):.3g} at step {step:,}" for step in shown_steps(plan.config)
    )
    return f"{schedule.target or schedule.name.value}: {shown}"


def _memory_table(plan: RunPlan) -> RenderableType:
    from rich.table import Table

    memory = plan.memory
    assert memory is not None
    have = memory_bytes(plan.world) if plan.world.device is Device.CUDA else None
    shown = Table(title="memory of the rank with the most", title_justify="left")
    shown.add_column("on the device" if plan.world.device is Device.CUDA else "in memory")
    shown.add_column("GB", justify="right")
    shown.add_column("what it is", style="dim")
    for name, (title, content) in MEMORY_LINES.items():
        value = getattr(memory, name)
        if value != 0 or name not in OVERHEAD:
            shown.add_row(title, "unknown" if value is None else _gb(value), content)
    shown.add_section()
    of = f"   of {_gb(have)} ({memory.device_total / have:.0%})" if have else ""
    shown.add_row("total", f"{_gb(memory.device_total)}{of}", style="bold")
    if memory.host or memory.nvme or plan.saves.copy_bytes or plan.saves.snapshot_bytes:
        shown.add_section()
        if memory.host or memory.nvme:
            shown.add_row("offloaded to host memory", _gb(memory.host))
        if plan.saves.copy_bytes:
            shown.add_row("host memory: copy of a save", _gb(plan.saves.copy_bytes))
        if plan.saves.snapshot_bytes:
            shown.add_row("host memory: snapshots", _gb(plan.saves.snapshot_bytes))
        if memory.nvme:
            shown.add_row("offloaded to NVMe", _gb(memory.nvme))
    return shown


def _gb(value: int) -> str:
    return f"{value / 1e9:,.3f}"
