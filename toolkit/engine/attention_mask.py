"""Attention masks for samples that consist of several documents (``data.documents=separate``)."""

from __future__ import annotations

import torch


def document_causal_mask(
    position_ids: torch.Tensor, queries: torch.Tensor | None = None, keys: torch.Tensor | None = None
) -> torch.Tensor:
    """bool [batch, 1, queries, keys]: True if the key is in the query's document and not after the query.

    Args:
        position_ids: int64 [batch, sequence], 0 at the first token of each document.
        queries, keys: int64, positions in the sequence of the caller's queries and keys; None: all positions.
    """
    positions = torch.arange(position_ids.shape[1], device=position_ids.device)
    queries = positions if queries is None else queries
    keys = positions if keys is None else keys
    document = (position_ids == 0).cumsum(1)
    return ((document[:, queries, None] == document[:, None, keys]) & (keys <= queries[:, None])).unsqueeze(1)
