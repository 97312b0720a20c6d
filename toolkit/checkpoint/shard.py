"""A shard is data: which box of which tensor some memory holds. Engines give shards; saving and loading do the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

# States of a parameter that have its shape and a meaning across engines. Others pass through by their own names.
WEIGHT = "weight"  # what forward uses, in the run's precision
MASTER = "master"  # fp32 copy that the optimizer updates; absent in fp32, where the weight is it
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
MOMENTUM = "momentum_buffer"


@dataclass(frozen=True, slots=True, order=True)
class TensorKey:
    state: str
    name: str  # canonical name

    def __str__(self) -> str:
        return f"{self.state}:{self.name}"


@dataclass(frozen=True, slots=True)
class Box:
    """Part of a tensor: ``offset[d] .. offset[d] + shape[d]`` in every dim. A scalar's box has no dims."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.offset) == len(self.shape), f"offset {self.offset} against shape {self.shape}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    def intersect(self, other: Box) -> Box | None:
        """What both hold, in global coordinates; None if nothing."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = (
            min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(h - o for h, o in zip(high, low, strict=True))
        return Box(low, shape) if all(size > 0 for size in shape) else None


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The flat range ``start .. stop`` of a row-major tensor of ``shape``, as boxes in flat order.

    A ZeRO partition is such a range. It is at most ``2 * dims - 1`` boxes: a ragged head, whole rows, a ragged tail,
    each again one dim down.
    """
    shape = tuple(shape)
    assert 0 <= start <= stop <= math.prod(shape), f"range {start}..{stop} of shape {shape}"
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row

    def inside(index: int, low: int, high: int) -> list[Box]:
        return [Box((index, *box.offset), (1, *box.shape)) for box in flat_boxes(shape[1:], low, high)]

    if first == last and (stop - start) < row:
        return inside(first, start - first * row, stop - first * row)
    boxes: list[Box] = []
    if start > first * row:
        boxes += inside(first, start - first * row, row)
        first += 1
    tail = stop - (last + 1) * row  # 0 where the range ends with a whole row
    whole_end = last + 1 if tail == 0 else last
    if whole_end > first:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (whole_end - first, *shape[1:])))
    if tail:
        boxes += inside(last, 0, row + tail)
    return boxes


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor in an engine's own memory: saving reads ``data``, loading writes it in place.

    Attributes:
        key: state and canonical name.
        global_shape: of the whole tensor.
        box: which part ``data`` is.
        data: shape ``box.shape``; any dtype, any device, may be a view. Loading also fills an array of numpy.
        replica, replicas: this copy's number and how many ranks hold the same box. Saving shares the writing of a
            replicated box over its holders; loading fills every copy.
        mirror: other ranks save these elements, in boxes of their own; loading fills this copy too.
    """

    key: TensorKey
    global_shape: tuple[int, ...]
    box: Box
    data: torch.Tensor
    replica: int = 0
    replicas: int = 1
    mirror: bool = False

    def __post_init__(self) -> None:
        assert tuple(self.data.shape) == self.box.shape, (
            f"{self.key}: data {tuple(self.data.shape)}, box {self.box.shape}"
        )
        assert 0 <= self.replica < self.replicas, f"{self.key}: replica {self.replica} of {self.replicas}"


def flat_shards(key: TensorKey, global_shape: Sequence[int], start: int, flat: torch.Tensor) -> list[Shard]:
    """Shards for ``flat``, which holds the range ``start .. start + len(flat)`` of a row-major tensor."""
    shards, at = [], 0
    for box in flat_boxes(global_shape, start, start + flat.numel()):
        shards.append(Shard(key, tuple(global_shape), box, flat.narrow(0, at, box.numel).view(box.shape)))
        at += box.numel
    return shards


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a source knows of a tensor without reading it. ``dtype`` is torch's name: ``float32``."""

    dtype: str
    shape: tuple[int, ...]


class StateReader(Protocol):
    """Where state comes from: a checkpoint, a Hugging Face folder, or random initial weights. One path for all."""

    @property
    def tensors(self) -> Mapping[TensorKey, TensorInfo]:
        """Everything that can be read."""

    @property
    def scalars(self) -> Mapping[str, object]:
        """What is not a tensor of parameter shape: step, consumed samples, optimizer step, loss scale. Plain JSON types."""

    def read(self, shards: Sequence[Shard]) -> None:
        """Fill every shard's ``data``, casting to its dtype. Reads (and verifies) just the bytes that are needed.

        Raises:
            CheckpointError: a tensor is absent, has another shape, or its bytes do not match their hash.
        """
