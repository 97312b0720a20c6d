"""Run a rank on the cores that are near its GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from toolkit.cluster.doctor.host import parse_cpu_list
from toolkit.cluster.world.machine_info import GpuInfo

log = logging.getLogger(__name__)

NUMA_NODES = Path("/sys/devices/system/node")


def bind_to_gpu(gpus: Sequence[GpuInfo], local_rank: int, nodes: Path = NUMA_NODES) -> bool:
    """Restrict this thread, and the threads and processes that it starts, to the cores of the NUMA node of
    the rank's GPU, as the driver reports them (NVML, ``nvmlDeviceSetCpuAffinity``).

    Nothing changes on a machine with one NUMA node, or if the launcher has bound the rank to one already
    (``torchrun --numa-binding``, ``deepspeed --bind_cores_to_rank``, Slurm's ``--cpu-bind``).

    Returns:
        Whether the rank was bound.
    """
    usable = os.sched_getaffinity(0)
    lists = (parse_cpu_list((node / "cpulist").read_text()) for node in sorted(nodes.glob("node[0-9]*")))
    if sum(bool(cores & usable) for cores in lists) < 2 or local_rank >= len(gpus):
        return False
    import pynvml

    try:
        pynvml.nvmlInit()
        pynvml.nvmlDeviceSetCpuAffinity(pynvml.nvmlDeviceGetHandleByUUID(gpus[local_rank].uuid))
    except pynvml.NVMLError as error:  # a virtual GPU or a part of one, or a container with other cores
        log.warning("local rank %d is not bound to the cores near its GPU: %s", local_rank, error)
        return False
    log.info("local rank %d runs on %d cores near its GPU", local_rank, len(os.sched_getaffinity(0)))
    return True
