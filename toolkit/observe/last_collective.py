"""What the ranks know of each other's processes and calls, beside their tensors: for whoever has to say why they wait."""

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

MARGIN_SECONDS = 300.0  # that process groups wait longer than the limit of a hang
RECORD_BYTES = 4096


def gather_process_ids(ranks: int, notes: int, box: int) -> list[ProcessId]:
    """Of all ranks, by rank; collective. ``notes``, ``box``: this one's descriptors that others may read."""
    mine = this_process(socket.gethostname(), notes, box)
    found = [mine] * ranks
    if ranks > 1:
        dist.all_gather_object(found, mine)
    return found


class LastCollective:
    """The newest call of this process in memory that outlives it, where a neighbour of the host holds it open: gloo ends the whole process
    of a rank that is sent more than it has room for, and a stopped one cannot speak either. Noting takes some microseconds.

    Attributes:
        descriptor: to be given to :func:`everyone`.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("last-call", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, RECORD_BYTES)
        self._memory = mmap.mmap(self.descriptor, RECORD_BYTES)

    def note(
        self, group: str, axis: str, number: int, operation: str, peer: int | None, begun: float, tensors: str
    ) -> None:
        """As in ``Call``."""
        text = f"{group}\n{axis}\n{number}\n{operation}\n{peer}\n{begun}\n{tensors}"[
            : RECORD_BYTES - 1
        ].encode()
        self._memory[: len(text) + 1] = text + b"\0"

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


def open_neighbour_records(processes: Sequence[ProcessId], rank: int) -> dict[int, int]:
    """The boxes of this rank's neighbours on its host, open in this process: descriptors by rank."""
    found = {}
    for other, process in enumerate(processes):
        if process.beside(processes[rank]) and other != rank:
            with suppress(OSError):  # of another user's processes: then their last calls are not known
                found[other] = os.open(f"/proc/{process.pid}/fd/{process.box}", os.O_RDONLY | os.O_CLOEXEC)
    return found


def read_last_collective(box: int) -> CollectiveCall | None:
    """What a box has, without the group's ranks, which its other ranks know; None where nothing was noted."""
    group, *rest = os.pread(box, RECORD_BYTES, 0).partition(b"\0")[0].decode(errors="replace").split("\n")
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
    except ValueError:  # empty, or the process ended while it wrote
        return None


def clone_store() -> Store:
    """A connection of its own to where the process group met: a call on the group's may wait for minutes, and holds its lock."""
    return dist.PrefixStore("hang", dist.distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]  # it is there


def extend_group_timeouts(seconds: float) -> None:
    """No group of this process gives up before ``seconds`` and a margin: its own time-out would end one rank, without the others' word.
    NCCL's is ten minutes where nobody said otherwise, gloo's thirty."""
    if not dist.is_initialized():
        return
    least = timedelta(seconds=seconds + MARGIN_SECONDS)
    for group in list(dist.distributed_c10d._world.pg_map):
        own = [group._get_backend(device).options._timeout for device in group._device_types]
        if own and min(own) < least:
            dist.distributed_c10d._set_pg_timeout(max(least, *own), group)


def dump_nccl_trace() -> str:
    """What NCCL's flight recorder has of this rank's calls, as JSON. PyTorch has it where it was built with NCCL."""
    text = c10d._dump_nccl_trace_json()  # type: ignore[attr-defined]
    return text.decode() if isinstance(text, bytes) else text
