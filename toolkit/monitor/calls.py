"""What a rank knows of its own collectives: enough to say, with the other ranks' word, who waits for whom."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MOST_TENSORS = 3  # of a call that are told


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of this process on one group.

    Attributes:
        group: the group's name, the same on all its ranks (``ProcessGroup.group_name``).
        ranks: its global ranks.
        axis: as ``parts.communication`` has it: ``tensor``, ``data+context``, ``all``.
        number: of this call among the group's collectives on this rank, from 1; sends and receives are counted apart.
        operation: ``all_reduce``.
        tensors: shapes and types, ``[1024] float32``; of several tensors the first ones and how many more.
        begun: ``time.monotonic()`` of the call.
        finished: it has returned, and an asynchronous one was waited for.
        peer: the other side's global rank, for a send or a receive.
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
        """``all_reduce [1024] float32``; equal on all ranks of a collective, but for those that gather or scatter unequal shares."""
        to = "" if self.peer is None else f" {'to' if 'send' in self.operation else 'from'} rank {self.peer}"
        return f"{self.operation}{to} {self.tensors}".rstrip()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Call:
        return Call(**{**fields, "ranks": tuple(fields["ranks"])})


def from_flight_recorder(trace: Mapping[str, Any], axis: Callable[[tuple[int, ...]], str], recent: int = 8) -> list[Call]:
    """The last calls of each group, by what PyTorch's flight recorder has of them: it knows which ones the device has finished, where
    the process only put them into a queue.

    Args:
        trace: of ``torch._C._distributed_c10d._dump_nccl_trace_json``, format 2 (``FlightRecorder.hpp`` in torch 2.11 to 2.13).
        axis: of a group's global ranks.

    Returns:
        Calls whose ``begun`` is ``time.time()``, unlike elsewhere, oldest first in each group.
    """
    groups = trace.get("pg_config", {})
    found: dict[tuple[str, bool], list[Call]] = {}
    for entry in trace.get("entries", []):
        name = entry["process_group"][0]
        ranks = tuple(json.loads(groups[name]["ranks"])) if name in groups else ()
        apart = entry["is_p2p"]
        found.setdefault((name, apart), []).append(Call(
            group=name, ranks=ranks, axis=axis(ranks), number=entry["p2p_seq_id" if apart else "collective_seq_id"],
            operation=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
            tensors=_tensors(entry["input_sizes"], entry["input_dtypes"]), begun=entry["time_created_ns"] / 1e9,
            finished=entry["retired"] or entry["state"] == "completed"))
    return [call for calls in found.values() for call in calls[-recent:]]


def _tensors(sizes: Sequence[Sequence[int]], types: Sequence[str]) -> str:
    first = [f"{list(size)} {kind}" for size, kind in zip(sizes, types, strict=False)]
    return ", ".join(first[:MOST_TENSORS]) + (f" and {len(first) - MOST_TENSORS} more" if len(first) > MOST_TENSORS else "")
