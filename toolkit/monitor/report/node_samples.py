"""Read the samples of the nodes' GPUs and hosts: the rows of ``monitor/system/sampler.py``, one file per
node.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.monitor.report.curve_reader import (
    Advance,
    estimate_rows,
    is_number,
    read_curves,
    time_bucket_width,
)
from toolkit.monitor.report.downsample import Curves, RunningStats

_SINGLE = re.compile(r"(gpu|rank)/(\d+)/(\w+)")
# Only these metrics of single GPUs are kept, because a node has hundreds.
GPU_METRICS = frozenset(
    (
        "utilization_percent",
        "sm_active_percent",
        "tensor_active_percent",
        "memory_used_bytes",
        "temperature_celsius",
        "power_watts",
        "sm_clock_ratio",
        "throttled_percent",
        "ecc_uncorrected_errors",
        "xid_events",
    )
)


@dataclass(frozen=True, slots=True)
class NodeSamples:
    """The samples of one node.

    Attributes:
        curves: over time, of the host and of the node's GPUs together.
        gpus: by GPU and metric, over all samples.
        names: the model of each GPU.
        throttled: by GPU, the number of samples with each throttle reason.
        rank_bytes: the maximal private memory of each rank.
        every: one of this many samples was read.
    """

    curves: Curves
    gpus: dict[int, dict[str, RunningStats]]
    names: dict[int, str]
    throttled: dict[int, Counter[str]]
    rank_bytes: dict[int, float]
    every: int


def read_node(path: Path, advance: Advance, *, points: int, rows: int) -> NodeSamples:
    """Read one node's file.

    Args:
        points: points of a curve. Medians over all samples are not kept, because a cluster has many nodes.
        rows: the approximate number of rows to read. Changes of error counts in skipped rows are seen later.
    """
    every = max(1, math.ceil(estimate_rows(path, "time") / rows))
    gpus: dict[int, dict[str, RunningStats]] = defaultdict(lambda: defaultdict(lambda: RunningStats(keep=0)))
    names: dict[int, str] = {}
    throttled: dict[int, Counter[str]] = defaultdict(Counter)
    rank_bytes: dict[int, float] = defaultdict(float)

    def add_single(of: str, number: int, metric: str, value: object) -> None:
        if of == "rank":
            if metric == "private_bytes" and isinstance(value, int | float):
                rank_bytes[number] = max(rank_bytes[number], value)
        elif metric in GPU_METRICS and isinstance(value, int | float):
            gpus[number][metric].add((value,))
        elif metric == "throttle_reasons" and isinstance(value, str):
            throttled[number].update(value.split("+"))
        elif metric == "name":
            names[number] = str(value)

    def metrics(row: Mapping[str, Any]) -> dict[str, float]:
        node_metrics: dict[str, float] = {}
        for name, value in row.items():
            single = _SINGLE.fullmatch(name)
            if single is not None:
                add_single(single[1], int(single[2]), single[3], value)
            elif is_number(value) and name not in ("node", "time"):
                node_metrics[name] = value
        return node_metrics

    curves = read_curves(
        path, "time", metrics, advance, width=time_bucket_width, points=points, keep=0, every=every
    )
    return NodeSamples(
        curves,
        {gpu: dict(stats) for gpu, stats in gpus.items()},
        names,
        dict(throttled),
        dict(rank_bytes),
        every,
    )


def node_number(path: Path) -> int:
    """Parse the node from ``system/node-3.jsonl``."""
    number = path.stem.removeprefix("node-")
    return int(number) if number.isdigit() else -1
