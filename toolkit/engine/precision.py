"""Dtypes of weights, and dynamic loss scaling for fp16. Shared by the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from toolkit.checkpoint.scalars import SCALER_STATE
from toolkit.config.schema import Precision, PrecisionConfig

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}
FACTOR = 2.0
SMALLEST = 1.0


@dataclass(slots=True)
class LossScaler:
    """Multiplies the loss by ``cur_scale``, so that small gradients do not underflow in fp16.

    The scale halves at every overflow, whose step is skipped, and doubles after ``window`` steps without
    overflow. The fields and the way steps are counted are those of DeepSpeed's ``DynamicLossScaler`` with
    hysteresis 1, so that a checkpoint of one engine resumes in another.
    """

    cur_scale: float
    window: int
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = 1

    @staticmethod
    def from_config(config: PrecisionConfig) -> LossScaler | None:
        """Return a scaler for fp16, None for other precisions."""
        if config.name is not Precision.fp16:
            return None
        return LossScaler(cur_scale=2.0**config.initial_scale_power, window=config.scale_window)

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step. It does not fall below SMALLEST."""
        if overflow:
            self.cur_scale = max(self.cur_scale / FACTOR, SMALLEST)
            self.last_overflow_iter = self.cur_iter
        else:
            calm = self.cur_iter - self.last_overflow_iter - 1
            if calm > 0 and calm % self.window == 0:
                self.cur_scale *= FACTOR
        self.cur_iter += 1

    def state_dict(self) -> dict[str, float | int]:
        return {name: getattr(self, name) for name in SCALER_STATE}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        for name in SCALER_STATE:
            setattr(self, name, state[name])
