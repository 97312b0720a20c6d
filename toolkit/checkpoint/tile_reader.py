"""What verify and diff have in common: boxes of tensors as arrays, over a few threads, with progress. Imports no torch.

Memory is a few tiles and a block a thread, whatever the sizes of tensors.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.checkpoint.blocks import BlockBuffer, CheckpointFiles, numpy_dtype
from toolkit.checkpoint.catalog import DTYPES, Catalog, LazyPieces, TensorPiece, swap_last_dims
from toolkit.checkpoint.executor import read_piece
from toolkit.checkpoint.planner import PieceRead, ReadPlanner, ReadTarget
from toolkit.checkpoint.shard import Box, Shard, TensorKey

TILE_BYTES = 4 * 2**20  # less than a block: what is compared stays in the processor's cache
WORKERS = 2


def split_into_tiles(shape: tuple[int, ...], most: int, *, by_columns: bool = False) -> Iterator[Box]:
    """Boxes that fill a tensor of ``shape``, each of no more than ``most`` elements.

    They come in row-major order and each is whole in all dims after the one that is cut, so that what any box of the tensor has
    of a tile is a range of that box's own elements, and the ranges follow each other.

    Args:
        by_columns: the same of the tensor with its last two dims changed over: for files that have it so.
    """
    if by_columns:
        yield from (
            Box(swap_last_dims(box.offset), swap_last_dims(box.shape))
            for box in split_into_tiles(swap_last_dims(shape), most)
        )
        return
    if math.prod(shape) <= most:
        if math.prod(shape):
            yield Box.whole(shape)
        return
    row = math.prod(shape[1:])
    if row > most:
        for index in range(shape[0]):
            for box in split_into_tiles(shape[1:], most):
                yield Box((index, *box.offset), (1, *box.shape))
        return
    rows = most // row
    for first in range(0, shape[0], rows):
        yield Box((first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:]))


def element_offset(outer: Box, inner: Box, *, transposed: bool = False) -> int:
    """How many elements of ``outer``, as it lies in its file, come before the first of ``inner``, which is inside it."""
    offset = tuple(i - o for i, o in zip(inner.offset, outer.offset, strict=True))
    shape = outer.shape
    if transposed:
        offset, shape = swap_last_dims(offset), swap_last_dims(shape)
    at = 0
    for index, size in zip(offset, shape, strict=True):
        at = at * size + index
    return at


class TileReader:
    """Boxes of a catalog's tensors, in the dtypes in which they are stored; for several threads.

    Hashes are not looked at: a box of a tensor that is cut by columns would take whole blocks of every piece, again and again.
    """

    def __init__(self, catalog: Catalog, files: CheckpointFiles) -> None:
        def unhashed(key: TensorKey) -> tuple[TensorPiece, ...]:
            return tuple(replace(piece, hashes=()) for piece in catalog.pieces[key])

        self.tensors = catalog.tensors
        self._planner = ReadPlanner(replace(catalog, pieces=LazyPieces(catalog.tensors, unhashed)))
        self._files = files
        self._rooms = threading.local()

    def read(self, key: TensorKey, box: Box) -> Any:
        """Shape ``box.shape``; of this thread until it asks for the next. Raises Damage."""
        info = self.tensors[key]
        values = self._room(info.dtype, box)
        for read in self._planner.plan([Shard(key, info.shape, box, values)]):
            read_piece(read, self._files, self._rooms.block)
        return values

    def read_from(self, piece: TensorPiece, box: Box) -> Any:
        """The same, of one piece (which may be a copy) that holds all of ``box``."""
        values = self._room(piece.dtype, box)
        shard = Shard(piece.key, piece.global_shape, box, values)
        read_piece(
            PieceRead(replace(piece, hashes=()), (ReadTarget(shard, box),)), self._files, self._rooms.block
        )
        return values

    def _room(self, dtype: str, box: Box) -> Any:
        if not hasattr(self._rooms, "block"):
            self._rooms.block, self._rooms.tile = BlockBuffer(), np.empty(TILE_BYTES, np.uint8)
        return self._rooms.tile.view(numpy_dtype(dtype))[: box.numel].reshape(box.shape)


def tile_box(box: Box, *dtypes: str, by_columns: bool = False) -> Iterator[Box]:
    """``box`` in tiles of which a ``TileReader`` can read each in any of ``dtypes``."""
    most = TILE_BYTES // max(DTYPES[dtype].itemsize for dtype in dtypes)
    for tile in split_into_tiles(box.shape, most, by_columns=by_columns):
        yield Box(tuple(a + b for a, b in zip(tile.offset, box.offset, strict=True)), tile.shape)


def as_bits(values: Any) -> Any:
    """``values`` as unsigned integers: NaN equals itself, 0.0 is not -0.0."""
    return values.view(f"u{values.dtype.itemsize}")


class ByteProgress:
    """Tells of bytes that are done, of all bytes, from several threads."""

    def __init__(self, tell: Callable[[int, int], None], total: int) -> None:
        self._tell, self._total = tell, total
        self._lock = threading.Lock()

    def __call__(self, numbytes: int) -> None:
        with self._lock:
            self._tell(numbytes, self._total)
