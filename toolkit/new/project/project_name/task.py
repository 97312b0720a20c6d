"""What the model learns: how samples become a batch, and the loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from toolkit import TextTask


class SmoothedNextToken(TextTask):
    """Cross-entropy of the next token with label smoothing, which evaluation leaves out.

    Args:
        smoothing: share of the target that is spread evenly over the vocabulary.
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def loss_sum(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the sum over tokens; the run divides it by the tokens of the whole batch, over all ranks."""
        logits = model(batch["input_ids"]).flatten(0, 1).float()
        smoothing = self.smoothing if model.training else 0.0
        return functional.cross_entropy(
            logits, batch["labels"].flatten(), reduction="sum", label_smoothing=smoothing
        )
