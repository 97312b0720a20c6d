"""Detect faults of single GPUs from the samples of their node (``monitor/system/sampler.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from toolkit.monitor.alert import Alert, Level
from toolkit.monitor.sink import Row
from toolkit.monitor.system.gpu_codes import HARMFUL, xid_info

LASTING_SAMPLES = 3  # a condition must hold for as many samples, so that spikes give no alert
THROTTLED_PERCENT = 20.0  # of the time; the hardware halves the clock, so this loses 10%
BUSY_PERCENT = 50.0  # utilization of GPUs whose clocks are compared: an idle GPU lowers its clock
SLOW_CLOCK = 0.8  # of the median of the others; GPUs at the same power limit differ by less than 10%


def lasts(rows: Sequence[Row], condition: Callable[[Row], bool]) -> bool:
    """Return whether the condition held in all of the last ``LASTING_SAMPLES`` rows."""
    return len(rows) == LASTING_SAMPLES and all(condition(row) for row in rows)


def throttled_gpu(rows: Sequence[Row], gpu: int, node: int) -> Alert | None:
    """Detect a GPU whose clocks are lowered by heat or power supply in all of ``rows``."""

    def is_throttled(row: Row) -> bool:
        return (
            bool(row.get(f"gpu/{gpu}/throttled"))
            or row.get(f"gpu/{gpu}/throttled_percent", 0.0) >= THROTTLED_PERCENT
        )

    if not lasts(rows, is_throttled):
        return None
    row = rows[-1]
    harmful_reasons = dict.fromkeys(
        name
        for sample in rows
        for name in str(sample.get(f"gpu/{gpu}/throttle_reasons", "")).split("+")
        if name in HARMFUL
    )
    reasons = " and ".join(harmful_reasons) or "heat or power supply"
    evidence = [f"in {len(rows)} consecutive samples", *_describe_clock(row, gpu)]
    evidence += [f"{row[key]:g} °C" for key in (f"gpu/{gpu}/temperature_celsius",) if key in row]
    evidence += [
        f"memory at {row[key]:g} °C" for key in (f"gpu/{gpu}/memory_temperature_celsius",) if key in row
    ]
    evidence += [
        f"{row[key]:g} % of the time since the previous sample"
        for key in (f"gpu/{gpu}/throttled_percent",)
        if key in row
    ]
    by_power = set(harmful_reasons) and set(harmful_reasons) <= {"power-brake"}
    remedy = (
        "have the node's power supplies and its rack's power limit checked"
        if by_power
        else ("have fans, dust, inlet temperature and the seat of the heat sink checked")
    )
    return Alert(
        name="gpu-slow",
        fault="throttled",
        level=Level.WARNING,
        step=row["step"],
        where=_format_gpu(node, gpu),
        cause=f"the clock of GPU {gpu} of node {node} is throttled: {reasons}",
        evidence=", ".join(evidence),
        next_step=f"{remedy}; nvidia-smi -i {_smi_index(row, gpu)} -q -d PERFORMANCE,TEMPERATURE,POWER "
        "on that node; if it persists, exclude the node: all ranks wait for the slowest",
    )


def slow_clock(rows: Sequence[Row], gpu: int, node: int) -> Alert | None:
    """Detect a busy GPU whose clock is far below that of the other busy GPUs of its node in all of
    ``rows``.
    """

    def peers(row: Row) -> list[float]:
        return [
            row[f"gpu/{other}/sm_clock_ratio"] for other in gpus(row) if other != gpu and _busy(row, other)
        ]

    def slow(row: Row) -> bool:
        others = peers(row)
        return (
            bool(others)
            and _busy(row, gpu)
            and row[f"gpu/{gpu}/sm_clock_ratio"] < SLOW_CLOCK * median(others)
        )

    if not lasts(rows, slow):
        return None
    row = rows[-1]
    reasons = row.get(f"gpu/{gpu}/throttle_reasons", "unknown")
    return Alert(
        name="gpu-slow",
        fault="slow-clock",
        level=Level.WARNING,
        step=row["step"],
        where=_format_gpu(node, gpu),
        cause=f"GPU {gpu} of node {node} runs at a much lower clock than the other GPUs of the node",
        evidence=f"{', '.join(_describe_clock(row, gpu))}; the others' median {median(peers(row)):.0%}, "
        f"alert below {SLOW_CLOCK:.0%} of it; throttle reasons of its driver: {reasons}",
        next_step=f"compare limits and set clocks: nvidia-smi -i {_smi_index(row, gpu)} -q -d "
        f"CLOCK,POWER,PERFORMANCE; nvidia-smi --reset-gpu-clocks -i {_smi_index(row, gpu)} reverts a "
        "forgotten setting",
    )


def memory_errors(previous: Row, row: Row, gpu: int, node: int) -> Iterator[Alert]:
    """Yield alerts for new uncorrectable errors and for row remappings that are pending or failed.

    Args:
        previous: the last known value of each figure.
    """

    def alert(level: Level, fault: str, cause: str, evidence: str, next_step: str) -> Alert:
        return Alert(
            name="gpu-fault",
            fault=fault,
            level=level,
            step=row["step"],
            where=_format_gpu(node, gpu),
            cause=cause,
            evidence=evidence,
            next_step=next_step,
        )

    index = _smi_index({**previous, **row}, gpu)
    reset = (
        f"exclude the node from the run and reset the GPU (nvidia-smi --gpu-reset -i {index}); test "
        "it: dcgmi diag -r 3"
    )
    errors = f"gpu/{gpu}/ecc_uncorrected_errors"
    if errors in row and errors in previous and row[errors] > previous[errors]:
        yield alert(
            Level.ERROR,
            "memory-error",
            f"the memory of GPU {gpu} of node {node} had errors that ECC cannot correct",
            f"{row[errors] - previous[errors]:g} since the previous sample, {row[errors]:g} since the driver "
            "was loaded",
            f"if the run continues, results since the last checkpoint are in doubt; {reset}",
        )
    if _begins(previous, row, f"gpu/{gpu}/row_remap_failed"):
        yield alert(
            Level.ERROR,
            "row-remap-failed",
            f"a bad memory row of GPU {gpu} of node {node} could not be remapped",
            _describe_remapped(row, gpu),
            "retire the node: NVIDIA replaces GPUs in this state",
        )
    if _begins(previous, row, f"gpu/{gpu}/row_remap_pending"):
        yield alert(
            Level.WARNING,
            "row-remap-pending",
            f"a bad memory row of GPU {gpu} of node {node} is waiting to be remapped",
            _describe_remapped(row, gpu),
            f"the run may continue; afterwards {reset}",
        )


def lost_gpu(previous: Row, row: Row, gpu: int, node: int) -> Alert | None:
    if not _begins(previous, row, f"gpu/{gpu}/lost"):
        return None
    return Alert(
        name="gpu-fault",
        fault="lost",
        level=Level.ERROR,
        step=row["step"],
        where=_format_gpu(node, gpu),
        cause=f"GPU {gpu} of node {node} is lost: its driver cannot reach it any more",
        evidence=f"NVML answers GPU_IS_LOST for {previous.get(f'gpu/{gpu}/name', 'the GPU')} "
        f"{previous.get(f'gpu/{gpu}/uuid', '')}".rstrip(),
        next_step="the run ends or hangs; restart it without this node, and restart the node: dmesg | grep "
        "-i -e xid -e nvrm has details",
    )


def xid_alert(number: int, gpu: int | None, node: int, step: int, uuid: str = "") -> Alert:
    """Build the alert for an XID event of the driver. ``gpu`` is None for a GPU that the run does not use."""
    info = xid_info(number)
    owner = f"GPU {gpu} of node {node}" if gpu is not None else f"a GPU of node {node}"
    return Alert(
        name="gpu-fault",
        fault="xid",
        level=info.level,
        step=step,
        where=_format_gpu(node, gpu) if gpu is not None else f"node {node}",
        cause=f"XID {number} on {owner}: the driver reports {info.meaning}",
        evidence=f"event {number} of NVML{f' on {uuid}' if uuid else ''}; dmesg | grep -i xid on the node "
        "has the driver's message",
        next_step=info.next_step.replace("INDEX", uuid or "INDEX"),
    )


def gpus(row: Row) -> range:
    return range(int(row.get("gpu/count", 0)))


def _begins(previous: Row, row: Row, name: str) -> bool:
    return bool(row.get(name)) and not previous.get(name)


def _busy(row: Row, gpu: int) -> bool:
    return (
        row.get(f"gpu/{gpu}/utilization_percent", 0.0) >= BUSY_PERCENT and f"gpu/{gpu}/sm_clock_ratio" in row
    )


def _describe_clock(row: Row, gpu: int) -> list[str]:
    if f"gpu/{gpu}/sm_clock_ratio" not in row:
        return []
    return [
        f"{row[f'gpu/{gpu}/sm_clock_mhz']:g} of {row[f'gpu/{gpu}/sm_clock_max_mhz']:g} MHz "
        f"({row[f'gpu/{gpu}/sm_clock_ratio']:.0%})"
    ]


def _describe_remapped(row: Row, gpu: int) -> str:
    counts = {kind: row.get(f"gpu/{gpu}/remapped_rows_{kind}", 0) for kind in ("corrected", "uncorrected")}
    return (
        f"rows remapped during its life: {counts['corrected']} after corrected errors, "
        f"{counts['uncorrected']} after uncorrected errors"
    )


def _format_gpu(node: int, gpu: int) -> str:
    return f"node {node}, GPU {gpu}"


def _smi_index(row: Mapping[str, object], gpu: int) -> object:
    """Return the argument for nvidia-smi -i: the UUID, because its own numbers may differ from CUDA's."""
    return row.get(f"gpu/{gpu}/uuid", gpu)
