"""What the ranks know of each other's processes and calls, beside their tensors: for whoever has to say why they wait."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from toolkit.monitor.stacks import ProcessId, this_process

if TYPE_CHECKING:
    from torch.distributed import Store

MARGIN_SECONDS = 300.0  # that process groups wait longer than the limit of a hang


def everyone(ranks: int, notes: int) -> list[ProcessId]:
    """Of all ranks, by rank; collective. ``notes``: this one's descriptor that others may read."""
    mine = this_process(socket.gethostname(), notes)
    found = [mine] * ranks
    if ranks > 1:
        dist.all_gather_object(found, mine)
    return found


def own_store() -> Store:
    """A connection of its own to where the process group met: a call on the group's may wait for minutes, and holds its lock."""
    return dist.PrefixStore("hang", dist.distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]  # it is there


def outlast(seconds: float) -> None:
    """No group of this process gives up before ``seconds`` and a margin: its own time-out would end one rank, without the others' word.
    NCCL's is ten minutes where nobody said otherwise, gloo's thirty."""
    if not dist.is_initialized():
        return
    least = timedelta(seconds=seconds + MARGIN_SECONDS)
    for group in list(dist.distributed_c10d._world.pg_map):
        own = [group._get_backend(device).options._timeout for device in group._device_types]
        if own and min(own) < least:
            dist.distributed_c10d._set_pg_timeout(max(least, *own), group)


def nccl_trace() -> str:
    """What NCCL's flight recorder has of this rank's calls, as JSON. PyTorch has it where it was built with NCCL."""
    text = c10d._dump_nccl_trace_json()  # type: ignore[attr-defined]
    return text.decode() if isinstance(text, bytes) else text
