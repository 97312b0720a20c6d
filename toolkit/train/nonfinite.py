"""What a run does about losses, gradients and weights that are infinite or NaN: ``train.on_nonfinite``.

Every engine skips a step whose gradient norm is not finite (``engine/protocol.py``), so one such step leaves the
weights as they were. Whether training ends there is decided here, in one place for all engines. All ranks decide
alike: the flag travels with the exchange that each step has anyway, and a further exchange follows only if a step is
not finite, or before a save.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from toolkit.checkpoint.shard import Shard
from toolkit.engine.rank_sync import FlagReduce
from toolkit.hooks import Hook, StepDone


class Diverged(Exception):
    """Training ends because a loss, gradient or weight is not finite. Raised at the same step on all ranks.

    Attributes:
        weights_finite: whether weights and the optimizer's state are finite on every rank.
    """

    def __init__(self, reason: str, *, weights_finite: bool) -> None:
        super().__init__(reason)
        self.weights_finite = weights_finite

    def describe(self, checkpoint: str | None, *, checked: bool) -> str:
        """The reason, what became of the weights, and how to go on.

        Args:
            checkpoint: the newest one; None: there is none.
            checked: this attempt has saved it, and so has found its values finite.
        """
        weights = "the weights are finite" if self.weights_finite else "the weights are not finite either"
        if checkpoint is None:
            return (
                f"{self}; {weights}; there is no checkpoint.\n    remedy: start again with a smaller optim.lr, or "
                "with optim.clip=1"
            )
        sound = (
            self.weights_finite or checked
        )  # what was loaded from it was finite, or what was written to it
        named = f"the newest {'sound ' if sound else ''}checkpoint is {checkpoint}"
        first = (
            ""
            if sound
            else f"see whether it is sound: python launch/reshard.py action=verify source={checkpoint}; "
        )
        return (
            f"{self}; {weights}; {named}.\n    remedy: {first}go on from it with a smaller learning rate, as a new "
            f"run: run.fork={checkpoint} optim.lr=...; or skip such steps: train.on_nonfinite=continue"
        )


class StopOnNonfinite(Hook):
    """``train.on_nonfinite=stop``: end training at the first step whose loss or gradient norm is not finite.

    It comes before the hooks that evaluate and save: from a checkpoint of that step the next start would go on as if
    nothing had happened.
    """

    def on_step(self, done: StepDone) -> None:
        if not done.agreed.nonfinite:
            return
        result = done.result
        what = "the gradient norm" if math.isfinite(result.loss) else "the loss"
        raise Diverged(
            f"step {done.step}: {what} is not finite (loss {result.loss:g}, gradient norm "
            f"{result.grad_norm:g})",
            weights_finite=not done.agreed.bad_weights,
        )


def finite_on_all_ranks(shards: Iterable[Shard], all_reduce_flags: FlagReduce) -> bool:
    """Whether the state of every rank is finite. Collective; waits for the device."""
    return not all_reduce_flags([not all_finite(shard.data for shard in shards)])[0]


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no value is infinite or NaN. Reads each value once, without a copy of the tensors' size."""
    kept = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # The norm is the largest absolute value, and NaN if one of the values is.
    return not kept or math.isfinite(float(torch.nn.utils.get_total_norm(kept, torch.inf)))
