"""Whether checkpoints are written while training continues, from a copy in host memory."""

from __future__ import annotations

from toolkit.config.schema import RunConfig
from toolkit.plan.types import Device, MemoryPlan, SavePlan, World
from toolkit.progress import quantity

GIB = 2**30
HOST_SHARE = 0.5  # of a node's memory, for offloaded states and the copies of all its ranks

SNAPSHOTS = 2  # one is complete before the one before is removed


def snapshot_copies(nodes: int) -> int:
    """Return how many times the state of a node's ranks is in its folder of snapshots at most
    (``checkpoint.memory_every``): several nodes have copies of another node's files.
    """
    return SNAPSHOTS if nodes == 1 else 2 * SNAPSHOTS


def plan_saves(config: RunConfig, world: World, size: int | None, memory: MemoryPlan | None) -> SavePlan:
    """Decide ``checkpoint.background=null``, and the size of the copy.

    On GPUs training continues while threads of the host write. On CPUs both need the same cores, so saves
    stay in the foreground. A rank that turns out to have more state than ``checkpoint.staging_gib`` writes it
    in the foreground.

    Args:
        size: bytes of a rank's state (:func:`toolkit.plan.checkpoint_size.rank_state_bytes`).
    """
    wanted, bound = config.checkpoint.background, int(config.checkpoint.staging_gib * GIB)
    snapshots = 0
    if config.checkpoint.memory_every:
        # the copy of the state that is being written, and the snapshots
        files = snapshot_copies(world.nodes) if config.checkpoint.snapshots_in_memory else 0
        snapshots = (1 + files) * (size or 0)

    def foreground(reason: str) -> SavePlan:
        return SavePlan(
            background=False, reason=reason, copy_bytes=0, staging_bytes=bound, snapshot_bytes=snapshots
        )

    if wanted is False:
        return foreground("checkpoint.background=false")
    if wanted is None and world.device is Device.CPU:
        return foreground("writing and training would share the CPU's cores")
    if size is not None and size > bound:
        return foreground(
            f"{quantity(size, 'B')} a rank exceed checkpoint.staging_gib={config.checkpoint.staging_gib:g}"
        )
    if wanted is None and size is not None and world.host_memory_bytes is not None:
        ranks = min(world.ranks, world.ranks_per_node)
        needed = ranks * (size + snapshots + (memory.host if memory is not None else 0))
        if needed > HOST_SHARE * world.host_memory_bytes:
            return foreground(
                f"copies of all ranks of a node would need more than {HOST_SHARE:.0%} of its memory"
            )
    reason = "on GPUs" if wanted is None else "checkpoint.background=true"
    return SavePlan(
        background=True, reason=reason, copy_bytes=size or 0, staging_bytes=bound, snapshot_bytes=snapshots
    )
