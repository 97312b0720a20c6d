"""Group the tensors that several ranks store by the ranks that store them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from toolkit.engine.protocol import ReplicaSet

ReplicaTensor = tuple[str, tuple[int, ...], str, torch.Tensor]  # kind, ranks that store it, name, tensor
WEIGHTS = "weights"
EXPERTS = "weights of experts"
TIED = "tied weights"
STATE = "optimizer state"
EXPERT_STATE = "optimizer state of experts"


def replicated_over_tensor(kind: str) -> str:
    """Return the kind of tensors that tensor parallelism does not shard, so that tensor ranks store them
    too.
    """
    return f"{kind} that tensor ranks share"


def group_replicas(tensors: Iterable[ReplicaTensor]) -> list[ReplicaSet]:
    """Group tensors by kind and ranks. Empty tensors and those that only one rank stores are left out."""
    sets: dict[tuple[str, tuple[int, ...]], dict[str, torch.Tensor]] = {}
    for kind, ranks, name, tensor in tensors:
        if len(ranks) > 1 and tensor.numel():
            sets.setdefault((kind, ranks), {})[name] = tensor.detach()
    return [ReplicaSet(kind, ranks, named) for (kind, ranks), named in sets.items()]
