"""Records of each rank's process and collective calls that others read without communicating, for the report
of a hang.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from toolkit.monitor.collective_calls import CollectiveCall
from toolkit.monitor.hangs.stacks import ProcessId, this_process

if TYPE_CHECKING:
    from torch.distributed import Store

MARGIN_SECONDS = 300.0  # added to the hang limit for the time-outs of process groups
RECORD_BYTES = 4096


def gather_process_ids(ranks: int, stacks_fd: int, last_call_fd: int) -> list[ProcessId]:
    """Return the process of every rank, by rank. Collective.

    Args:
        stacks_fd, last_call_fd: this process's descriptors that other processes of the host may read.
    """
    own = this_process(socket.gethostname(), stacks_fd, last_call_fd)
    processes = [own] * ranks
    if ranks > 1:
        dist.all_gather_object(processes, own)
    return processes


class LastCollective:
    """Keep this process's newest call in a memory file that other processes of the host can read.

    The file survives the process as long as another process holds it open: gloo terminates a rank that
    receives more than it has room for, and a stopped rank cannot report either. A call of ``record`` takes a
    few microseconds.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("last-call", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, RECORD_BYTES)
        self._memory = mmap.mmap(self.descriptor, RECORD_BYTES)

    def record(
        self, group: str, axis: str, number: int, operation: str, peer: int | None, begun: float, tensors: str
    ) -> None:
        """Replace the record. The arguments are fields of ``Call``."""
        text = f"{group}\n{axis}\n{number}\n{operation}\n{peer}\n{begun}\n{tensors}"
        data = text[: RECORD_BYTES - 1].encode()
        self._memory[: len(data) + 1] = data + b"\0"

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


def open_neighbour_records(processes: Sequence[ProcessId], rank: int) -> dict[int, int]:
    """Open the records of the other ranks on this rank's host. Returns descriptors by rank."""
    descriptors = {}
    for other, process in enumerate(processes):
        if process.shares_host(processes[rank]) and other != rank:
            with suppress(OSError):  # a process of another user
                path = f"/proc/{process.pid}/fd/{process.last_call_fd}"
                descriptors[other] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return descriptors


def read_last_collective(descriptor: int) -> CollectiveCall | None:
    """Return the recorded call, with an empty ``ranks``; None if there is no complete record."""
    data = os.pread(descriptor, RECORD_BYTES, 0)
    group, *rest = data.partition(b"\0")[0].decode(errors="replace").split("\n")
    try:
        axis, number, operation, peer, begun, tensors = rest
        return CollectiveCall(
            group=group,
            ranks=(),
            axis=axis,
            number=int(number),
            operation=operation,
            tensors=tensors,
            begun=float(begun),
            finished=False,
            peer=None if peer == "None" else int(peer),
        )
    except ValueError:  # the record is empty, or the process ended while it wrote
        return None


def clone_store() -> Store:
    """Open a separate connection to the process group's store, whose own may be locked by a call for
    minutes.
    """
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("hang", store.clone())  # type: ignore[attr-defined]  # missing from torch's stubs


def extend_group_timeouts(seconds: float) -> None:
    """Raise the time-out of every process group to ``seconds`` plus a margin.

    A group's own time-out (ten minutes for NCCL, thirty for gloo) would end one rank before the watchdog
    could ask it for a report.
    """
    if not dist.is_initialized():
        return
    minimum = timedelta(seconds=seconds + MARGIN_SECONDS)
    for group in list(dist.distributed_c10d._world.pg_map):
        timeouts = [group._get_backend(device).options._timeout for device in group._device_types]
        if timeouts and min(timeouts) < minimum:
            dist.distributed_c10d._set_pg_timeout(max(minimum, *timeouts), group)


def dump_nccl_trace() -> str:
    """Return NCCL's flight recording of this rank's calls as JSON. Needs PyTorch built with NCCL."""
    text = c10d._dump_nccl_trace_json()  # type: ignore[attr-defined]
    return text.decode() if isinstance(text, bytes) else text
