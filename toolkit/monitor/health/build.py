"""The detectors of a run. Each is pure: rows in, alerts out."""

from __future__ import annotations

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
from toolkit.monitor.health.stalls import DataStall, GarbageCollection, HostBusy, Pauses, Stops
from toolkit.monitor.health.throughput import FallingThroughput, SlowCollective, Straggler
from toolkit.plan.devices import memory_bytes
from toolkit.plan.types import RunPlan


def build_detectors(plan: RunPlan) -> list[Detector]:
    """All that judge by rows alone, as rank 0 logs them."""

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
        HostBusy(per_node),
        Stops(per_node),
        Pauses(size_of_step),
        FallingThroughput(size_of_step),
        Straggler(ranks_per_node=per_node, stages=plan.axes.pipeline),
        SlowCollective(size_of_step),
        SlowCheckpoint(),
        MemoryGrowth(host_memory(plan.world.host_memory_bytes)),
        MemoryGrowth(device_memory(memory_bytes(plan.world))),
    ]


def data_remedy(plan: RunPlan) -> str:
    """What a person can do about a slow data pipeline of this kind."""
    data = plan.config.data
    if data.name == "dataset":
        return (
            f"raise data.dataset.workers={2 * data.dataset.workers}, or make the tokens ready once: python launch/prepare.py --help; "
            "see CPU and network in system/node-*.jsonl"
        )
    stores = [
        data.path,
        *(str(source.get("path", "")) for source in data.sources.values() if isinstance(source, dict)),
    ]
    if any(is_url(path) for path in stores):
        return "keep what was fetched on the node's disk: data.cache.folder=/local/disk data.cache.gib=64; network: system/node-*.jsonl"
    return "copy the data folder to a disk of the node and write data.path=FOLDER; see disk and CPU in system/node-*.jsonl, and iostat -x 1"
