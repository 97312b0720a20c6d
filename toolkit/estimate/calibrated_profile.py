"""Change a hardware profile by measurements of operators and by factors that were fitted to whole runs.

An operator's measured figure replaces the profile's: the fraction of the peak at which the model of
``estimate/compute.py`` reproduces the measured seconds, as geometric mean over the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from toolkit.config.cluster import ClusterConfig
from toolkit.estimate.calibration_fit import fit_positive
from toolkit.estimate.communication import measured_topology
from toolkit.estimate.compute import attention_seconds, matmul_seconds
from toolkit.estimate.interconnects import topology_of
from toolkit.estimate.measurements import (
    ADAMW_BYTES,
    AttentionTiming,
    CollectiveTiming,
    GemmTiming,
    MachineTimings,
)
from toolkit.estimate.network import Collective, Group, Topology, collective_seconds
from toolkit.estimate.operators import FusedAttention, Matmul, optimizer_work
from toolkit.estimate.profile import CPU, HardwareProfile
from toolkit.plan.types import Device, World
from toolkit.step_parts import OPTIMIZER

# Each factor multiplies seconds: it divides speeds, and multiplies times.
SPEEDS: Mapping[str, tuple[str, ...]] = {
    "matmul": ("matmul_fraction", "matmul_fraction_fp8"),
    "attention": ("attention_forward", "attention_backward"),
    "memory": ("bandwidth_fraction",),
    "inside": ("inside_factor",),
    "between": ("between_factor",),
}
TIMES: Mapping[str, tuple[str, ...]] = {
    "inside": ("inside_latency_factor",),
    "between": ("between_latency_factor",),
    "operator": ("launch_seconds", "host_seconds"),
    "collective": ("call_seconds",),
    "module": ("module_seconds",),
    "torch": ("torch_layers",),
    OPTIMIZER: ("optimizer_factor",),
    "step": ("step_seconds",),
}
FACTORS = tuple(dict.fromkeys((*SPEEDS, *TIMES)))
MEANING = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "memory traffic",
    "inside": "links within a node",
    "between": "links between nodes",
    "operator": "starting an operator",
    "collective": "starting a collective",
    "module": "hooks of modules under ZeRO 3",
    "torch": "layers that are torch modules",
    OPTIMIZER: "the optimizer's update",
    "step": "the engine's own work",
}
ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
Timing = TypeVar("Timing")
# Logarithm by which a measured collective may differ from the model; width of the prior of a link's factors.
LINK_SPREAD, LINK_WIDTH = 0.1, 2.0
ROUNDS = 20  # of the fixed-point iteration; the model is nearly inverse in the fraction


def scale_profile(profile: HardwareProfile, factors: Mapping[str, float]) -> HardwareProfile:
    """Return ``profile`` with the seconds of each quantity multiplied by its factor; 1 if it has none."""
    speeds = {
        name: getattr(profile, name) / factors.get(factor, 1.0)
        for factor, names in SPEEDS.items()
        for name in names
    }
    times = {
        name: getattr(profile, name) * factors.get(factor, 1.0)
        for factor, names in TIMES.items()
        for name in names
    }
    return replace(profile, **speeds, **times)


def measured_profile(profile: HardwareProfile, measured: MachineTimings) -> HardwareProfile:
    """Return ``profile`` with what was measured of the device and its links."""
    device = measured.device
    profile = replace(profile, bandwidth_fraction=device.memory_bandwidth / profile.bandwidth)
    if profile.name == CPU:
        # A CPU executes an operator where it starts it. On a GPU the shortest kernel is not visible from the
        # host, whose time for an operator of a model includes that of the modules around it.
        profile = replace(profile, launch_seconds=device.operator_seconds)
    update = optimizer_work(1.0, 4, fused=profile.name != CPU)
    profile = replace(
        profile,
        optimizer_factor=ADAMW_BYTES
        / device.optimizer_bandwidth
        / (update.moved_bytes / profile.effective_bandwidth),
    )
    by_dtype = {dtype: [one for one in device.gemms if one.dtype == dtype] for dtype in ELEMENT}
    half = by_dtype["bf16"] or by_dtype["fp16"]
    profile = _fit(profile, "matmul_fraction", half, _matmul_ratio)
    profile = _fit(profile, "fp32_flops", by_dtype["fp32"], _matmul_ratio)
    profile = _fit(profile, "matmul_fraction_fp8", by_dtype["fp8"], _matmul_ratio)
    # CPUs train in fp32, GPUs in 16 bits.
    trained = "fp32" if profile.name == CPU else "bf16"
    attentions = [one for one in device.attentions if one.dtype == trained]
    profile = _fit(profile, "attention_forward", attentions, _attention_forward_ratio)
    profile = _fit(profile, "attention_backward", attentions, _attention_backward_ratio)
    return _with_links(profile, measured)


def _with_links(profile: HardwareProfile, measured: MachineTimings) -> HardwareProfile:
    """Fit bandwidth and latency of the links within a node and between nodes to the measured collectives."""
    usual = topology_of(ClusterConfig(), _world(profile, measured))
    if measured.device.to_device is not None:
        profile = replace(profile, host_factor=measured.device.to_device / usual.host.bandwidth)
    for level, across in (("inside", False), ("between", True)):
        timings = [one for one in measured.collectives if (one.ranks > one.per_node) is across]
        if timings:
            profile = _with_link(profile, level, timings, usual)
    return profile


def _with_link(
    profile: HardwareProfile, level: str, timings: Sequence[CollectiveTiming], usual: Topology
) -> HardwareProfile:
    """Fit the ``level``, "inside" or "between", to timings of groups whose narrowest links are there."""

    def changed(factors: Sequence[float]) -> HardwareProfile:
        bandwidth, latency = factors
        return _changed(profile, {f"{level}_factor": bandwidth, f"{level}_latency_factor": latency})

    def residuals(factors: Sequence[float]) -> list[float]:
        topology = measured_topology(usual, changed(factors))
        return [math.log(_collective(one, topology) / one.seconds) / LINK_SPREAD for one in timings]

    found, _ = fit_positive(residuals, 2, LINK_WIDTH)
    return changed(found)


def _collective(timing: CollectiveTiming, topology: Topology) -> float:
    group = Group(timing.ranks, min(timing.per_node, topology.domain))
    return collective_seconds(Collective(timing.operation), timing.size, group, topology)


def _world(profile: HardwareProfile, measured: MachineTimings) -> World:
    """Return the world of the measurement."""
    ranks = max((one.ranks for one in measured.collectives), default=1)
    device = Device.CPU if profile.name == CPU else Device.CUDA
    return World(ranks=ranks, ranks_per_node=measured.ranks_per_node, device=device, gpu=profile.name)


def _changed(profile: HardwareProfile, values: Mapping[str, Any]) -> HardwareProfile:
    return replace(profile, **values)


def _fit(
    profile: HardwareProfile,
    name: str,
    timings: Sequence[Timing],
    ratio: Callable[[Timing, HardwareProfile], float],
) -> HardwareProfile:
    """Scale the speed ``name`` so that the geometric mean of predicted over measured seconds is 1."""
    if not timings:
        return profile
    for _ in range(ROUNDS):
        mean = math.fsum(math.log(ratio(timing, profile)) for timing in timings) / len(timings)
        profile = _changed(profile, {name: getattr(profile, name) * math.exp(mean)})
    return profile


def _matmul_ratio(timing: GemmTiming, profile: HardwareProfile) -> float:
    product = Matmul(timing.m, timing.n, timing.k, fp8=timing.dtype == "fp8")
    return matmul_seconds(product, profile, ELEMENT[timing.dtype]) / timing.seconds


def _attention_forward_ratio(timing: AttentionTiming, profile: HardwareProfile) -> float:
    return _attention(timing, profile, backward=False) / timing.forward


def _attention_backward_ratio(timing: AttentionTiming, profile: HardwareProfile) -> float:
    return _attention(timing, profile, backward=True) / timing.backward


def _attention(timing: AttentionTiming, profile: HardwareProfile, *, backward: bool) -> float:
    """Predict causal attention with as many heads of keys as of queries."""
    heads, element = timing.batch * timing.heads, ELEMENT[timing.dtype]
    operator = FusedAttention(
        heads=heads,
        pairs=timing.sequence**2 / 2,
        length=timing.sequence,
        width=timing.head_dim,
        moved_bytes=4 * heads * timing.sequence * timing.head_dim * element,
        backward=backward,
    )
    return attention_seconds(operator, profile, element)
