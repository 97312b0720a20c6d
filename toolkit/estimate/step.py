"""Predict the time of an optimizer step."""

from __future__ import annotations

import math
from collections import defaultdict

from toolkit.config.optim import OptimizerKernel
from toolkit.config.schema import EngineName, OffloadDevice
from toolkit.estimate.communication import (
    Network,
    StateExchanges,
    hidden_behind,
    state_exchanges,
    transfer_seconds,
)
from toolkit.estimate.compute import device_seconds
from toolkit.estimate.network import Collective
from toolkit.estimate.operators import optimizer_work, share_of_rank
from toolkit.estimate.pipeline import PipelineSchedule, simulate
from toolkit.estimate.profile import HardwareProfile
from toolkit.estimate.stages import LOCAL_LAYERS, on_gpus, pipeline_of_stages, sum_passes, traced_stage
from toolkit.estimate.types import INTERVAL_QUANTILE, StepEstimate
from toolkit.layout.axes import Axis
from toolkit.plan.kernels import TRANSFORMER_ENGINE
from toolkit.plan.megatron import virtual_stages
from toolkit.plan.trace import ModuleTrace, NotTraced
from toolkit.plan.types import RunPlan
from toolkit.step_parts import BACKWARD, BUBBLE, COMMUNICATION, FORWARD, OPTIMIZER, TRANSFER, communication

NETWORK_UNCERTAINTY = 0.3  # standard deviation of the logarithm of exposed communication
TRACE_UNCERTAINTY = 0.3  # as that of the network, of a model without a family
HOST_BYTES_PER_SECOND = 2e10  # of memory that the CPU optimizer of one rank moves


def estimate_step(plan: RunPlan, profile: HardwareProfile) -> StepEstimate | None:
    """Return the predicted time of one optimizer step; None if it is not known (:func:`why_no_estimate`)."""
    if plan.shape is not None and plan.config.task.target is not None:
        return None
    network, element = Network(plan, profile), plan.config.precision.element_bytes
    if plan.shape is not None:
        shape, share = plan.shape, share_of_rank(plan, plan.shape)
        stages = pipeline_of_stages(plan, shape, share, profile, network)
        message = share.tokens * shape.hidden_size / share.sequence_ranks * element
    elif isinstance(plan.trace, ModuleTrace):
        stages, message = [traced_stage(plan, plan.trace, profile)], 0.0
    else:
        return None
    micro_batches = plan.batch.accumulation
    virtual = virtual_stages(plan.config) if plan.megatron is not None else 1
    times = simulate(
        micro_batches,
        [[part.total for part in stage.forward] for stage in stages],
        [[part.total for part in stage.backward] for stage in stages],
        network.along(Collective.SEND, message, Axis.PIPELINE),
        _schedule(plan, virtual),
    )
    slowest = max(range(len(stages)), key=lambda number: times.busy[number])
    stage = stages[slowest]
    forward, backward = sum_passes(stage.forward), sum_passes(stage.backward)
    parts: defaultdict[str, float] = defaultdict(
        float,
        {
            FORWARD: micro_batches * forward.compute,
            BACKWARD: micro_batches * backward.compute,
            BUBBLE: times.bubble[slowest],
            communication(Axis.PIPELINE): times.communication[slowest],
        },
    )
    for exposed in (forward.exposed, backward.exposed):
        for name, seconds in exposed.seconds.items():
            parts[communication(name)] += micro_batches * seconds
    states = state_exchanges(plan, network, stage.elements, stage.experts, element)
    if states.name:
        parts[communication(states.name)] += _exposed_states(
            states, forward.total, backward.total, micro_batches, profile.contention
        )
    parts[OPTIMIZER] += _optimizer_seconds(plan, profile, stage.updated, element) + profile.step_seconds
    parts[TRANSFER] += transfer_seconds(plan.config, network, stage.updated, element)
    found = {name: seconds for name, seconds in parts.items() if seconds > 0}
    total = sum(found.values())
    waits = sum(seconds for name, seconds in found.items() if name.startswith(COMMUNICATION))
    traced = 0.0 if plan.shape is not None else TRACE_UNCERTAINTY
    spread = math.hypot(profile.uncertainty, traced, NETWORK_UNCERTAINTY * waits / total)
    factor = math.exp(INTERVAL_QUANTILE * spread)
    return StepEstimate(
        seconds=total,
        low=total / factor,
        high=total * factor,
        parts=found,
        assumptions=_assumptions(plan, profile),
    )


def why_no_estimate(plan: RunPlan, profile: HardwareProfile | None) -> str | None:
    """Return why the time of a step is not predicted; None if it is."""
    if plan.shape is not None and plan.config.task.target is not None:
        return "the operations of task.target are not known"
    if isinstance(plan.trace, NotTraced):
        return f"the operators are not known, because {plan.trace.reason}"
    if plan.shape is None and plan.trace is None:
        return f"the layers of a model without a family ({plan.config.model.source_key}) are not known"
    if profile is None:
        return "the GPU is not in toolkit/plan/devices.py (cluster.gpu=NAME selects one of its GPUs)"
    return None


def _assumptions(plan: RunPlan, profile: HardwareProfile) -> tuple[str, ...]:
    found = []
    if plan.kernels.layers.name == LOCAL_LAYERS and profile.local_layers_of_2022 and on_gpus(plan):
        found.append(
            "Megatron-core's own layers are as slow as in the published runs of 2022: for other layers "
            "describe the machines with cluster.transformer_engine"
        )
    if plan.config.offload.optimizer is not OffloadDevice.none:
        found.append(f"the optimizer on the host moves {HOST_BYTES_PER_SECOND / 1e9:.0f} GB/s a rank")
    if plan.shape is not None and plan.shape.num_local_experts:
        found.append("every expert gets the same number of tokens")
    if plan.shape is None:
        found.append("matrix products of the traced model run at the rate of large ones")
    if not on_gpus(plan) and plan.config.cluster.calibration is None:
        found.append("CPU ranks of an average speed, as this machine is not calibrated")
    return tuple(found)


def _schedule(plan: RunPlan, virtual: int) -> PipelineSchedule:
    if plan.config.engine.name is EngineName.deepspeed:
        return PipelineSchedule.DEEPSPEED
    return PipelineSchedule.INTERLEAVED if virtual > 1 else PipelineSchedule.MEGATRON


def _exposed_states(
    states: StateExchanges, forward: float, backward: float, micro_batches: int, contention: float
) -> float:
    """Return the seconds per step spent waiting for parameters and gradients."""
    behind = states.gather_backward + (states.reduce if states.overlaps_reduce else 0.0)
    reduced = hidden_behind(backward, behind, contention) + (0.0 if states.overlaps_reduce else states.reduce)
    found = reduced * (micro_batches if states.every_micro_batch else 1)
    if states.gather_forward:
        found += micro_batches * hidden_behind(forward, states.gather_forward, contention)
    if states.gather_step:
        found += (
            hidden_behind(forward, states.gather_step, contention)
            if states.overlaps_gather
            else states.gather_step
        )
    return found


def _optimizer_seconds(plan: RunPlan, profile: HardwareProfile, elements: float, element: int) -> float:
    name = plan.kernels.optimizer.name
    fused = name in (OptimizerKernel.fused.value, OptimizerKernel.cpu.value, TRANSFORMER_ENGINE)
    work = optimizer_work(elements, element, fused=fused)
    if plan.config.offload.optimizer is not OffloadDevice.none:
        return work.moved_bytes / HOST_BYTES_PER_SECOND
    return device_seconds((work,), profile, element) * profile.optimizer_factor
