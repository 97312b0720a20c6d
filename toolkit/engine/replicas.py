"""What ranks hold in common, put together by who holds it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from toolkit.engine.protocol import ReplicaSet

WEIGHTS = "weights"
EXPERTS = "weights of experts"
TIED = "tied weights"
STATE = "optimizer state"
EXPERT_STATE = "optimizer state of experts"


def replicated_over_tensor(what: str) -> str:
    """The part of it that the tensor axis does not cut: its ranks hold that as well."""
    return f"{what} that tensor ranks share"


def group_replicas(found: Iterable[tuple[str, tuple[int, ...], str, torch.Tensor]]) -> list[ReplicaSet]:
    """
    Args:
        found: what, the ranks that hold it, name and tensor. What only one rank holds is left out.
    """
    sets: dict[tuple[str, tuple[int, ...]], dict[str, torch.Tensor]] = {}
    for what, ranks, name, tensor in found:
        if len(ranks) > 1 and tensor.numel():
            sets.setdefault((what, ranks), {})[name] = tensor.detach()
    return [ReplicaSet(what, ranks, tensors) for (what, ranks), tensors in sets.items()]
