"""What comparing copies (``observe/replicas.py``) cannot see in a layout: known before anything runs."""

from __future__ import annotations

from toolkit.config.schema import EngineName, OffloadDevice
from toolkit.plan.types import RunPlan


def replica_check_gaps(plan: RunPlan) -> list[str]:
    """For people, a sentence each."""
    config, axes = plan.config, plan.axes
    if axes.size == 1:
        return ["one rank: there are no copies"]
    if not config.monitor.replicas_every:
        return ["anything: monitor.replicas_every=0"]
    found = ["gradients and activations, which are not kept", "buffers that are not trained"]
    megatron = config.engine.name is EngineName.megatron
    ranged = (
        megatron and plan.megatron is not None and bool(plan.megatron["ddp"].get("use_distributed_optimizer"))
    )
    stage = 0 if megatron else config.zero.stage
    if stage == 3:
        found.append("weights: each data rank has a range of its own, which it sends to the others")
    if stage or ranged:
        found.append(
            "master weights and optimizer state: each data rank has a range of its own, and a wrong one reaches all alike"
        )
    if stage in (1, 2) or ranged:
        found.append("a flip in a copy of the weights that a gather has mended before a comparison")
    if axes.tensor > 1 and axes.data * axes.context == 1:
        found.append("what the tensor axis cuts: there is one copy of it")
    if axes.pipeline > 1 and axes.data * axes.context * axes.tensor == 1:
        found.append("what stages have for themselves: there is one copy of it")
    if axes.expert > 1 and axes.expert == axes.data * axes.context:
        found.append("experts: there is one copy of each")
    if config.offload.optimizer is not OffloadDevice.none:
        found.append("optimizer state that is offloaded")
    return found
