"""A small language model. Replace it by your own: any module trains with every setting of the engines."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class CausalConvolutions(nn.Module):
    """Predict the next token from the tokens before it.

    Args:
        vocab_size: number of tokens, at least ``data.vocab_size``.
        width: channels of each layer.
        layers: number of convolutions, which together see ``layers * (reach - 1) + 1`` tokens.
        reach: tokens that one convolution sees.
    """

    def __init__(self, vocab_size: int, width: int = 64, layers: int = 4, reach: int = 4) -> None:
        super().__init__()
        self.reach = reach
        self.embedding = nn.Embedding(vocab_size, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.mixers = nn.ModuleList(nn.Conv1d(width, 2 * width, reach) for _ in range(layers))
        self.lm_head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, sequence, vocabulary] of tokens, int64 [batch, sequence]."""
        stream = self.embedding(input_ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            past = functional.pad(norm(stream).transpose(1, 2), (self.reach - 1, 0))
            value, gate = mixer(past).chunk(2, dim=1)
            stream = stream + (value * torch.sigmoid(gate)).transpose(1, 2)
        logits: torch.Tensor = self.lm_head(stream)
        return logits
