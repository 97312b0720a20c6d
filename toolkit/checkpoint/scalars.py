"""Names of the scalars that training resumes from, in every format. Values are plain JSON types."""

from __future__ import annotations

import math
from collections.abc import Mapping

STEP = "step"  # int: completed optimizer steps, including skipped ones
CONSUMED = "consumed_samples"  # int
# bool: since the checkpoint before, no loss was infinite, NaN or a spike, and the loss is not higher than at
# the sound checkpoint before by more than a spike. Absent: unknown
SOUND = "sound"
OPTIMIZER_STEP = "optimizer_step"  # int: step count of the optimizer, for Adam's bias correction
# Mapping of names to the optimizer's other numbers, each equal for all parameters
OPTIMIZER_NUMBERS = "optimizer_numbers"
# str: dtype of the run's weights, if the source stores only their fp32 masters
WEIGHTS_DTYPE = "weights_dtype"
LOSS_SCALER = "loss_scaler"  # fp16: a mapping with the keys SCALER_STATE
SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
# A mapping with the keys OPTIM_SETTINGS: engines' own loaders take these from a checkpoint and ignore the
# run's. ``lr`` is the learning rate of the next step, ``weight_decay`` that of parameters that decay.
OPTIM = "optim"
OPTIM_SETTINGS = ("lr", "betas", "eps", "weight_decay")


def find_invalid_scalar(scalars: Mapping[str, object]) -> str | None:
    """Return the name of a scalar of the wrong type, or None."""
    for name in (STEP, CONSUMED, OPTIMIZER_STEP):
        if name in scalars and not _is_count(scalars[name]):
            return name
    scaler = scalars.get(LOSS_SCALER)
    if LOSS_SCALER in scalars and not (isinstance(scaler, Mapping) and all(map(_is_number, scaler.values()))):
        return LOSS_SCALER
    numbers = scalars.get(OPTIMIZER_NUMBERS)
    if OPTIMIZER_NUMBERS in scalars and not (
        isinstance(numbers, Mapping) and all(map(_is_number, numbers.values()))
    ):
        return OPTIMIZER_NUMBERS
    optim = scalars.get(OPTIM)
    if OPTIM in scalars and not (
        isinstance(optim, Mapping)
        and all(
            _is_number(value) or (isinstance(value, list) and all(map(_is_number, value)))
            for value in optim.values()
        )
    ):
        return OPTIM
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and math.isfinite(value))
