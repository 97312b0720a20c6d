"""Compare plan and measurements: memory, batch, FLOPs, the pipeline's bubble, and the links between ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.monitor.report.curve_reader import is_number
from toolkit.monitor.report.downsample import RunningStats
from toolkit.monitor.report.elements import (
    UNKNOWN,
    ReportSection,
    ReportTable,
    format_gigabytes,
    format_number,
    format_percent,
    format_seconds,
)
from toolkit.monitor.report.predicted_parts import (
    StepComparison,
    compare_step,
    format_interval,
    parts_table,
    step_sentence,
)
from toolkit.monitor.report.run_data import ReportData, mapping_at
from toolkit.step_parts import BACKWARD, BUBBLE, FORWARD

Row = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class AttemptComparison:
    """The plan of one attempt and its measurements.

    Attributes:
        total: returns the statistics of a step's metric or of a part of the ledger, over the attempt's steps.
        parts: those that the ledger has; empty without a ledger.
        most_bytes: the maximal memory of any rank in the nodes' samples, which cover the whole run; None if
            unknown for this attempt.
    """

    plan: Mapping[str, Any]
    config: Mapping[str, Any]
    unit: str
    total: Callable[[str], RunningStats]
    parts: Collection[str] = ()
    most_bytes: float | None = None


def comparison_section(run: ReportData) -> ReportSection:
    if not run.plan:
        return ReportSection(
            id="plan", title="Planned and measured", intro=("There is no plan.json to compare with.",)
        )
    comparisons = attempt_comparisons(run)
    steps = [_step(attempt) for _, attempt in comparisons]
    tables = (
        *(
            table
            for (caption, attempt), step in zip(comparisons, steps, strict=True)
            for table in (_table(caption, attempt), *_parts(caption, step))
        ),
        *_probe(run),
        *_warnings(run.plan),
    )
    intro = (_layout(run.plan), *(step_sentence(step) for step in steps[:1] if step is not None))
    return ReportSection(id="plan", title="Planned and measured", intro=intro, tables=tables)


def _step(attempt: AttemptComparison) -> StepComparison | None:
    return compare_step(attempt.plan, attempt.total, attempt.parts)


def _parts(caption: str, step: StepComparison | None) -> Iterator[ReportTable]:
    if step is not None and step.parts:
        yield parts_table(step, f"{caption}: time of a step by part")


def attempt_comparisons(run: ReportData) -> list[tuple[str, AttemptComparison]]:
    """Return the comparisons with their captions, the newest attempt first. A run of one attempt is compared
    as a whole.
    """
    if len(run.measured) < 2:
        return [("Planned and measured", whole_run(run))]
    known = {attempt.number: attempt for attempt in run.attempts}
    newest = max(run.measured)
    comparisons = []
    for which, totals in sorted(run.measured.items(), reverse=True):
        attempt = known[which]
        plan, most = (attempt.plan or run.plan, _most_bytes(run)) if which == newest else (attempt.plan, None)
        if plan and totals:
            caption = (
                f"Attempt {which}, from step {(attempt.first or 0) + 1:,}, planned and measured: "
                f"{_layout(plan)}"
            )
            comparisons.append(
                (
                    caption,
                    AttemptComparison(
                        plan,
                        attempt.config or run.config,
                        run.unit,
                        _stats_getter(totals),
                        [part for part in run.ledger.parts if part in totals],
                        most,
                    ),
                )
            )
    return comparisons


def _stats_getter(totals: Mapping[str, RunningStats]) -> Callable[[str], RunningStats]:
    return lambda name: totals.get(name, RunningStats())


def whole_run(run: ReportData) -> AttemptComparison:
    """Compare the whole run as one attempt."""

    def total(name: str) -> RunningStats:
        return (run.ledger.curves if name in run.ledger.curves.totals else run.steps).total(name)

    return AttemptComparison(run.plan, run.config, run.unit, total, run.ledger.parts, _most_bytes(run))


def _table(caption: str, attempt: AttemptComparison) -> ReportTable:
    rows = tuple(
        row
        for part in (_batch(attempt), _memory(attempt), _compute(attempt), _bubble(attempt))
        for row in part
    )
    return ReportTable(
        caption=caption, head=("what", "planned", "measured", "explanation"), align="nrrl", rows=rows
    )


def bubble_planned(attempt: AttemptComparison) -> float | None:
    """Return (p - 1) / (v m) for p stages, v virtual stages each and m micro-batches; None without a
    pipeline.
    """
    stages, micro_batches = (
        mapping_at(attempt.plan, "axes").get("pipeline"),
        mapping_at(attempt.plan, "batch").get("accumulation"),
    )
    if not is_number(stages) or not is_number(micro_batches) or stages < 2 or micro_batches < 1:
        return None
    virtual = mapping_at(attempt.config, "engine", "megatron").get("virtual_pipeline_model_parallel_size")
    return (stages - 1) / ((virtual if is_number(virtual) else 1) * micro_batches)


def bubble_measured(attempt: AttemptComparison) -> float | None:
    """Return the median rank's bubble relative to its forward and backward; None without a ledger."""
    computing = sum(attempt.total(part).sum for part in (FORWARD, BACKWARD))
    return attempt.total(BUBBLE).sum / computing if computing else None


def _layout(plan: Mapping[str, Any]) -> str:
    axes = (
        ", ".join(
            f"{name} {size}"
            for name, size in mapping_at(plan, "axes").items()
            if is_number(size) and size > 1
        )
        or "one rank"
    )
    world = mapping_at(plan, "world")
    kind = "CPU ranks" if world.get("device") == "cpu" else world.get("gpu") or "GPUs of unknown model"
    return (
        f"Engine {plan.get('engine', 'unknown')} on {world.get('ranks', '?')} x {kind}, nodes: "
        f"{world.get('nodes', '?')}. Axes: {axes}."
    )


def _batch(attempt: AttemptComparison) -> Iterator[Row]:
    batch = mapping_at(attempt.plan, "batch")
    planned = batch.get(f"{attempt.unit}_per_step")
    if is_number(planned):
        stages = batch.get("stages")
        ramp = "; the batch ramps up to it" if isinstance(stages, list) and len(stages) > 1 else ""
        yield (
            f"{attempt.unit} a step",
            f"{planned:,}",
            _format_count(attempt.total(attempt.unit).median),
            f"measured: the median step, without masked {attempt.unit}{ramp}",
        )


def _most_bytes(run: ReportData) -> float | None:
    """Return the memory of the fullest GPU in all nodes' samples, or on CPUs of the rank with the most
    private memory.
    """
    if mapping_at(run.plan, "world").get("device") == "cpu":
        return max((most for node in run.nodes.values() for most in node.rank_bytes.values()), default=None)
    used = [
        attempt["memory_used_bytes"].high
        for node in run.nodes.values()
        for attempt in node.gpus.values()
        if "memory_used_bytes" in attempt
    ]
    return max(used, default=None)


def _memory(attempt: AttemptComparison) -> Iterator[Row]:
    memory = mapping_at(attempt.plan, "memory")
    planned = memory.get("device_total")
    if not is_number(planned):
        return
    states = [
        memory[name] for name in ("parameters", "gradients", "optimizer") if is_number(memory.get(name))
    ]
    if (device := attempt.total("device_bytes")).count and states:
        yield (
            "parameters, gradients, optimizer",
            format_gigabytes(sum(states)),
            format_gigabytes(device.median),
            "measured: tensors on the fullest device after the median step, including the engine's buffers",
        )
    if (peak := attempt.total("device_peak_bytes")).count:
        yield (
            "tensors at the fullest moment",
            format_gigabytes(allocated if is_number(allocated := memory.get("allocated")) else planned),
            format_gigabytes(peak.high),
            "measured: the peak of torch's allocator on the fullest device, without its cache",
        )
    measured = attempt.most_bytes
    if mapping_at(attempt.plan, "world").get("device") == "cpu":
        host = attempt.total("host_bytes")
        measured = max(
            (size for size in (measured, host.high if host.count else None) if size is not None), default=None
        )
        has = "the rank with the most private memory, including Python, torch and the engine"
    else:
        has = (
            "the fullest GPU by NVML over all attempts, including the CUDA context and memory that "
            "torch's allocator has cached"
        )
    yield (
        "memory of the fullest rank",
        format_gigabytes(planned),
        format_gigabytes(measured),
        f"measured: {has}",
    )
    have = attempt.plan.get("device_memory_bytes")
    if is_number(have) and mapping_at(attempt.plan, "world").get("device") != "cpu":
        share = None if measured is None else measured / have
        yield (
            "share of the device's memory",
            format_percent(planned / have),
            format_percent(share),
            f"of {format_gigabytes(have)}",
        )


def _compute(attempt: AttemptComparison) -> Iterator[Row]:
    flops, peak = attempt.plan.get("flops_per_step"), mapping_at(attempt.plan, "flops").get("peak_per_gpu")
    ranks, measured = mapping_at(attempt.plan, "world").get("ranks"), attempt.total("step_seconds").median
    step = _step(attempt)
    if step is not None:
        yield (
            "time of a step",
            format_interval(step),
            format_seconds(measured),
            "planned: the prediction and its 80% interval; measured: the median step",
        )
    if is_number(flops) and is_number(peak) and is_number(ranks) and peak and ranks:
        least = flops / (peak * ranks)
        yield (
            "time of a step at the peak",
            f"at least {format_seconds(least)}",
            format_seconds(measured),
            f"planned: {format_number(flops)} model FLOPs at the dense peak of {peak / 1e12:,.0f} TFLOP/s "
            "per GPU; the ratio is the MFU",
        )
    elif measured is not None and step is None:
        yield (
            "time of a step",
            UNKNOWN,
            format_seconds(measured),
            "the device's peak is unknown, so there is no lower bound",
        )


def _bubble(attempt: AttemptComparison) -> Iterator[Row]:
    planned = bubble_planned(attempt)
    if planned is not None:
        yield (
            "pipeline bubble",
            format_percent(planned),
            format_percent(bubble_measured(attempt)),
            "planned: (p - 1) / (v m) for p equal stages with v virtual stages each and m micro-batches; "
            "measured: the median rank's bubble relative to its forward and backward",
        )


def _probe(run: ReportData) -> tuple[ReportTable, ...]:
    """Return the probe of the newest attempt that has one."""
    for attempt in reversed(run.attempts):
        axes = attempt.probe.get("axes")
        if isinstance(axes, list) and axes:
            return (
                ReportTable(
                    caption="Links along each axis, probed before the first step of attempt "
                    f"{attempt.number}",
                    align="lrlrrrrl",
                    rows=tuple(_axis(row) for row in axes if isinstance(row, dict)),
                    head=(
                        "axis",
                        "ranks",
                        "operation",
                        "latency p50",
                        "latency p99",
                        "bandwidth, slowest group",
                        "fastest group",
                        "ranks of the slowest group",
                    ),
                    note="Bus bandwidth: for an all-reduce of S bytes over n ranks in t seconds 2 (n - 1) "
                    "/ n S / t, for a send S / t.",
                ),
            )
    return ()


def _axis(row: Mapping[str, Any]) -> tuple[str, ...]:
    def written(name: str, unit: str) -> str:
        value = row.get(name)
        if not is_number(value):
            return UNKNOWN
        return format_seconds(value) if unit == "s" else f"{value / 1e9:,.2f} GB/s"

    ranks = row.get("slowest_ranks")
    named = (
        ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
        if isinstance(ranks, list)
        else str(row.get("missing", ""))
    )
    return (
        str(row.get("axis", "")),
        str(row.get("ranks", "")),
        str(row.get("operation", "not measured")),
        written("latency_p50_seconds", "s"),
        written("latency_p99_seconds", "s"),
        written("bandwidth_bytes_per_second", "B"),
        written("best_bandwidth_bytes_per_second", "B"),
        named,
    )


def _warnings(plan: Mapping[str, Any]) -> tuple[ReportTable, ...]:
    warnings = plan.get("warnings")
    rows = (
        tuple(
            (
                str(one.get("key", "")),
                str(one.get("seen", "")),
                str(one.get("rule", "")),
                str(one.get("remedy", "")),
            )
            for one in warnings
            if isinstance(one, dict)
        )
        if isinstance(warnings, list)
        else ()
    )
    return (
        (
            ReportTable(
                caption="Warnings of the plan",
                head=("key", "seen", "rule", "remedy"),
                align="llll",
                rows=rows,
            ),
        )
        if rows
        else ()
    )


def _format_count(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"
