"""Comparisons and model sizes of the DeepSpeed checkpoint tests."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoint.deepspeed_saves import State
from tests.checkpoint.layouts import same_bits, whole
from toolkit.checkpoint.shard import Box, Shard
from toolkit.checkpoint.source import CheckpointSource

# No size divides another, and norms of heads have two elements.
ODD: dict[str, Any] = {"model__vocab_size": 263, "model__intermediate_size": 37}
EVEN: dict[str, Any] = {
    "model__vocab_size": 266,
    "model__intermediate_size": 38,
}  # divisible by two tensor ranks


def read_like(source: CheckpointSource, like: State) -> State:
    """Read the tensors of ``like`` from the source, in their dtypes."""
    found = {key: torch.empty_like(tensor) for key, tensor in like.items()}
    source.reader().read(
        [Shard(key, tuple(tensor.shape), Box.whole(tensor.shape), tensor) for key, tensor in found.items()]
    )
    return found


def differing(actual: State, expected: State) -> list[str]:
    return [str(key) for key in expected if not same_bits(actual[key], expected[key])]


def compare_copies(source: CheckpointSource) -> None:
    """Check that copies are equal."""
    values = whole(source.reader())
    for key in source.catalog.copies:
        for piece in source.catalog.copies[key]:
            data = (source.folder / piece.file).read_bytes()[piece.begin : piece.end]
            copy = torch.frombuffer(bytearray(data), dtype=getattr(torch, piece.dtype)).reshape(
                piece.box.shape
            )
            place = tuple(
                slice(low, low + size) for low, size in zip(piece.box.offset, piece.box.shape, strict=True)
            )
            assert same_bits(copy, values[key][place].contiguous()), piece
