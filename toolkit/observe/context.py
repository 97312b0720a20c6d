"""The facts about a run that its observers, and the hooks that save and evaluate, need."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.engine.rank_sync import FlagReduce
from toolkit.plan.types import RunPlan
from toolkit.rundir.directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank of one attempt of a run.

    Attributes:
        attempt: the number that ``RunDirectory.begin`` gave this start.
        all_reduce_flags: takes the maximum of small integers over all ranks.
    """

    plan: RunPlan
    directory: RunDirectory
    rank: int
    attempt: int
    all_reduce_flags: FlagReduce

    @property
    def ranks(self) -> int:
        return self.plan.world.ranks

    @property
    def node(self) -> int:
        return self.rank // self.plan.world.ranks_per_node

    @property
    def first_on_node(self) -> bool:
        return self.rank % self.plan.world.ranks_per_node == 0
