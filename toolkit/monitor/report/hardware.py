"""The hardware section: GPUs and hosts over time, statistics of each GPU, and the environment."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from toolkit.monitor.report.downsample import Curve, RunningStats
from toolkit.monitor.report.elements import (
    UNKNOWN,
    AxisFormat,
    Chart,
    CollapsedText,
    ReportSection,
    ReportTable,
    Series,
    curve_series,
    format_gigabytes,
    format_number,
    format_percent,
)
from toolkit.monitor.report.node_samples import NodeSamples
from toolkit.monitor.report.run_data import ReportData, mapping_at
from toolkit.monitor.report.training import COLOURS, attempt_marks

NODES = 6  # drawn individually; for more nodes the range over all is drawn
GPUS, ALL_GPUS = 16, 1024  # rows of the table, and of the collapsed one
GAP = 6.0  # times the usual interval between samples; beyond, the line has a gap

# Metric, title, axis label, number format, factor (percentages become fractions), and which extreme is the
# worst.
ChartSpec = tuple[
    str, str, str, AxisFormat, float, Callable[[Iterable[tuple[float, int]]], tuple[float, int]]
]
GPU_CHARTS: tuple[ChartSpec, ...] = (
    (
        "gpu/utilization_percent_mean",
        "GPU utilisation, mean per node",
        "utilisation",
        AxisFormat.PERCENT,
        0.01,
        min,
    ),
    (
        "gpu/tensor_active_percent_mean",
        "Tensor core activity, mean per node",
        "tensor activity",
        AxisFormat.PERCENT,
        0.01,
        min,
    ),
    (
        "gpu/sm_clock_ratio_min",
        "Clock of the slowest GPU per node, relative to its maximum",
        "clock / maximum",
        AxisFormat.PERCENT,
        1.0,
        min,
    ),
    (
        "gpu/temperature_celsius_max",
        "Temperature of the hottest GPU per node",
        "°C",
        AxisFormat.NUMBER,
        1.0,
        max,
    ),
    ("gpu/power_watts_sum", "Power of all GPUs per node", "W", AxisFormat.NUMBER, 1.0, max),
    ("gpu/memory_used_bytes_max", "Memory of the fullest GPU per node", "bytes", AxisFormat.BYTES, 1.0, max),
)
HOST_CHARTS: tuple[ChartSpec, ...] = (
    ("host/cpu_percent", "CPU utilisation of the host", "utilisation", AxisFormat.PERCENT, 0.01, max),
    ("host/memory_used_bytes", "Used memory of the host", "bytes", AxisFormat.BYTES, 1.0, max),
    ("process/private_bytes", "Private memory of all ranks per node", "bytes", AxisFormat.BYTES, 1.0, max),
    ("disk/free_bytes", "Free space on the disk of the run's directory", "bytes", AxisFormat.BYTES, 1.0, min),
    ("disk/read_bytes_per_second", "Disk reads", "bytes/s", AxisFormat.BYTES, 1.0, max),
    ("disk/write_bytes_per_second", "Disk writes", "bytes/s", AxisFormat.BYTES, 1.0, max),
    ("network/receive_bytes_per_second", "Network receive", "bytes/s", AxisFormat.BYTES, 1.0, max),
    ("network/send_bytes_per_second", "Network send", "bytes/s", AxisFormat.BYTES, 1.0, max),
    ("network/rdma_receive_bytes_per_second", "RDMA receive", "bytes/s", AxisFormat.BYTES, 1.0, max),
    ("network/rdma_send_bytes_per_second", "Sent by RDMA", "bytes/s", AxisFormat.BYTES, 1.0, max),
)


def hardware_section(run: ReportData) -> ReportSection:
    intro: list[str] = []
    if not run.nodes:
        intro.append(
            "There are no samples of GPUs and hosts: they are disabled by monitor.system_seconds=0, and "
            "older versions have none."
        )
    elif not any(node.gpus for node in run.nodes.values()):
        intro.append("No GPU was used, so there are samples of the hosts only.")
    planned = mapping_at(run.plan, "world").get("nodes")
    if run.nodes and isinstance(planned, int) and len(run.nodes) < planned:
        intro.append(
            f"Samples of {len(run.nodes)} of {planned} nodes are available. If nodes keep them on local "
            "disks, add the run's directories there with nodes=FOLDER,..."
        )
    if len(run.nodes) > NODES:
        intro.append(
            f"Lines show the median of {len(run.nodes)} nodes, bands the range from the lowest to the "
            "highest."
        )
    every = max((node.every for node in run.nodes.values()), default=1)
    if every > 1:
        intro.append(f"Because there are so many samples, only one in {every:,} was read.")
    charts = tuple(chart for spec in (*GPU_CHARTS, *HOST_CHARTS) for chart in _chart(run, run.nodes, spec))
    tables = (*_gpus(run.nodes), *_environment(run))
    return ReportSection(
        id="hardware",
        title="Hardware",
        intro=tuple(intro),
        charts=charts,
        tables=tables,
        texts=tuple(_environments(run)),
    )


def _chart(run: ReportData, nodes: dict[int, NodeSamples], spec: ChartSpec) -> Iterator[Chart]:
    metric, title, label, y_format, factor, worst = spec
    having = {name: node for name, node in nodes.items() if metric in node.curves.curves}
    if not having:
        return
    if len(having) <= NODES:
        series = tuple(
            _line(node, metric, f"node {name}", COLOURS[position % len(COLOURS)], factor)
            for position, (name, node) in enumerate(having.items())
        )
    else:
        series = (_range(having, metric, factor),)
    totals = {name: node.curves.total(metric) for name, node in having.items()}
    extreme, of = worst(
        ((total.low if worst is min else total.high) * factor, name) for name, total in totals.items()
    )
    alt = (
        f"{title} over time, {len(having)} nodes. {'Lowest' if worst is min else 'Highest'}: "
        f"{format_number(extreme)} on node {of}."
    )
    yield Chart(
        id=metric.replace("/", "-"),
        title=title,
        alt=alt,
        series=series,
        y_label=label,
        y_format=y_format,
        x_format=AxisFormat.TIME,
        from_zero=y_format is not AxisFormat.NUMBER or label == "W",
        marks=attempt_marks(run, lambda attempt: attempt.began),
    )


def _line(node: NodeSamples, metric: str, name: str, colour: str, factor: float) -> Series:
    """Draw one node's metric, with gaps between attempts."""
    drawn = curve_series(node.curves, metric, name, colour)
    assert drawn is not None
    banded = drawn.low is not None
    x, (mid, low, high) = _with_gaps(
        drawn.x, (drawn.mid, drawn.low or drawn.mid, drawn.high or drawn.mid), factor
    )
    return Series(
        name=name, colour=colour, x=x, mid=mid, low=low if banded else None, high=high if banded else None
    )


def _with_gaps(
    x: Sequence[float], parts: Sequence[Sequence[float | None]], factor: float
) -> tuple[list[float], list[list[float | None]]]:
    """Insert a point without values at gaps of ``GAP`` times the usual interval, and multiply values by
    ``factor``.
    """
    limit = GAP * _median_interval(x)
    at: list[float] = []
    values: list[list[float | None]] = [[] for _ in parts]
    for index, position in enumerate(x):
        if at and position - at[-1] > limit:
            at.append((at[-1] + position) / 2)
            for into in values:
                into.append(None)
        at.append(position)
        for into, part in zip(values, parts, strict=True):
            value = part[index]
            into.append(None if value is None else value * factor)
    return at, values


def _median_interval(x: Sequence[float]) -> float:
    """Return the median distance between neighbours."""
    return statistics.median([after - before for before, after in pairwise(x)] or [1.0])


def _range(nodes: dict[int, NodeSamples], metric: str, factor: float) -> Series:
    """Compute the range over nodes in common time buckets, because their samples are not synchronized."""
    begin = min(node.curves.x[0] for node in nodes.values())
    width = max(_median_interval(node.curves.x) for node in nodes.values())
    stats: dict[int, list[tuple[float, float, float]]] = {}
    for node in nodes.values():
        curve: Curve = node.curves.curves[metric]
        for x, low, mid, high in zip(node.curves.x, curve.low, curve.mid, curve.high, strict=True):
            if low is not None and mid is not None and high is not None:
                stats.setdefault(int((x - begin) / width), []).append((low, mid, high))
    order = sorted(stats)
    positions, (lows, mids, highs) = _with_gaps(
        [begin + (bucket + 0.5) * width for bucket in order],
        (
            [min(low for low, _, _ in stats[bucket]) for bucket in order],
            [statistics.median(mid for _, mid, _ in stats[bucket]) for bucket in order],
            [max(high for _, _, high in stats[bucket]) for bucket in order],
        ),
        factor,
    )
    return Series(
        name="median node, with the range over all nodes",
        colour="blue",
        x=positions,
        mid=mids,
        low=lows,
        high=highs,
    )


def _gpus(nodes: dict[int, NodeSamples]) -> Iterator[ReportTable]:
    """Yield a table of the GPUs that are throttled most, then least utilized, and a collapsed one of all
    GPUs.
    """
    every = [(name, node, gpu) for name, node in nodes.items() for gpu in node.gpus]

    def severity(entry: tuple[int, NodeSamples, int]) -> tuple[float, float]:
        stats = entry[1].gpus[entry[2]]
        return -(_mean(stats, "throttled_percent") or 0.0), _mean(stats, "utilization_percent") or 0.0

    kinds = sorted({name for node in nodes.values() for name in node.names.values()})
    rows = tuple(
        (f"node {name}, GPU {gpu}", *_gpu(node.gpus[gpu], node.throttled.get(gpu, {})))
        for name, node, gpu in sorted(every, key=severity)[:ALL_GPUS]
    )
    head = (
        "GPU",
        "utilisation",
        "tensor cores",
        "most memory",
        "hottest",
        "power",
        "clock",
        "throttled",
        "throttle reasons (samples)",
        "ECC",
        "XID",
    )
    note = (
        "Utilisation, tensor cores, power, clock (relative to its maximum) and throttled time are means "
        "over all samples. ECC: uncorrected errors. XID: errors reported by the driver."
    )
    few = len(rows) <= GPUS
    title = ": ".join(
        ("GPUs" if few else f"The {GPUS} GPUs that were throttled most", *filter(None, [", ".join(kinds)]))
    )
    if rows:
        yield ReportTable(caption=title, align="nrrrrrrrlrr", head=head, rows=rows[:GPUS], note=note)
    if not few:
        title = f"{len(rows):,} of {len(every):,} GPUs, the worst first"
        yield ReportTable(caption=title, align="nrrrrrrrlrr", head=head, rows=rows, folded=True)


def _gpu(stats: Mapping[str, RunningStats], reasons: Mapping[str, int]) -> tuple[str, ...]:
    lowered = ", ".join(
        f"{reason} ({count:,})" for reason, count in reasons.items() if reason not in ("none", "idle")
    )
    return (
        _format_percentage(_mean(stats, "utilization_percent")),
        _format_percentage(_mean(stats, "tensor_active_percent")),
        format_gigabytes(_maximum(stats, "memory_used_bytes")),
        _format_unit(_maximum(stats, "temperature_celsius"), "°C"),
        _format_unit(_mean(stats, "power_watts"), "W"),
        format_percent(_mean(stats, "sm_clock_ratio")),
        _format_percentage(_mean(stats, "throttled_percent")),
        lowered,
        format_number(_maximum(stats, "ecc_uncorrected_errors")),
        format_number(_maximum(stats, "xid_events")),
    )


def _mean(stats: Mapping[str, RunningStats], metric: str) -> float | None:
    return stats[metric].mean if metric in stats else None


def _maximum(stats: Mapping[str, RunningStats], metric: str) -> float | None:
    return stats[metric].high if metric in stats else None


def _format_unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:,.0f} {unit}"


def _format_percentage(value: float | None) -> str:
    return format_percent(None if value is None else value / 100)


def _environment(run: ReportData) -> Iterator[ReportTable]:
    """Yield the environment of the newest attempt that recorded it."""
    for attempt in reversed(run.attempts):
        rows = tuple(
            (key, str(value)) for key, value in _flatten(attempt.environment) if value not in (None, "")
        )
        if rows:
            yield ReportTable(
                caption=f"Environment of attempt {attempt.number}",
                head=("what", "value"),
                align="nl",
                rows=rows,
            )
            return


def _environments(run: ReportData) -> Iterator[CollapsedText]:
    """Yield the environments of older attempts that differ from the newest one."""
    newest = next((attempt for attempt in reversed(run.attempts) if attempt.environment), None)
    for attempt in run.attempts:
        there = dict(_flatten(newest.environment)) if newest is not None else {}
        differing = [(key, value) for key, value in _flatten(attempt.environment) if there.get(key) != value]
        if differing:
            yield CollapsedText(
                f"attempt {attempt.number}: differences",
                "\n".join(f"{key}: {value}" for key, value in differing),
            )


def _flatten(values: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Flatten nested objects to keys like ``git.commit``."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, ", ".join(map(str, values)) if isinstance(values, list) else values
