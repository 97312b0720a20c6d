"""A rank's record of its collectives, from which a hang report finds the rank that the others wait for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MAX_TENSORS = 3  # shown of a call


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One call of this process on one process group.

    Attributes:
        group: the group's name, the same on all its ranks (``ProcessGroup.group_name``).
        ranks: its global ranks.
        axis: as in ``step_parts.communication``: ``tensor``, ``data+context``, ``all``.
        number: index of this call among the group's collectives on this rank, from 1; sends and receives are
            counted separately.
        operation: ``all_reduce``.
        tensors: shapes and types, ``[1024] float32``; of several tensors the first and the number of others.
        begun: ``time.monotonic()`` of the call.
        finished: whether it has returned, and an asynchronous one was waited for.
        peer: the other side's global rank, for a send or a receive; -1 if unknown.
    """

    group: str
    ranks: tuple[int, ...]
    axis: str
    number: int
    operation: str
    tensors: str
    begun: float
    finished: bool
    peer: int | None = None

    @property
    def what(self) -> str:
        """``all_reduce [1024] float32``; equal on all ranks of a collective, except for gathers and scatters
        of unequal sizes.
        """
        to = (
            "" if self.peer is None else f" {'to' if 'send' in self.operation else 'from'} {_rank(self.peer)}"
        )
        return f"{self.operation}{to} {self.tensors}".rstrip()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> CollectiveCall:
        return CollectiveCall(**{**fields, "ranks": tuple(fields["ranks"])})


def calls_from_flight_recorder(
    trace: Mapping[str, Any], known: Iterable[CollectiveCall], recent: int = 8
) -> list[CollectiveCall]:
    """Return the last calls of each known group from PyTorch's flight recorder.

    The recorder knows which calls the device has finished; the process itself only knows that they were
    enqueued.

    Args:
        trace: result of ``torch._C._distributed_c10d._dump_nccl_trace_json``, format 2
            (``FlightRecorder.hpp`` in torch 2.11 to 2.13).
        known: the calls that the process recorded, which provide the groups' ranks and axes.

    Returns:
        Calls with ``begun`` in ``time.time()``, unlike elsewhere, oldest first in each group.
    """
    groups = {call.group: call for call in known}
    calls_by_group: dict[tuple[str, bool], list[CollectiveCall]] = {}
    for entry in trace.get("entries", []):
        group, is_p2p = groups.get(entry["process_group"][0]), entry["is_p2p"]
        if group is None:
            continue
        calls_by_group.setdefault((group.group, is_p2p), []).append(
            CollectiveCall(
                group=group.group,
                ranks=group.ranks,
                axis=group.axis,
                number=entry["p2p_seq_id" if is_p2p else "collective_seq_id"],
                operation=_operation(entry),
                peer=_peer(entry, group.ranks) if is_p2p else None,
                tensors=_tensors(entry["input_sizes"], entry["input_dtypes"]),
                begun=entry["time_created_ns"] / 1e9,
                finished=entry["retired"] or entry["state"] == "completed",
            )
        )
    return [call for calls in calls_by_group.values() for call in calls[-recent:]]


def _operation(entry: Mapping[str, Any]) -> str:
    """Parse ``nccl:all_reduce`` or ``nccl:send 0->1``."""
    return str(entry["profiling_name"]).rpartition(":")[2].partition(" ")[0]


def _peer(entry: Mapping[str, Any], ranks: Sequence[int]) -> int:
    """Parse ``nccl:recv 1<-0``, which has ranks within the group."""
    match = re.search(r"(?:->|<-)(\d+)$", entry["profiling_name"])
    return ranks[int(match[1])] if match and int(match[1]) < len(ranks) else -1


def _rank(peer: int) -> str:
    return f"rank {peer}" if peer >= 0 else "another rank"


def _tensors(sizes: Sequence[Sequence[int]], types: Sequence[str]) -> str:
    first = [f"{list(size)} {kind}" for size, kind in zip(sizes, types, strict=False)]
    return ", ".join(first[:MAX_TENSORS]) + (
        f" and {len(first) - MAX_TENSORS} more" if len(first) > MAX_TENSORS else ""
    )
