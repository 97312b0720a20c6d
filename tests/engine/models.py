"""Custom modules for tests, importable by ranks."""

from __future__ import annotations

import torch
from torch import nn


class Mixer(nn.Module):
    """A frozen embedding, a parameter that is used directly, and a mean loss."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(264, width)
        self.embed.weight.requires_grad = False
        self.scale = nn.Parameter(torch.ones(width))
        self.body = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.head = nn.Linear(width, 264)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.embed(input_ids)) * self.scale)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Sometimes(nn.Module):
    """A branch that about half of the micro-batches take, depending on their samples."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(264, width)
        self.branch = nn.Linear(width, width)
        self.head = nn.Linear(width, 264)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        if int(input_ids[0, 0]) % 2:
            hidden = hidden + self.branch(hidden)
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
