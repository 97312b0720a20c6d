"""What all ranks must do at the same step is decided by one small exchange a step.

A rank that left or saved alone would leave the others waiting in the next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Exchange = Callable[[Sequence[int]], list[int]]  # this rank's small integers -> the largest of all ranks, place by place
PARTING_SECONDS = 1800.0  # how long the other ranks wait for what rank 0 does alone at the end


@dataclass(frozen=True, slots=True)
class Agreed:
    """Equal on all ranks after a step."""

    stop: bool = False  # some rank was asked to stop
    save: bool = False  # by rank 0's clock a checkpoint is due


def alone(values: Sequence[int]) -> list[int]:
    """The exchange of one rank."""
    return list(values)


class Together:
    """The exchange of several ranks, over gloo: the flags lie in host memory, and no GPU queue is waited for."""

    def __init__(self) -> None:
        whole = dist.get_backend() == "gloo"
        self._group: ProcessGroup | None = None if whole else dist.new_group(backend="gloo", timeout=timedelta(seconds=PARTING_SECONDS))

    def __call__(self, values: Sequence[int]) -> list[int]:
        flags = torch.tensor(values, dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return flags.tolist()


def exchange(ranks: int) -> Exchange:
    return Together() if ranks > 1 else alone
