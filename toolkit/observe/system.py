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
from toolkit.monitor.health import nodes
from toolkit.monitor.health.nodes import NodeDetector
from toolkit.monitor.sink import Kind, Sink
from toolkit.monitor.system import gpu
from toolkit.monitor.system.gpu import Gpus, XidEvents
from toolkit.monitor.system.gpu_measures import Card
from toolkit.monitor.system.host import Host
from toolkit.monitor.system.sampler import GpuSource, Sampler, Source
from toolkit.observe.context import RankContext
from toolkit.plan.types import Device, RunPlan

log = logging.getLogger(__name__)

CHECKPOINT_BYTES = 12  # per parameter: the weight and two moments in fp32


class SamplerStep(Hook):
    """Keep the step of the sampler's rows current."""

    def __init__(self, sampler: Sampler) -> None:
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
    host = Host(context.directory.path, {other: pids[other] for other in node_ranks})
    detector = NodeDetector(node, CHECKPOINT_BYTES * sum(parameter.numel for parameter in plan.parameters))
    nvml = load_nvml(plan)

    def open_gpus() -> Gpus | None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return gpu.open_gpus(nvml, per_node, visible) if nvml is not None else None

    def on_xid(card: Card | None, number: int) -> None:
        index, uuid = (card.place, card.uuid) if card is not None else (None, "")
        alert(nodes.xid(number, index, node, sampler.step, uuid))

    gpus = GpuSource(
        open_gpus,
        lambda opened: XidEvents(nvml, opened.cards),
        xid=on_xid,
        say=lambda words: log.info(f"node {node}: {words}"),
    )
    sampler = Sampler(
        node=node,
        seconds=seconds,
        sources=[Source("host", host.read, log.warning), Source("gpu", gpus.read, log.warning, gpus.close)],
        log=partial(sink.log, Kind.SYSTEM),
        detect=detector.see,
        alert=alert,
        tell=log.warning,
    )
    sampler.start()
    try:
        yield SamplerStep(sampler)
    finally:
        gpus.stop()
        sampler.close()
