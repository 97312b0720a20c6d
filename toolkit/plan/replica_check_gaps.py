"""Errors that the comparison of replicas (``observe/replicas.py``) and of computations
(``train/computation_check.py``) cannot detect in a layout.
"""

from __future__ import annotations

from toolkit.config.schema import EngineName, OffloadDevice
from toolkit.plan.types import RunPlan


def replica_check_gaps(plan: RunPlan) -> list[str]:
    """Return one phrase for each kind of state that is not compared."""
    config, axes = plan.config, plan.axes
    if axes.size == 1:
        return ["one rank: there are no replicas"]
    if not config.monitor.replicas_every:
        if config.monitor.computation_every:
            return ["weights and states: monitor.replicas_every=0", _computation_gap(plan)]
        return ["anything: monitor.replicas_every=0"]
    found = [_computation_gap(plan), "buffers that are not trained"]
    megatron = config.engine.name is EngineName.megatron
    ranged = (
        megatron and plan.megatron is not None and bool(plan.megatron["ddp"].get("use_distributed_optimizer"))
    )
    stage = 0 if megatron else config.zero.stage
    if stage == 3:
        found.append("weights: each data rank has its own range and sends it to the others")
    if stage or ranged:
        found.append(
            "master weights and optimizer state: each data rank has its own range, and an error in it "
            "reaches all ranks"
        )
    if stage in (1, 2) or ranged:
        found.append(
            "a bit flip in a replica of the weights that the next gather overwrites before a comparison"
        )
    if axes.tensor > 1 and axes.data * axes.context == 1:
        found.append("tensor-parallel shards: there is one copy of each")
    if axes.pipeline > 1 and axes.data * axes.context * axes.tensor == 1:
        found.append("parameters of a single pipeline stage: there is one copy of each")
    if axes.expert > 1 and axes.expert == axes.data * axes.context:
        found.append("experts: there is one copy of each")
    if config.offload.optimizer is not OffloadDevice.none:
        found.append("optimizer state that is offloaded")
    return found


def _computation_gap(plan: RunPlan) -> str:
    if not plan.config.monitor.computation_every:
        return "gradients and activations, which are freed in each step"
    if plan.axes.data == 1:
        return "gradients, and activations that a rank always computes wrong: there is one data rank"
    return "gradients, and activations other than those of the sampled micro-batches without dropout"
