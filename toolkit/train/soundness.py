"""Judge every step by its numbers: infinite or NaN (``train.on_nonfinite``), or a spike (``train.on_spike``).

The loss and what the ranks agreed on after the step decide, and both are equal on all ranks, so all ranks
make the same decision. Checkpoints record what later losses are compared with, so a resumed run decides as
the same run would have without the interruption.

A loss that jumps and stays is a spike for a few steps only, because a spike is compared with the steps before
it. Whether a checkpoint is sound is therefore also a comparison with the newest sound checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from toolkit.checkpoint_folder import step_of
from toolkit.config.schema import OnNonfinite, OnSpike, TrainConfig
from toolkit.hooks import CompletedStep, Hook
from toolkit.monitor.health.loss import LOSS, NOISE_STEPS, is_spike, spike_limit
from toolkit.train.nonfinite import Diverged

# The newest losses, whose median a saved state is judged by. Fewer than the steps whose median a spike is
# compared with (REFERENCE_STEPS): after a jump that stays, each step counts as a spike until this median has
# risen too.
RECENT_STEPS = 5
# Saves after which a higher loss counts as the run's new level, as after a change of the data. Until then a
# rollback would go back to before the rise, and uploads wait.
SETTLED_SAVES = 10


class FaultKind(StrEnum):
    NONFINITE = "non-finite"  # the loss or the gradient norm
    STATE = "non-finite-state"  # weights or the optimizer's state, checked before a save
    SPIKE = "spike"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The fault of a step.

    Attributes:
        step: the number of completed steps after it.
        cause: one clause that names the step.
        losses: those before a spike, with which it was compared.
    """

    step: int
    kind: FaultKind
    loss: float
    grad_norm: float
    weights_finite: bool
    cause: str
    losses: tuple[float, ...] = ()


class RollbackRequired(Exception):
    """The run has to go back to a sound checkpoint. Raised at the same step on all ranks."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.cause)
        self.fault = fault


def judge_step(completed: CompletedStep, losses: Sequence[float]) -> Fault | None:
    """Return what is wrong with a step, or None.

    Args:
        losses: the finite losses of the steps before it, of which the last ``NOISE_STEPS`` count.
    """
    step, result = completed.step, completed.result
    numbers = f"loss {result.loss:g}, gradient norm {result.grad_norm:g}"
    if completed.consensus.nonfinite:
        what = "the gradient norm" if math.isfinite(result.loss) else "the loss"
        kind, cause = FaultKind.NONFINITE, f"step {step}: {what} is not finite ({numbers})"
    elif is_spike(result.loss, losses, LOSS):
        kind, cause = FaultKind.SPIKE, f"step {step}: the loss is a spike ({numbers})"
    else:
        return None
    return Fault(
        step=step,
        kind=kind,
        loss=result.loss,
        grad_norm=result.grad_norm,
        weights_finite=not completed.consensus.nonfinite_state,
        cause=cause,
        losses=tuple(losses) if kind is FaultKind.SPIKE else (),
    )


class Soundness(Hook):
    """Judge every step, and end the run or ask for a rollback if the configuration says so.

    It comes before the hooks that evaluate and save: from a checkpoint of a bad step the next start would
    continue as if nothing had happened.
    """

    def __init__(self, settings: TrainConfig) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=NOISE_STEPS)
        # the newest bad step, complete checkpoint, and state that was judged before it was saved
        self._bad_step = self._saved = self._judged = 0
        self._step = 0
        self._limit: float | None = None  # of the newest sound save; None: too few losses were known
        self._high_saves = 0  # in a row above the limit

    def on_rollback(self, path: Path) -> None:
        self._step = self._saved = self._bad_step = self._judged = step_of(path) or 0
        self._limit, self._high_saves = None, 0  # the state of the checkpoint follows, if it has one

    def on_checkpoint(self, path: Path) -> None:
        self._saved = max(self._saved, step_of(path) or 0)

    def on_step(self, completed: CompletedStep) -> None:
        self._step = completed.step
        fault = judge_step(completed, list(self._losses))
        if math.isfinite(completed.result.loss):
            self._losses.append(completed.result.loss)
        if fault is None:
            return
        self._bad_step = completed.step
        settings = self._settings
        wanted = settings.on_spike if fault.kind is FaultKind.SPIKE else settings.on_nonfinite
        if wanted is OnNonfinite.stop:
            raise Diverged(fault.cause, weights_finite=fault.weights_finite)
        if wanted in (OnNonfinite.rollback, OnSpike.rollback):
            raise RollbackRequired(fault)

    def judge_save(self) -> bool:
        """Return whether the state that is saved now is sound. If it is, later ones are compared with it.

        It is sound if no step since the newest complete checkpoint is bad, and the loss is not higher than
        after the newest sound save by more than a spike, or has been for ``SETTLED_SAVES``. A lower loss is
        always sound.
        """
        self._judged = self._step
        losses = list(self._losses)
        high = self._limit is not None and median(losses[-RECENT_STEPS:]) > self._limit
        self._high_saves = self._high_saves + 1 if high else 0
        sound = self._bad_step <= self._saved and (not high or self._high_saves > SETTLED_SAVES)
        if sound:
            self._limit = spike_limit(losses, LOSS)
        return sound

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": list(self._losses),
            "limit": self._limit,
            "high_saves": self._high_saves,
            "bad_step": self._bad_step,
            "judged": self._judged,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses.clear()
        self._losses.extend(float(loss) for loss in state["losses"])
        # The others are absent in checkpoints of earlier versions.
        self._limit, self._high_saves = state.get("limit"), state.get("high_saves", 0)
        # A checkpoint was judged itself. A snapshot in memory was not, so bad steps between the checkpoint
        # before it and the snapshot still count.
        self._bad_step, self._saved = state.get("bad_step", 0), state.get("judged", 0)
        self._judged = self._saved
