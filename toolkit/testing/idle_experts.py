"""Initial weights with which most experts get no token, so that ranks of the expert axis stay empty.

One coordinate of the embedding is large and equal for all tokens, and the routers depend mostly on it: in
even layers all tokens go to the first experts, in odd layers to the last ones. So a rank is empty in one
layer and not in the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from toolkit.checkpoint.shard import Shard, StateReader, TensorInfo, TensorKey
from toolkit.engine.build import open_initial_weights
from toolkit.plan.types import RunPlan

COORDINATE = 0
EMBEDDING, ROUTER = "embed_tokens.weight", "mlp.gate.weight"
CONSTANT = 0.2  # ten times the standard deviation of the embedding's other elements
BIAS = 1.0  # the normalized COORDINATE is about 6, so logits of chosen and idle experts are about 12 apart


def open_biased_initial_weights(plan: RunPlan) -> StateReader:
    """Return the first weights of ``plan``, whose model has experts, with biased embedding and routers.

    Raises:
        InputError, CheckpointError: as ``open_initial_weights``.
    """
    assert plan.shape is not None, "cells are of families"
    assert plan.shape.num_local_experts > plan.shape.num_experts_per_tok, "there are experts to leave idle"
    return _BiasedReader(open_initial_weights(plan), plan.shape.num_experts_per_tok)


class _BiasedReader:
    """A ``Reader``. ``chosen``: the number of experts of each layer that get all tokens."""

    def __init__(self, reader: StateReader, chosen: int) -> None:
        self._reader, self._chosen = reader, chosen

    @property
    def tensors(self) -> Mapping[TensorKey, TensorInfo]:
        return self._reader.tensors

    @property
    def scalars(self) -> Mapping[str, object]:
        return self._reader.scalars

    @torch.no_grad()
    def read(self, shards: Sequence[Shard]) -> None:
        self._reader.read(shards)
        for shard in shards:
            if shard.key.name.endswith((EMBEDDING, ROUTER)):
                self._bias(shard)

    def _bias(self, shard: Shard) -> None:
        """Set the column COORDINATE if it overlaps with the shard's box."""
        (row, column), (rows, columns) = shard.box.offset, shard.box.shape
        if not column <= COORDINATE < column + columns:
            return
        values = torch.full((shard.global_shape[0],), CONSTANT)
        if shard.key.name.endswith(ROUTER):
            values = torch.full_like(values, -BIAS)
            layer = next(int(part) for part in shard.key.name.split(".") if part.isdigit())
            experts = slice(0, self._chosen) if layer % 2 == 0 else slice(-self._chosen, None)
            values[experts] = BIAS
        shard.data[:, COORDINATE - column] = values[row : row + rows]
