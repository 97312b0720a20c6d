"""Show an advice: a table for the terminal, JSON, and an experiment's file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import EngineName
from toolkit.estimate.advice import GB, Advice, AdvisedLayout, layout_overrides
from toolkit.estimate.cost import format_cost
from toolkit.plan.devices import memory_bytes
from toolkit.plan.types import Device, RunPlan
from toolkit.progress import duration

if TYPE_CHECKING:
    from rich.console import RenderableType


def to_json(advice: Advice) -> dict[str, Any]:
    """Return the advice in JSON types, with the units of the plan's JSON."""
    return {
        "format_version": 1,
        "missed": advice.missed,
        "best": [_entry(advised, advice) for advised in advice.best],
        "alternatives": [
            {
                "name": other.name,
                "layout": str(other.layout),
                "step_seconds": other.seconds,
                "reason": other.reason,
            }
            for other in advice.alternatives
        ],
        "searched": {
            "layouts": advice.search.layouts,
            "without_memory": advice.search.without_memory,
            "planned": advice.search.planned,
        },
    }


def format_advice(advice: Advice) -> RenderableType:
    """Return the best layouts, the alternatives and how to run the first."""
    from rich.console import Group
    from rich.text import Text

    search, first = advice.search, advice.best[0]
    parts: list[RenderableType] = []
    if advice.missed is not None:
        parts += [Text(f"warning: {advice.missed}", style="yellow"), Text()]
    parts += [_best_table(advice), Text()]
    for title, text in format_cost(first.cost):
        parts.append(Text(f"{title}: {text}"))
    if advice.alternatives:
        parts += [Text(), _alternatives_table(advice)]
    searched = (
        f"{search.layouts:,} layouts: {search.planned:,} planned exactly, the others excluded by bounds of "
        "their time or memory. The batch, the precision and keys on the command line stayed as they are."
    )
    if advice.without_transformer_engine:
        searched += (
            " Megatron-core was planned without Transformer Engine: with it on the machines, write "
            "cluster.transformer_engine=2.11.0 and compare."
        )
    overrides = layout_overrides(first, advice.config)
    parts += [Text(), Text(searched, style="dim")]
    parts.append(
        Text(
            f"To run the first, add: {' '.join(overrides)}"
            if overrides
            else "The first is the run as configured."
        )
    )
    return Group(*parts)


def forecast_lines(advice: Advice) -> list[str]:
    """Return the comment of the experiment's file: what is predicted for the first layout."""
    first = advice.best[0]
    estimate, memory = first.estimate, first.plan.memory
    lines = [
        f"The best of {advice.search.layouts:,} layouts: {first.layout}.",
        f"Predicted: {estimate.seconds:.3g} s a step ({estimate.low:.3g} to {estimate.high:.3g}), "
        f"{first.units_per_second:,.0f} {first.plan.unit}/s"
        + (f", MFU {first.mfu:.0%}" if first.mfu is not None else "")
        + (f", {memory.device_total / GB:.1f} GB a rank" if memory is not None else "")
        + ".",
    ]
    return [*lines, *(f"{title}: {text}." for title, text in format_cost(first.cost))]


def start_command(plan: RunPlan, arguments: str) -> str:
    """Return the command that starts ``plan`` with ``arguments`` on its machines."""
    world = plan.world
    if plan.config.engine.name is EngineName.local or world.device is Device.CPU:
        return f"python launch/train.py {arguments}"
    if world.nodes > 1:
        launcher = f"torchrun --nnodes {world.nodes} --nproc_per_node {world.ranks_per_node}"
        return f"{launcher} launch/train.py {arguments}"
    return f"deepspeed --num_gpus {world.ranks} launch/train.py {arguments}"


def _entry(advised: AdvisedLayout, advice: Advice) -> dict[str, Any]:
    estimate, memory, layout = advised.estimate, advised.plan.memory, advised.layout
    return {
        "layout": str(layout),
        "overrides": layout_overrides(advised, advice.config),
        "nodes": layout.nodes,
        "ranks": advised.plan.world.ranks,
        "step_seconds": estimate.seconds,
        "step_seconds_low": estimate.low,
        "step_seconds_high": estimate.high,
        "parts": dict(estimate.parts),
        "device_total": None if memory is None else memory.device_total,
        f"{advised.plan.unit}_per_second": advised.units_per_second,
        "mfu": advised.mfu,
        "cost": advised.cost.to_json(),
    }


def _best_table(advice: Advice) -> RenderableType:
    from rich.table import Table

    first = advice.best[0]
    shown = Table(title=_title(advice), title_justify="left")
    shown.add_column("", justify="right")
    several = len({advised.layout.nodes for advised in advice.best}) > 1 or (
        first.layout.nodes != advice.config.cluster.nodes
    )
    names = [*(["nodes"] if several else []), "step, s", "80%", "GB", f"{first.plan.unit}/s", "MFU", "run"]
    has_cost, has_energy = first.cost.cost is not None, first.cost.kwh is not None
    names += [*(["cost"] if has_cost else []), *(["MWh"] if has_energy else [])]
    shown.add_column("layout", overflow="fold", ratio=1)
    for name in names:
        shown.add_column(name, justify="right", no_wrap=True)
    for number, advised in enumerate(advice.best, 1):
        cells = [str(number), str(advised.layout), *([str(advised.layout.nodes)] if several else [])]
        shown.add_row(*cells, *_figures(advised, has_cost=has_cost, has_energy=has_energy))
    return shown


def _figures(advised: AdvisedLayout, *, has_cost: bool, has_energy: bool) -> Sequence[str]:
    estimate, memory, cost = advised.estimate, advised.plan.memory, advised.cost
    have = memory_bytes(advised.plan.world) if advised.plan.world.device is Device.CUDA else None
    size = "" if memory is None else f"{memory.device_total / GB:,.1f}"
    share = f" ({memory.device_total / have:.0%})" if memory is not None and have else ""
    cells = [
        f"{estimate.seconds:.3g}",
        f"{estimate.low:.3g}-{estimate.high:.3g}",
        size + share,
        f"{advised.units_per_second:,.0f}",
        "" if advised.mfu is None else f"{advised.mfu:.0%}",
        duration(cost.hours * 3600),
    ]
    cells += [f"{cost.cost:,.0f}"] if has_cost and cost.cost is not None else []
    return [*cells, *([f"{cost.kwh / 1000:,.3g}"] if has_energy and cost.kwh is not None else [])]


def _title(advice: Advice) -> str:
    world = advice.best[0].plan.world
    kind = world.gpu or "GPUs" if world.device is Device.CUDA else "CPU ranks"
    if advice.missed is not None:
        return "the nearest layouts"
    what = "the cheapest layouts that meet the deadline" if advice.goal.cheapest else "the fastest layouts"
    if advice.goal.most_gpu_seconds < float("inf"):
        what += " within the budget"
    return f"{what} on {kind}"


def _alternatives_table(advice: Advice) -> RenderableType:
    from rich.table import Table

    shown = Table(title="why not", title_justify="left")
    shown.add_column("alternative", no_wrap=True)
    shown.add_column("layout", overflow="fold", ratio=2)
    shown.add_column("step, s", justify="right", no_wrap=True)
    shown.add_column("reason", overflow="fold", ratio=3)
    for other in advice.alternatives:
        seconds = "" if other.seconds is None else f"{other.seconds:.3g}"
        shown.add_row(other.name, str(other.layout), seconds, other.reason)
    return shown
