"""Which keys a query sees where documents are kept apart, for attention that no library masks by positions."""

from __future__ import annotations

import torch


def document_causal_mask(
    position_ids: torch.Tensor, queries: torch.Tensor | None = None, keys: torch.Tensor | None = None
) -> torch.Tensor:
    """bool [batch, 1, queries, keys]: True where the key is in the query's document and not after it.

    Args:
        position_ids: int64 [batch, sequence], 0 at the first token of each document.
        queries, keys: int64, places in the sequence of those that the caller has, in its order; None: all.
    """
    places = torch.arange(position_ids.shape[1], device=position_ids.device)
    queries = places if queries is None else queries
    keys = places if keys is None else keys
    document = (position_ids == 0).cumsum(1)
    return ((document[:, queries, None] == document[:, None, keys]) & (keys <= queries[:, None])).unsqueeze(1)
