"""A shard describes which box of which tensor some memory contains. Engines provide shards; saving and
loading use them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from toolkit.optimizers.base import EXP_AVG as EXP_AVG
from toolkit.optimizers.base import EXP_AVG_SQ as EXP_AVG_SQ
from toolkit.optimizers.base import MOMENTUM as MOMENTUM

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

# States of a parameter. Those of optimizers have the names that toolkit/optimizers states.
WEIGHT = "weight"  # used by the forward pass, in the run's precision
# fp32 copy that the optimizer updates; absent in fp32 runs, whose weights are updated directly
MASTER = "master"


@dataclass(frozen=True, slots=True, order=True)
class TensorKey:
    state: str
    name: str  # canonical name

    def __str__(self) -> str:
        return f"{self.state}:{self.name}"


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: ``offset[d] .. offset[d] + shape[d]`` in every dim. The box of a scalar has no
    dims.
    """

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
        """Return the intersection in global coordinates, or None if it is empty."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        high = (
            min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(h - o for h, o in zip(high, low, strict=True))
        return Box(low, shape) if all(size > 0 for size in shape) else None


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the flat range ``start .. stop`` of a row-major tensor of ``shape`` as boxes, in flat order.

    A ZeRO partition is such a range. It consists of at most ``2 * dims - 1`` boxes: a partial head, whole
    rows and a partial tail, recursively in one dim less.
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
    tail = stop - (last + 1) * row  # 0 if the range ends with a whole row
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
        key: State and canonical name.
        global_shape: Shape of the whole tensor.
        box: The part of the tensor that is in ``data``.
        data: Tensor of shape ``box.shape``, of any dtype and device; may be a view. Loading also accepts
            numpy arrays.
        replica, replicas: Index of this copy and number of ranks with the same box. Saving shares the writing
            of a replicated box among them; loading fills every copy.
        mirror: Other ranks save these elements in their own boxes; loading fills this copy too.
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
    """Return the shards of ``flat``, which contains the range ``start .. start + len(flat)`` of a
    row-major tensor.
    """
    shards, at = [], 0
    for box in flat_boxes(global_shape, start, start + flat.numel()):
        shards.append(Shard(key, tuple(global_shape), box, flat.narrow(0, at, box.numel).view(box.shape)))
        at += box.numel
    return shards


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Dtype (torch's name, such as ``float32``) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class StateReader(Protocol):
    """A source of state: a checkpoint, a Hugging Face folder or random initial weights."""

    @property
    def tensors(self) -> Mapping[TensorKey, TensorInfo]:
        """Every tensor that can be read."""

    @property
    def scalars(self) -> Mapping[str, object]:
        """State that is not a tensor of parameter shape: step, consumed samples, loss scale. Plain JSON
        types.
        """

    def read(self, shards: Sequence[Shard]) -> None:
        """Fill every shard's ``data``, casting to its dtype. Reads and verifies only the required bytes.

        Raises:
            CheckpointError: A tensor is absent, has another shape, or its bytes do not match their hash.
        """
