"""How long saving a checkpoint may take where no save has been measured yet."""

from __future__ import annotations

from toolkit.plan.saved import checkpoint_bytes
from toolkit.plan.types import RunPlan, World

# That a node writes: of a fast local disk, or of a good share of a parallel file system. Rather too much than too little: who thinks
# wrongly that a save fits loses nothing by trying.
NODE_BYTES_PER_SECOND = 2e9


def rank_bytes(plan: RunPlan) -> int | None:
    """Of one rank's part of a checkpoint: what several ranks hold is written once, so that all have about as much. None for
    ``model.target``."""
    whole = checkpoint_bytes(plan)
    return None if whole is None else -(-whole // plan.world.ranks)


def assumed_speed(world: World) -> float:
    """Bytes a second of one rank, when all of its node write."""
    return NODE_BYTES_PER_SECOND / min(world.ranks, world.ranks_per_node)
