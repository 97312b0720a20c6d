"""Detect weights that are infinite or NaN, and describe how training ends because of such numbers.

Every engine skips a step whose gradient norm is not finite (``engine/protocol.py``), so the weights stay as
they were; ``soundness.py`` decides what follows. All ranks make the same decision, because the flag is part
of the exchange of every step. Another exchange happens only after a step that is not finite, and before a
save.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from toolkit.checkpoint.shard import Shard
from toolkit.commands import command_line
from toolkit.engine.rank_sync import FlagReduce


class Diverged(Exception):
    """Training ends because a loss, gradient or weight is not finite, or because rollbacks have not helped.
    Raised at the same step on all ranks.

    Attributes:
        weights_finite: whether weights and the optimizer's state are finite on every rank.
        otherwise: how to train on without a smaller learning rate.
    """

    def __init__(self, reason: str, *, weights_finite: bool, otherwise: str | None = None) -> None:
        super().__init__(reason)
        self.weights_finite = weights_finite
        self.otherwise = otherwise or "skip such steps: train.on_nonfinite=skip"

    def describe(self, checkpoint: str | None, *, checked: bool) -> str:
        """Describe the reason, the state of the weights, and how to continue.

        Args:
            checkpoint: the newest checkpoint; None if there is none.
            checked: whether this attempt has saved it, which includes a check that its values are finite.
        """
        weights = "the weights are finite" if self.weights_finite else "the weights are not finite either"
        if checkpoint is None:
            return (
                f"{self}; {weights}; there is no checkpoint.\n    remedy: start again with a smaller "
                "optim.lr, or with optim.clip=1"
            )
        valid = self.weights_finite or checked
        newest = f"the newest {'valid ' if valid else ''}checkpoint is {checkpoint}"
        verify = f"verify it: {command_line('reshard', 'action=verify', f'source={checkpoint}')}; "
        return (
            f"{self}; {weights}; {newest}.\n    remedy: {'' if valid else verify}continue from it with a "
            f"smaller learning rate, as a new run: run.fork={checkpoint} optim.lr=...; or {self.otherwise}"
        )


def finite_on_all_ranks(shards: Iterable[Shard], all_reduce_flags: FlagReduce) -> bool:
    """Return whether the state of every rank is finite. Collective; waits for the device."""
    return not all_reduce_flags([not all_finite(shard.data for shard in shards)])[0]


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no value is infinite or NaN, without copying the tensors.

    Each value is read once, or twice if the Euclidean norm overflows.
    """
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # Both norms are infinite or NaN if any value is. On CPUs the infinity norm takes 17 times as long.
    norms = (float(torch.nn.utils.get_total_norm(floats, order)) for order in (2.0, torch.inf))
    return not floats or any(map(math.isfinite, norms))
