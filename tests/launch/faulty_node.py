"""A hook that makes the rank of one node compute wrong values from a step on, and goes on to do so in later
attempts.

``+hooks.fault.target=tests.launch.faulty_node.WrongLogits``, with the step in ``FAULTY_FROM`` on that node.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from toolkit.hooks import CompletedStep, Hook


class WrongLogits(Hook):
    """Multiply the outputs of linear layers, which GPT-2 has only at its end, by 1.5."""

    def __init__(self) -> None:
        self._linear = torch.nn.functional.linear

    def on_step(self, completed: CompletedStep) -> None:
        if completed.step >= int(os.environ.get("FAULTY_FROM", "1000000")):
            torch.nn.functional.linear = self._compute_wrong

    def _compute_wrong(self, *arguments: Any) -> torch.Tensor:
        return self._linear(*arguments) * 1.5
