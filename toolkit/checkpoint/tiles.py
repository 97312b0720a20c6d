"""Cutting a tensor into boxes of bounded size, in an order in which whatever is written of them is written front to back."""

from __future__ import annotations

import math
from collections.abc import Iterator

from toolkit.checkpoint.catalog import turned
from toolkit.checkpoint.shard import Box


def tiles(shape: tuple[int, ...], most: int, *, by_columns: bool = False) -> Iterator[Box]:
    """Boxes that fill a tensor of ``shape``, each of no more than ``most`` elements.

    They come in row-major order and each is whole in all dims after the one that is cut, so that what any box of the tensor has
    of a tile is a range of that box's own elements, and the ranges follow each other.

    Args:
        by_columns: the same of the tensor with its last two dims changed over: for files that have it so.
    """
    if by_columns:
        yield from (Box(turned(box.offset), turned(box.shape)) for box in tiles(turned(shape), most))
        return
    if math.prod(shape) <= most:
        if math.prod(shape):
            yield Box.whole(shape)
        return
    row = math.prod(shape[1:])
    if row > most:
        for index in range(shape[0]):
            for box in tiles(shape[1:], most):
                yield Box((index, *box.offset), (1, *box.shape))
        return
    rows = most // row
    for first in range(0, shape[0], rows):
        yield Box((first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:]))


def place_in(outer: Box, inner: Box, *, transposed: bool = False) -> int:
    """How many elements of ``outer``, as it lies in its file, come before the first of ``inner``, which is inside it."""
    offset = tuple(i - o for i, o in zip(inner.offset, outer.offset, strict=True))
    shape = outer.shape
    if transposed:
        offset, shape = turned(offset), turned(shape)
    at = 0
    for index, size in zip(offset, shape, strict=True):
        at = at * size + index
    return at
