"""Show a plan: ``plan.json`` for programs, a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import EngineName, ScheduleName
from toolkit.plan.devices import memory_bytes
from toolkit.plan.flops import flops_per_step, hardware_flops, model_flops, peak_flops, why_no_utilisation
from toolkit.plan.replica_check_gaps import replica_check_gaps
from toolkit.plan.schedule import decay_span, learning_rate
from toolkit.plan.types import Device, RunPlan

if TYPE_CHECKING:
    from rich.console import RenderableType

FORMAT_VERSION = 1


def to_json(plan: RunPlan) -> dict[str, Any]:
    """The content of ``plan.json``: plain JSON types, sizes in bytes and sequences, stable keys.

    Unknown values are null.
    """
    memory = plan.memory
    return {
        "format_version": FORMAT_VERSION,
        "run_dir": plan.run_dir,
        "identity": plan.identity,
        "engine": plan.config.engine.name.value,
        "world": {**asdict(plan.world), "device": plan.world.device.value, "nodes": plan.world.nodes},
        "axes": asdict(plan.axes),
        "batch": {
            "micro_batch": plan.batch.micro_batch,
            "global_batch": plan.batch.global_batch,
            "data_parallel": plan.batch.data_parallel,
            "accumulation": _accumulation(plan),
            f"{plan.unit}_per_step": plan.units_per_step,
            "stages": [asdict(stage) for stage in plan.batch.stages],
        },
        "model": None if plan.shape is None else asdict(plan.shape),
        "parameters": None if plan.shape is None else sum(spec.numel for spec in plan.parameters),
        "flops_per_step": flops_per_step(plan),
        "flops": _flops(plan),
        "memory": None if memory is None else {**asdict(memory), "device_total": memory.device_total},
        "device_memory_bytes": memory_bytes(plan.world),
        "not_compared": replica_check_gaps(plan),
        "deepspeed": plan.deepspeed,
        "megatron": plan.megatron,
        "warnings": [{**asdict(problem), "severity": problem.severity.value} for problem in plan.warnings],
    }


def format_plan(plan: RunPlan) -> RenderableType:
    """The plan as tables for the terminal."""
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


def _facts(plan: RunPlan) -> Iterator[tuple[str, str]]:
    config, world, batch, axes = plan.config, plan.world, plan.batch, plan.axes
    kind = world.gpu or "GPUs of unknown kind" if world.device is Device.CUDA else "CPU ranks"
    yield "run", f"{plan.run_dir}  (identity {plan.identity})"
    yield "world", f"{world.ranks} x {kind} on {world.nodes} node{'s' * (world.nodes > 1)}"
    yield "engine", _engine(plan)
    yield "axes", ", ".join(f"{name} {size}" for name, size in asdict(axes).items() if size > 1) or "one rank"
    yield "precision", config.precision.name.value
    if plan.shape is not None:
        shape = plan.shape
        count = sum(spec.numel for spec in plan.parameters)
        yield (
            "model",
            (
                f"{shape.family}, {count:,} parameters: {shape.num_hidden_layers} layers of "
                f"{shape.hidden_size}, "
                f"{shape.num_attention_heads}/{shape.num_key_value_heads} heads, vocabulary "
                f"{shape.vocab_size:,}"
            ),
        )
    else:
        yield "model", f"{config.model.target}"
    samples = "images" if config.data.images else f"sequences of {config.train.sequence_length}"
    yield (
        "batch",
        (
            f"{batch.global_batch} {samples} = micro-batch {batch.micro_batch} x {batch.data_parallel} data "
            f"ranks x "
            f"accumulation {_accumulation(plan)}"
        ),
    )
    if len(batch.stages) > 1:
        first, last = batch.stages[0], batch.stages[-1]
        yield (
            "batch ramp",
            f"from {first.size} in {len(batch.stages) - 1} stages; full from step {last.first_step:,} on",
        )
    total = batch.at(config.train.steps).first_sample * plan.units_per_sample
    yield plan.unit, f"{plan.units_per_step:,} a step, {total:,} in {config.train.steps:,} steps"
    yield "learning rate", _rates(plan)
    if plan.shape is not None:
        yield "compute", _compute(plan)
    if plan.memory is not None:
        yield "memory", _fit(plan)
    if world.device is Device.CUDA:
        peak = peak_flops(plan)
        yield (
            "MFU",
            (
                f"none: {why_no_utilisation(plan)}"
                if peak is None
                else f"of {peak / 1e12:.1f} TFLOP/s a GPU, the dense 16-bit peak of {world.gpu}"
            ),
        )


def _flops(plan: RunPlan) -> dict[str, float | None]:
    """The constants from which throughput and utilisation are computed (plan/flops.py).

    Unknown values are None.
    """
    return {
        "model_per_token": model_flops(plan),
        "hardware_per_token": hardware_flops(plan),
        "peak_per_gpu": peak_flops(plan),
    }


def _compute(plan: RunPlan) -> str:
    per_step, model, hardware, peak = (
        flops_per_step(plan),
        model_flops(plan),
        hardware_flops(plan),
        peak_flops(plan),
    )
    assert per_step is not None
    assert model is not None
    assert hardware is not None
    text = f"{per_step:.3g} model FLOPs a step, {model:.3g} a token"
    if hardware > model:
        text += f" (x {hardware / model:.2f} with recomputation)"
    if peak is not None:
        ranks = plan.world.ranks
        text += f"; at {ranks} x {peak / 1e12:.0f} TFLOP/s at least {per_step / (peak * ranks):.3g} s"
    return text


def _engine(plan: RunPlan) -> str:
    """The engine, and what it shards over the data ranks."""
    config, name = plan.config, plan.config.engine.name.value
    if config.engine.name is EngineName.deepspeed:
        return f"{name}, ZeRO stage {config.zero.stage}"
    if config.engine.name is EngineName.megatron:
        sharded = "distributed optimizer: states" if config.zero.stage else "nothing"
        return f"{name}, {sharded} sharded over data and context ranks"
    return name


def _fit(plan: RunPlan) -> str:
    """Whether the run fits in memory. A run that does not fit has no plan."""
    memory, have = plan.memory, memory_bytes(plan.world)
    assert memory is not None
    if plan.world.device is Device.CPU:
        return f"{_gb(memory.device_total)} GB a rank"
    if have is None:
        why = "the GPU's memory is not known: name the GPU with cluster.gpu=KIND"
        return f"{_gb(memory.device_total)} GB a rank; {why}"
    return f"fits: {_gb(memory.device_total)} GB of {_gb(have)} GB a GPU ({memory.device_total / have:.0%})"


def _rates(plan: RunPlan) -> str:
    schedule, steps = plan.config.schedule, plan.config.train.steps
    points = {0, min(schedule.warmup, steps - 1), steps - 1}
    if schedule.name is not ScheduleName.constant:
        first, length = decay_span(schedule, steps)
        points |= {min(max(first, 0), steps - 1), min(max(first + length // 2, 0), steps - 1)}
    shown = ", ".join(f"{learning_rate(plan, step):.3g} at step {step:,}" for step in sorted(points))
    return f"{schedule.name.value}: {shown}"


def _memory_table(plan: RunPlan) -> RenderableType:
    from rich.table import Table

    memory = plan.memory
    assert memory is not None
    have = memory_bytes(plan.world) if plan.world.device is Device.CUDA else None
    shown = Table(title="memory of the rank with the most", title_justify="left")
    shown.add_column("on the device" if plan.world.device is Device.CUDA else "in memory")
    shown.add_column("GB", justify="right")
    for name in ("parameters", "gradients", "optimizer", "activations", "buffers"):
        value = getattr(memory, name)
        shown.add_row(name, "unknown" if value is None else _gb(value))
    shown.add_section()
    of = f"   of {_gb(have)} ({memory.device_total / have:.0%})" if have else ""
    shown.add_row("total", f"{_gb(memory.device_total)}{of}", style="bold")
    if memory.host or memory.nvme:
        shown.add_section()
        shown.add_row("offloaded to host memory", _gb(memory.host))
        if memory.nvme:
            shown.add_row("offloaded to NVMe", _gb(memory.nvme))
    return shown


def _gb(value: int) -> str:
    return f"{value / 1e9:,.3f}"


def _accumulation(plan: RunPlan) -> int:
    return plan.batch.global_batch // (plan.batch.micro_batch * plan.batch.data_parallel)
