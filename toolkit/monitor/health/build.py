"""Build the detectors of a run."""

from __future__ import annotations

from toolkit.commands import command_line
from toolkit.config.urls import is_url
from toolkit.monitor.health.checkpoints import SlowCheckpoint
from toolkit.monitor.health.detector import Detector
from toolkit.monitor.health.loss import (
    GRADIENT_NORM,
    LOSS,
    JumpDetector,
    LossScaleCollapse,
    NonFinite,
    RisingValidation,
)
from toolkit.monitor.health.memory import MemoryGrowth, device_memory, host_memory
from toolkit.monitor.health.stalls import (
    BusyHost,
    DataStall,
    GarbageCollection,
    RepeatedPauses,
    StoppedProcess,
)
from toolkit.monitor.health.throughput import FallingThroughput, SlowCollective, Straggler
from toolkit.plan.devices import memory_bytes
from toolkit.plan.types import RunPlan


def build_detectors(plan: RunPlan) -> list[Detector]:
    """Return the detectors that need only the rows that rank 0 logs."""

    def size_of_step(step: int) -> int:
        return plan.batch.at(step - 1).size

    per_node = plan.world.ranks_per_node
    return [
        NonFinite(),
        JumpDetector(LOSS),
        JumpDetector(GRADIENT_NORM),
        LossScaleCollapse(),
        RisingValidation(),
        DataStall(data_remedy(plan), ranks_per_node=per_node, ledger=plan.config.monitor.ledger),
        GarbageCollection(),
        BusyHost(per_node),
        StoppedProcess(per_node),
        RepeatedPauses(size_of_step),
        FallingThroughput(size_of_step),
        Straggler(ranks_per_node=per_node, stages=plan.axes.pipeline),
        SlowCollective(size_of_step),
        SlowCheckpoint(),
        MemoryGrowth(host_memory(plan.world.host_memory_bytes)),
        MemoryGrowth(device_memory(memory_bytes(plan.world))),
    ]


def data_remedy(plan: RunPlan) -> str:
    """Return advice for a slow data pipeline of this kind of source."""
    data = plan.config.data
    if data.name == "dataset":
        return (
            f"raise data.dataset.workers={2 * data.dataset.workers}, or prepare the tokens once: "
            f"{command_line('prepare', '--help')}; check CPU and network in system/node-*.jsonl"
        )
    stores = [
        data.path,
        *(str(source.get("path", "")) for source in data.sources.values() if isinstance(source, dict)),
    ]
    if any(is_url(path) for path in stores):
        return (
            "keep fetched data on the node's disk: data.cache.folder=/local/disk data.cache.gib=64; "
            "network: system/node-*.jsonl"
        )
    return (
        "copy the data folder to a local disk of the node and set data.path=FOLDER; check disk and CPU "
        "in system/node-*.jsonl, and iostat -x 1"
    )
