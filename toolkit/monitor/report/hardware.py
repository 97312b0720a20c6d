"""The nodes' GPUs and hosts over time, each GPU's figures, and what the run was made with."""

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

NODES = 6  # drawn one by one; of more, the range over all is drawn
GPUS, ALL_GPUS = 16, 1024  # rows of the table, and of the folded one
GAP = 6.0  # of usual distances between samples: the node was not sampled, so nothing is drawn

# Figure of a node, title, label of the axis, how it is written, its factor (percents are shares here), and which of the nodes is the worst.
Shown = tuple[str, str, str, AxisFormat, float, Callable[[Iterable[tuple[float, int]]], tuple[float, int]]]
GPU_SHOWN: tuple[Shown, ...] = (
    (
        "gpu/utilization_percent_mean",
        "GPUs running any kernel, mean of a node",
        "utilisation",
        AxisFormat.PERCENT,
        0.01,
        min,
    ),
    (
        "gpu/tensor_active_percent_mean",
        "Tensor cores active, mean of a node",
        "tensor activity",
        AxisFormat.PERCENT,
        0.01,
        min,
    ),
    (
        "gpu/sm_clock_ratio_min",
        "Clock of a node's slowest GPU, of its maximum",
        "clock / maximum",
        AxisFormat.PERCENT,
        1.0,
        min,
    ),
    ("gpu/temperature_celsius_max", "Hottest GPU of a node", "°C", AxisFormat.NUMBER, 1.0, max),
    ("gpu/power_watts_sum", "Power of a node's GPUs", "W", AxisFormat.NUMBER, 1.0, max),
    ("gpu/memory_used_bytes_max", "Fullest GPU of a node", "bytes", AxisFormat.BYTES, 1.0, max),
)
HOST_SHOWN: tuple[Shown, ...] = (
    ("host/cpu_percent", "Processors of the host", "utilisation", AxisFormat.PERCENT, 0.01, max),
    ("host/memory_used_bytes", "Memory of the host in use", "bytes", AxisFormat.BYTES, 1.0, max),
    ("process/private_bytes", "Private memory of a node's ranks", "bytes", AxisFormat.BYTES, 1.0, max),
    ("disk/free_bytes", "Free on the disk of the run's directory", "bytes", AxisFormat.BYTES, 1.0, min),
    ("disk/read_bytes_per_second", "Reading from that disk", "bytes/s", AxisFormat.BYTES, 1.0, max),
    ("disk/write_bytes_per_second", "Writing to that disk", "bytes/s", AxisFormat.BYTES, 1.0, max),
    ("network/receive_bytes_per_second", "Received from the network", "bytes/s", AxisFormat.BYTES, 1.0, max),
    ("network/send_bytes_per_second", "Sent to the network", "bytes/s", AxisFormat.BYTES, 1.0, max),
    ("network/rdma_receive_bytes_per_second", "Received by RDMA", "bytes/s", AxisFormat.BYTES, 1.0, max),
    ("network/rdma_send_bytes_per_second", "Sent by RDMA", "bytes/s", AxisFormat.BYTES, 1.0, max),
)


def hardware_section(run: ReportData) -> ReportSection:
    intro: list[str] = []
    if not run.nodes:
        intro.append(
            "There are no samples of GPUs and hosts: monitor.system_seconds=0 leaves them out, older versions have none."
        )
    elif not any(node.gpus for node in run.nodes.values()):
        intro.append("No GPU was used, so the samples are of the hosts only.")
    planned = mapping_at(run.plan, "world").get("nodes")
    if run.nodes and isinstance(planned, int) and len(run.nodes) < planned:
        intro.append(
            f"Samples of {len(run.nodes)} of {planned} nodes are here. Nodes that keep theirs on a disk of their own are taken in "
            f"by nodes=FOLDER,... with the run's directories there."
        )
    if len(run.nodes) > NODES:
        intro.append(
            f"Lines are the median of {len(run.nodes)} nodes, bands reach from the lowest to the highest."
        )
    every = max((node.every for node in run.nodes.values()), default=1)
    if every > 1:
        intro.append(f"There are so many samples that one in {every:,} was read.")
    charts = tuple(chart for shown in (*GPU_SHOWN, *HOST_SHOWN) for chart in _chart(run, run.nodes, shown))
    tables = (*_gpus(run.nodes), *_environment(run))
    return ReportSection(
        id="hardware",
        title="Hardware",
        intro=tuple(intro),
        charts=charts,
        tables=tables,
        texts=tuple(_environments(run)),
    )


def _chart(run: ReportData, nodes: dict[int, NodeSamples], shown: Shown) -> Iterator[Chart]:
    figure, title, label, written, factor, worst = shown
    having = {name: node for name, node in nodes.items() if figure in node.curves.curves}
    if not having:
        return
    if len(having) <= NODES:
        series = tuple(
            _line(node, figure, f"node {name}", COLOURS[place % len(COLOURS)], factor)
            for place, (name, node) in enumerate(having.items())
        )
    else:
        series = (_range(having, figure, factor),)
    totals = {name: node.curves.total(figure) for name, node in having.items()}
    extreme, of = worst(
        ((total.low if worst is min else total.high) * factor, name) for name, total in totals.items()
    )
    alt = f"{title} over time, {len(having)} nodes. {'Lowest' if worst is min else 'Highest'}: {format_number(extreme)} on node {of}."
    yield Chart(
        id=figure.replace("/", "-"),
        title=title,
        alt=alt,
        series=series,
        y_label=label,
        y_format=written,
        x_format=AxisFormat.TIME,
        from_zero=written is not AxisFormat.NUMBER or label == "W",
        marks=attempt_marks(run, lambda attempt: attempt.began),
    )


def _line(node: NodeSamples, figure: str, name: str, colour: str, factor: float) -> Series:
    """One node's, with a gap where it was not sampled: between attempts."""
    drawn = curve_series(node.curves, figure, name, colour)
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
    """A point without values where distances are ``GAP`` times the usual one; the values times ``factor``."""
    limit = GAP * _usual(x)
    at: list[float] = []
    kept: list[list[float | None]] = [[] for _ in parts]
    for index, place in enumerate(x):
        if at and place - at[-1] > limit:
            at.append((at[-1] + place) / 2)
            for into in kept:
                into.append(None)
        at.append(place)
        for into, part in zip(kept, parts, strict=True):
            value = part[index]
            into.append(None if value is None else value * factor)
    return at, kept


def _usual(x: Sequence[float]) -> float:
    """The distance between neighbours."""
    return statistics.median([after - before for before, after in pairwise(x)] or [1.0])


def _range(nodes: dict[int, NodeSamples], figure: str, factor: float) -> Series:
    """Over nodes, in common buckets of time: their clocks and samples are not in step."""
    begin = min(node.curves.x[0] for node in nodes.values())
    width = max(_usual(node.curves.x) for node in nodes.values())
    held: dict[int, list[tuple[float, float, float]]] = {}
    for node in nodes.values():
        curve: Curve = node.curves.curves[figure]
        for x, low, mid, high in zip(node.curves.x, curve.low, curve.mid, curve.high, strict=True):
            if low is not None and mid is not None and high is not None:
                held.setdefault(int((x - begin) / width), []).append((low, mid, high))
    order = sorted(held)
    places, (lows, mids, highs) = _with_gaps(
        [begin + (bucket + 0.5) * width for bucket in order],
        (
            [min(low for low, _, _ in held[bucket]) for bucket in order],
            [statistics.median(mid for _, mid, _ in held[bucket]) for bucket in order],
            [max(high for _, _, high in held[bucket]) for bucket in order],
        ),
        factor,
    )
    return Series(
        name="median node, and the range of all", colour="blue", x=places, mid=mids, low=lows, high=highs
    )


def _gpus(nodes: dict[int, NodeSamples]) -> Iterator[ReportTable]:
    """Those that look worst, by time with lowered clocks, then by utilisation; and folded all of them."""
    every = [(name, node, gpu) for name, node in nodes.items() for gpu in node.gpus]

    def badness(one: tuple[int, NodeSamples, int]) -> tuple[float, float]:
        held = one[1].gpus[one[2]]
        return -(_mean(held, "throttled_percent") or 0.0), _mean(held, "utilization_percent") or 0.0

    kinds = sorted({name for node in nodes.values() for name in node.names.values()})
    rows = tuple(
        (f"node {name}, GPU {gpu}", *_gpu(node.gpus[gpu], node.throttled.get(gpu, {})))
        for name, node, gpu in sorted(every, key=badness)[:ALL_GPUS]
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
        "clock lowered by (samples)",
        "ECC",
        "XID",
    )
    note = (
        "Utilisation, tensor cores, power, clock (of its maximum) and time throttled are means over all samples. ECC: uncorrected "
        "errors. XID: errors that the driver told."
    )
    few = len(rows) <= GPUS
    title = ": ".join(
        ("GPUs" if few else f"The {GPUS} GPUs that look worst", *filter(None, [", ".join(kinds)]))
    )
    if rows:
        yield ReportTable(caption=title, align="nrrrrrrrlrr", head=head, rows=rows[:GPUS], note=note)
    if not few:
        title = f"{len(rows):,} of {len(every):,} GPUs, the worst first"
        yield ReportTable(caption=title, align="nrrrrrrrlrr", head=head, rows=rows, folded=True)


def _gpu(held: Mapping[str, RunningStats], reasons: Mapping[str, int]) -> tuple[str, ...]:
    lowered = ", ".join(
        f"{reason} ({count:,})" for reason, count in reasons.items() if reason not in ("none", "idle")
    )
    return (
        _percents(_mean(held, "utilization_percent")),
        _percents(_mean(held, "tensor_active_percent")),
        format_gigabytes(_most(held, "memory_used_bytes")),
        _unit(_most(held, "temperature_celsius"), "°C"),
        _unit(_mean(held, "power_watts"), "W"),
        format_percent(_mean(held, "sm_clock_ratio")),
        _percents(_mean(held, "throttled_percent")),
        lowered,
        format_number(_most(held, "ecc_uncorrected_errors")),
        format_number(_most(held, "xid_events")),
    )


def _mean(held: Mapping[str, RunningStats], figure: str) -> float | None:
    return held[figure].mean if figure in held else None


def _most(held: Mapping[str, RunningStats], figure: str) -> float | None:
    return held[figure].high if figure in held else None


def _unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:,.0f} {unit}"


def _percents(value: float | None) -> str:
    return format_percent(None if value is None else value / 100)


def _environment(run: ReportData) -> Iterator[ReportTable]:
    """Of the newest attempt that wrote it: single values."""
    for attempt in reversed(run.attempts):
        rows = tuple(
            (key, str(value)) for key, value in _flat(attempt.environment) if value not in (None, "")
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
    """Of older attempts, where they differ from the newest one."""
    newest = next((attempt for attempt in reversed(run.attempts) if attempt.environment), None)
    for attempt in run.attempts:
        there = dict(_flat(newest.environment)) if newest is not None else {}
        differing = [(key, value) for key, value in _flat(attempt.environment) if there.get(key) != value]
        if differing:
            yield CollapsedText(
                f"attempt {attempt.number} differed", "\n".join(f"{key}: {value}" for key, value in differing)
            )


def _flat(values: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested objects as ``git.commit``."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, ", ".join(map(str, values)) if isinstance(values, list) else values
