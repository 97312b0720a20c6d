"""GPUs and host of each node, measured beside training: who samples, and what of."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from toolkit.engine.rank_sync import FlagReduce
from toolkit.hooks import Hook, StepDone
from toolkit.monitor.alert import Alert
from toolkit.monitor.health import node_detector
from toolkit.monitor.health.node_detector import NodeDetector
from toolkit.monitor.sink import Kind, Sink
from toolkit.monitor.system import gpu
from toolkit.monitor.system.gpu import NodeGpus, XidEvents
from toolkit.monitor.system.gpu_metrics import VisibleGpu
from toolkit.monitor.system.host import HostMetrics
from toolkit.monitor.system.sampler import GpuMetricSource, MetricSource, NodeSampler
from toolkit.plan.types import Device, RunPlan
from toolkit.rundir.directory import RunDirectory

CHECKPOINT_BYTES = 12  # a parameter: weights and two moments in fp32, as the toolkit stores them


class NewestStep(Hook):
    """Tells the sampler's thread how far training is."""

    def __init__(self, sampler: NodeSampler) -> None:
        self._sampler = sampler

    def on_start(self, step: int) -> None:
        self._sampler.step = step

    def on_step(self, done: StepDone) -> None:
        self._sampler.step = done.step


def nvml_of(plan: RunPlan) -> Any:
    """NVML's module; None where the run computes on the processor, whatever GPUs are in the machine."""
    return gpu.load() if plan.world.device is Device.CUDA else None


@contextmanager
def sampling(
    plan: RunPlan,
    directory: RunDirectory,
    sink: Sink,
    all_reduce_flags: FlagReduce,
    alert: Callable[[Alert], None],
    *,
    rank: int,
) -> Iterator[Hook]:
    """Every rank calls this. The first of each node samples, until the run is over; the hook is to be added on all.

    Args:
        alert: takes alerts from any thread.
    """
    per_node, seconds = plan.world.ranks_per_node, plan.config.monitor.system_seconds
    if seconds == 0:
        yield Hook()
        return
    # The only thing that the ranks exchange, once: who they are on their node.
    pids = all_reduce_flags([os.getpid() if number == rank else 0 for number in range(plan.world.ranks)])
    node, place = divmod(rank, per_node)
    if place != 0:
        yield Hook()
        return
    host = HostMetrics(
        directory.path, {number: pids[number] for number in range(rank, min(rank + per_node, len(pids)))}
    )
    detector = NodeDetector(node, CHECKPOINT_BYTES * sum(parameter.numel for parameter in plan.parameters))
    module = nvml_of(plan)

    def open_gpus() -> NodeGpus | None:
        return (
            gpu.open_gpus(module, per_node, os.environ.get("CUDA_VISIBLE_DEVICES"))
            if module is not None
            else None
        )

    def on_xid(card: VisibleGpu | None, number: int) -> None:
        place, uuid = (card.index, card.uuid) if card is not None else (None, "")
        alert(node_detector.xid_alert(number, place, node, sampler.step, uuid))

    gpus = GpuMetricSource(open_gpus, lambda opened: XidEvents(module, opened.gpus), on_xid=on_xid, node=node)
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
        yield NewestStep(sampler)
    finally:
        gpus.stop()
        sampler.close()
