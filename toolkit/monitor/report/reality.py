"""What was planned beside what was measured: memory, batch, arithmetic, the pipeline's bubble, and the links between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.monitor.parts import BACKWARD, BUBBLE, FORWARD
from toolkit.monitor.report.data import Run, section
from toolkit.monitor.report.rows import is_number
from toolkit.monitor.report.view import UNKNOWN, Section, Table, gigabytes, number, percent, seconds

Row = tuple[str, str, str, str]


def reality(run: Run) -> Section:
    if not run.plan:
        return Section(id="plan", title="Plan against reality", intro=("There is no plan.json, so there is nothing to compare with.",))
    rows = tuple(row for part in (_batch(run), _memory(run), _compute(run), _bubble(run)) for row in part)
    table = Table(caption="Planned and measured", head=("what", "planned", "measured", "how to read it"), align="nrrl", rows=rows)
    return Section(id="plan", title="Plan against reality", intro=(_layout(run.plan),), tables=(table, *_probe(run), *_warnings(run.plan)))


def bubble_planned(run: Run) -> float | None:
    """(p - 1) / (v m) of p stages, v virtual stages each and m micro-batches; None without a pipeline."""
    stages, micro_batches = section(run.plan, "axes").get("pipeline"), section(run.plan, "batch").get("accumulation")
    if not is_number(stages) or not is_number(micro_batches) or stages < 2 or micro_batches < 1:
        return None
    virtual = section(run.config, "engine", "megatron").get("virtual_pipeline_model_parallel_size")
    return (stages - 1) / ((virtual if is_number(virtual) else 1) * micro_batches)


def bubble_measured(run: Run) -> float | None:
    """The median rank's bubble over its forward and backward; None without a ledger."""
    computing = sum(run.ledger.curves.total(part).sum for part in (FORWARD, BACKWARD))
    return run.ledger.curves.total(BUBBLE).sum / computing if computing else None


def _layout(plan: Mapping[str, Any]) -> str:
    axes = ", ".join(f"{name} {size}" for name, size in section(plan, "axes").items() if is_number(size) and size > 1) or "one rank"
    world = section(plan, "world")
    kind = "CPU ranks" if world.get("device") == "cpu" else world.get("gpu") or "GPUs of unknown kind"
    return f"Engine {plan.get('engine', 'unknown')} on {world.get('ranks', '?')} x {kind}, nodes: {world.get('nodes', '?')}. Axes: {axes}."


def _batch(run: Run) -> Iterator[Row]:
    batch = section(run.plan, "batch")
    planned = batch.get(f"{run.unit}_per_step")
    if is_number(planned):
        stages = batch.get("stages")
        ramp = "; the batch grows to it" if isinstance(stages, list) and len(stages) > 1 else ""
        yield (f"{run.unit} a step", f"{planned:,}", _whole(run.steps.total(run.unit).median),
               f"measured: the median step's, without masked ones{ramp}")


def _memory(run: Run) -> Iterator[Row]:
    memory = section(run.plan, "memory")
    planned = memory.get("device_total")
    if not is_number(planned):
        return
    states = [memory[name] for name in ("parameters", "gradients", "optimizer") if is_number(memory.get(name))]
    if (held := run.steps.total("device_bytes")).count and states:
        yield ("parameters, gradients, optimizer", gigabytes(sum(states)), gigabytes(held.median),
               "measured: tensors on the fullest device after the median step, the engine's buffers included")
    used = [held["memory_used_bytes"].high for node in run.nodes.values() for held in node.gpus.values() if "memory_used_bytes" in held]
    private = [most for node in run.nodes.values() for most in node.rank_bytes.values()]
    private += [run.steps.total("host_bytes").high] * bool(run.steps.total("host_bytes").count)
    if section(run.plan, "world").get("device") == "cpu":
        measured, has = max(private, default=None), "the rank with the most private memory, Python, torch and the engine included"
    else:
        measured, has = max(used, default=None), "the fullest GPU by NVML, the CUDA context and what torch's allocator only holds included"
    yield "memory of the fullest rank", gigabytes(planned), gigabytes(measured), f"measured: {has}"
    have = run.plan.get("device_memory_bytes")
    if is_number(have) and section(run.plan, "world").get("device") != "cpu":
        share = None if measured is None else measured / have
        yield "of the device's memory", percent(planned / have), percent(share), f"of {gigabytes(have)}"


def _compute(run: Run) -> Iterator[Row]:
    flops, peak = run.plan.get("flops_per_step"), section(run.plan, "flops").get("peak_per_gpu")
    ranks, measured = section(run.plan, "world").get("ranks"), run.steps.total("step_seconds").median
    if is_number(flops) and is_number(peak) and is_number(ranks) and peak and ranks:
        least = flops / (peak * ranks)
        yield ("time of a step", f"at least {seconds(least)}", seconds(measured),
               f"planned: {number(flops)} model FLOPs at the dense peak of {peak / 1e12:,.0f} TFLOP/s a GPU; the ratio is the MFU")
    elif measured is not None:
        yield "time of a step", UNKNOWN, seconds(measured), "the device's peak is not known, so there is no least time"


def _bubble(run: Run) -> Iterator[Row]:
    planned = bubble_planned(run)
    if planned is not None:
        yield ("pipeline bubble", percent(planned), percent(bubble_measured(run)),
               "planned: (p - 1) / (v m) of p equal stages with v virtual ones each and m micro-batches; measured: the median rank's "
               "bubble over its forward and backward")


def _probe(run: Run) -> tuple[Table, ...]:
    """Of the newest attempt that has one."""
    for attempt in reversed(run.attempts):
        axes = attempt.probe.get("axes")
        if isinstance(axes, list) and axes:
            return (Table(
                caption=f"Links along each axis, as probed before the first step of attempt {attempt.number}", align="lrlrrrrl",
                rows=tuple(_axis(row) for row in axes if isinstance(row, dict)),
                head=("axis", "ranks", "operation", "latency p50", "latency p99", "bandwidth, slowest", "fastest group", "slowest ranks"),
                note="Bandwidth is bus bandwidth: of an all-reduce of S bytes over n ranks in t seconds 2 (n - 1) / n S / t, of a send "
                     "S / t."),)
    return ()


def _axis(row: Mapping[str, Any]) -> tuple[str, ...]:
    def written(name: str, unit: str) -> str:
        value = row.get(name)
        if not is_number(value):
            return UNKNOWN
        return seconds(value) if unit == "s" else f"{value / 1e9:,.2f} GB/s"

    ranks = row.get("slowest_ranks")
    named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "") if isinstance(ranks, list) else str(row.get("missing", ""))
    return (str(row.get("axis", "")), str(row.get("ranks", "")), str(row.get("operation", "not measured")),
            written("latency_p50_seconds", "s"), written("latency_p99_seconds", "s"), written("bandwidth_bytes_per_second", "B"),
            written("best_bandwidth_bytes_per_second", "B"), named)


def _warnings(plan: Mapping[str, Any]) -> tuple[Table, ...]:
    warnings = plan.get("warnings")
    rows = tuple((str(one.get("key", "")), str(one.get("seen", "")), str(one.get("rule", "")), str(one.get("remedy", "")))
                 for one in warnings if isinstance(one, dict)) if isinstance(warnings, list) else ()
    return (Table(caption="The plan's warnings", head=("key", "seen", "rule", "remedy"), align="llll", rows=rows),) if rows else ()


def _whole(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"
