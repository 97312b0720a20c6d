"""Latency and bandwidth along the axes of a layout before there is an engine: over process groups made for it and given back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from toolkit.engine.rank_sync import make_flag_reduce
from toolkit.layout.axes import ALL, ORDER, Axes
from toolkit.monitor.link_probe import probe_row
from toolkit.monitor.sink import Row
from toolkit.observe.probe import NANO, time_all_reduces

Groups = list[tuple[int, ...]]


def measure_links(axes: Axes | None, device: torch.device, rank: int, ranks: int) -> list[Row]:
    """All-reduces along each axis, also along the pipeline's, and over all ranks; rows as ``monitor/link_probe.py`` has them.

    Collective: every rank calls it, in the process group of all.

    Args:
        axes: None where there is no plan: all ranks only.
    """
    all_reduce_flags = make_flag_reduce(ranks)
    rows: list[Row] = []
    for name, groups in _along(axes, ranks):
        made = {
            group: dist.new_group(list(group)) for group in groups
        }  # every rank makes all of them, in one order
        own = next(group for group in groups if rank in group)
        timed = time_all_reduces(made[own], device)
        p50, p99, large = (
            round(seconds * NANO) for seconds in (timed.latency_p50, timed.latency_p99, timed.large_median)
        )
        worst_p50, worst_p99, slowest, fastest = all_reduce_flags([p50, p99, large, -large])
        named = all_reduce_flags([own[0] if large == slowest else -1])[0]
        rows.append(
            probe_row(
                name,
                operation=timed.operation,
                ranks=timed.ranks,
                latency_p50=worst_p50 / NANO,
                latency_p99=worst_p99 / NANO,
                large_bytes=timed.large_bytes,
                slowest_large=slowest / NANO,
                fastest_large=-fastest / NANO,
                slowest_of=next(group for group in groups if named in group),
            )
        )
        dist.destroy_process_group(made[own])
    return rows


def _along(axes: Axes | None, ranks: int) -> Sequence[tuple[str, Groups]]:
    named: list[tuple[str, Groups]] = []
    if axes is not None:
        named = [(axis.value, list(axes.groups(axis))) for axis in ORDER if 1 < getattr(axes, axis) < ranks]
        whole = [axis.value for axis in ORDER if getattr(axes, axis) == ranks]
        if whole:
            return [(whole[0], [tuple(range(ranks))])]
    return [*named, (ALL, [tuple(range(ranks))])]
