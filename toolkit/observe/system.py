"""Sample the GPUs and the host of each node in a background thread of the node's first rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from toolkit.hooks import CompletedStep, Hook
from toolkit.monitor.alert import Alert
from toolkit.monitor.health import gpu_faults
from toolkit.monitor.health.node_detector import NodeDetector
from toolkit.monitor.sink import Kind, Sink
from toolkit.monitor.system import gpu
from toolkit.monitor.system.gpu import NodeGpus, XidEvents
from toolkit.monitor.system.gpu_metrics import VisibleGpu
from toolkit.monitor.system.host import HostMetrics
from toolkit.monitor.system.sampler import GpuMetricSource, MetricSource, NodeSampler
from toolkit.observe.context import RankContext
from toolkit.plan.types import Device, RunPlan

log = logging.getLogger(__name__)

CHECKPOINT_BYTES = 12  # per parameter: the weight and two moments in fp32


class SamplerStep(Hook):
    """Keep the step of the sampler's rows current."""

    def __init__(self, sampler: NodeSampler) -> None:
        self._sampler = sampler

    def on_start(self, step: int) -> None:
        self._sampler.step = step

    def on_step(self, completed: CompletedStep) -> None:
        self._sampler.step = completed.step


def load_nvml(plan: RunPlan) -> Any:
    """Return the NVML module; None if the run uses CPUs, even if the machine has GPUs."""
    return gpu.load() if plan.world.device is Device.CUDA else None


@contextmanager
def sample_system(context: RankContext, sink: Sink, alert: Callable[[Alert], None]) -> Iterator[Hook]:
    """Sample until the run is over. Collective; every rank adds the hook.

    Args:
        alert: receives alerts from any thread.
    """
    plan, rank, node = context.plan, context.rank, context.node
    per_node, seconds = plan.world.ranks_per_node, plan.config.monitor.system_seconds
    if seconds == 0:
        yield Hook()
        return
    pids = context.all_reduce_flags([os.getpid() if other == rank else 0 for other in range(context.ranks)])
    if not context.first_on_node:
        yield Hook()
        return
    node_ranks = range(rank, min(rank + per_node, len(pids)))
    host = HostMetrics(context.directory.path, {other: pids[other] for other in node_ranks})
    detector = NodeDetector(node, CHECKPOINT_BYTES * sum(parameter.numel for parameter in plan.parameters))
    nvml = load_nvml(plan)

    def open_gpus() -> NodeGpus | None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return gpu.open_gpus(nvml, per_node, visible) if nvml is not None else None

    def on_xid(card: VisibleGpu | None, number: int) -> None:
        index, uuid = (card.index, card.uuid) if card is not None else (None, "")
        alert(gpu_faults.xid_alert(number, index, node, sampler.step, uuid))

    gpus = GpuMetricSource(open_gpus, lambda opened: XidEvents(nvml, opened.gpus), on_xid=on_xid, node=node)
    sampler = NodeSampler(
        node=node,
        seconds=seconds,
        sources=[MetricSource("host", host.read), MetricSource("gpu", gpus.read, gpus.close)],
        log_row=partial(sink.log, Kind.SYSTEM),
        detect=detector.check,
        alert=alert,
    )
    sampler.start()
    try:
        yield SamplerStep(sampler)
    finally:
        gpus.stop()
        sampler.close()
