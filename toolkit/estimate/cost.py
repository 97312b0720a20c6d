"""Predict the hours, GPU-hours, money, energy and CO2 of a run, with their assumptions.

Prices are never assumed: without ``monitor.price_per_gpu_hour`` there is no cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.config.cluster import EnergyConfig
from toolkit.estimate.types import StepEstimate
from toolkit.plan.devices import find_gpu
from toolkit.plan.types import Device, RunPlan
from toolkit.progress import duration

# A node of eight H100 (700 W each) drew up to 8.4 kW in training: Latif et al., 2412.08602.
NODE_SHARE = 8400 / (8 * 700)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Time, cost, energy and CO2 of all optimizer steps. The interval is that of the predicted step time.

    Attributes:
        hours: wall time of the steps.
        low_hours, high_hours: bounds of the 80% interval of ``hours``.
        gpu_hours: None on CPU ranks.
        cost: in the currency of ``monitor.price_per_gpu_hour``; None without a price.
        kwh: energy with the data center's overhead; None if the GPU's power is not known.
        kg_co2: of that energy.
        assumptions: one sentence each.
    """

    hours: float
    low_hours: float
    high_hours: float
    gpu_hours: float | None = None
    cost: float | None = None
    kwh: float | None = None
    kg_co2: float | None = None
    assumptions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return all attributes as JSON types; unknown ones are null."""
        return {**asdict(self), "assumptions": list(self.assumptions)}


def full_steps(plan: RunPlan) -> float:
    """Optimizer steps of the whole run in global batches after the ramp, whose smaller batches count less."""
    return plan.batch.at(plan.config.train.steps).first_sample / plan.batch.global_batch


def run_cost(plan: RunPlan, estimate: StepEstimate) -> RunCost:
    """Compute the cost of all steps of ``plan``."""
    steps = full_steps(plan)
    hours = steps * estimate.seconds / 3600
    assumptions = ["the time is that of optimizer steps, without starts, evaluations, saves and failures"]
    gpu_hours = cost = kwh = kg_co2 = None
    if plan.world.device is Device.CUDA:
        gpu_hours = hours * plan.world.ranks
        price = plan.config.monitor.price_per_gpu_hour
        cost = None if price is None else gpu_hours * price
        energy = plan.config.cluster.energy
        if (watts := gpu_watts(plan)) is not None:
            kwh = gpu_hours * watts / 1000 * energy.pue
            kg_co2 = kwh * energy.grams_co2_per_kwh / 1000
            assumptions += _energy_assumptions(energy, watts)
    return RunCost(
        hours=hours,
        low_hours=steps * estimate.low / 3600,
        high_hours=steps * estimate.high / 3600,
        gpu_hours=gpu_hours,
        cost=cost,
        kwh=kwh,
        kg_co2=kg_co2,
        assumptions=tuple(assumptions),
    )


def gpu_watts(plan: RunPlan) -> float | None:
    """Power of one GPU of ``plan`` with its share of the host, in watts; None if it is not known."""
    given = plan.config.cluster.energy.watts_per_gpu
    if given is not None:
        return given
    gpu = find_gpu(plan.world.gpu)
    return None if gpu is None else gpu.design_watts * NODE_SHARE


def format_cost(cost: RunCost) -> Iterator[tuple[str, str]]:
    """Yield the rows of the plan's table: titles and texts."""
    between = f"{duration(cost.low_hours * 3600)} to {duration(cost.high_hours * 3600)}"
    hours = "" if cost.gpu_hours is None else f"; {_short(cost.gpu_hours)} GPU-hours"
    yield "all steps", f"{duration(cost.hours * 3600)} ({between}){hours}"
    if cost.cost is not None:
        factor = cost.cost / cost.hours
        yield "cost", f"{cost.cost:,.0f} ({factor * cost.low_hours:,.0f} to {factor * cost.high_hours:,.0f})"
    if cost.kwh is not None and cost.kg_co2 is not None:
        assumed = "; ".join(cost.assumptions[1:])
        yield "energy", f"{_short(cost.kwh)} kWh, {_short(cost.kg_co2)} kg CO2: {assumed}"


def _short(value: float) -> str:
    """Three digits, and thousands with commas."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _energy_assumptions(energy: EnergyConfig, watts: float) -> Iterator[str]:
    source = (
        f"{NODE_SHARE:g} x its thermal design power" if energy.watts_per_gpu is None else "cluster.energy"
    )
    yield f"{watts:,.0f} W a GPU with its share of the host ({source})"
    yield f"power usage effectiveness {energy.pue:g}"
    yield f"{energy.grams_co2_per_kwh:g} g CO2 per kWh"
