"""What a rank knows of its own collectives: enough to say, with the other ranks' word, who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


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
