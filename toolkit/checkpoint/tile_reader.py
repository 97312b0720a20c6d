"""Read boxes of tensors as arrays, for verify and diff: several threads, with progress. Imports no torch.

Memory is a few tiles and a block per thread, for tensors of any size.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.checkpoint.catalog import DTYPES, Catalog, LazyPieces, TensorPiece, swap_last_dims
from toolkit.checkpoint.file_reader import BlockBuffer, CheckpointFiles, numpy_dtype
from toolkit.checkpoint.piece_reader import read_piece
from toolkit.checkpoint.planner import PieceRead, ReadPlanner, ReadTarget
from toolkit.checkpoint.shard import Box, Shard, TensorKey

TILE_BYTES = 4 * 2**20  # smaller than a block, so that compared tiles stay in the processor's cache
WORKER_THREADS = 2


def split_into_tiles(shape: tuple[int, ...], max_elements: int, *, by_columns: bool = False) -> Iterator[Box]:
    """Yield boxes of at most ``max_elements`` elements that cover a tensor of ``shape``.

    Boxes come in row-major order and are whole in all dims after the one that is cut. So the part of any box
    of the tensor that is in a tile is a range of that box's elements, and these ranges follow each other.

    Args:
        shape: Shape of the tensor.
        max_elements: Maximum number of elements per tile.
        by_columns: Use the order of the tensor with its last two dims swapped, for files that store it so.
    """
    if by_columns:
        yield from (
            Box(swap_last_dims(box.offset), swap_last_dims(box.shape))
            for box in split_into_tiles(swap_last_dims(shape), max_elements)
        )
        return
    if math.prod(shape) <= max_elements:
        if math.prod(shape):
            yield Box.whole(shape)
        return
    row = math.prod(shape[1:])
    if row > max_elements:
        for index in range(shape[0]):
            for box in split_into_tiles(shape[1:], max_elements):
                yield Box((index, *box.offset), (1, *box.shape))
        return
    rows = max_elements // row
    for first in range(0, shape[0], rows):
        yield Box((first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:]))


def element_offset(outer: Box, inner: Box, *, transposed: bool = False) -> int:
    """Return the number of elements of ``outer``, as stored, before the first element of ``inner``, which
    is inside it.
    """
    offset = tuple(i - o for i, o in zip(inner.offset, outer.offset, strict=True))
    shape = outer.shape
    if transposed:
        offset, shape = swap_last_dims(offset), swap_last_dims(shape)
    at = 0
    for index, size in zip(offset, shape, strict=True):
        at = at * size + index
    return at


class TileReader:
    """Read boxes of a catalog's tensors in their stored dtypes, from several threads.

    Hashes are ignored: a box of a tensor that is cut by columns would read whole blocks of every piece
    repeatedly.
    """

    def __init__(self, catalog: Catalog, files: CheckpointFiles) -> None:
        def unhashed(key: TensorKey) -> tuple[TensorPiece, ...]:
            return tuple(replace(piece, hashes=()) for piece in catalog.pieces[key])

        self.tensors = catalog.tensors
        self._planner = ReadPlanner(replace(catalog, pieces=LazyPieces(catalog.tensors, unhashed)))
        self._files = files
        self._buffers = threading.local()

    def read(self, key: TensorKey, box: Box) -> Any:
        """Return an array of shape ``box.shape``, valid until this thread's next read. Raises DamagedFile."""
        info = self.tensors[key]
        values = self._tile(info.dtype, box)
        for read in self._planner.plan([Shard(key, info.shape, box, values)]):
            read_piece(read, self._files, self._buffers.block)
        return values

    def read_from(self, piece: TensorPiece, box: Box) -> Any:
        """Return ``box`` read from one piece (which may be a copy) that contains all of it."""
        values = self._tile(piece.dtype, box)
        shard = Shard(piece.key, piece.global_shape, box, values)
        read_piece(
            PieceRead(replace(piece, hashes=()), (ReadTarget(shard, box),)), self._files, self._buffers.block
        )
        return values

    def _tile(self, dtype: str, box: Box) -> Any:
        if not hasattr(self._buffers, "block"):
            self._buffers.block, self._buffers.tile = BlockBuffer(), np.empty(TILE_BYTES, np.uint8)
        return self._buffers.tile.view(numpy_dtype(dtype))[: box.numel].reshape(box.shape)


def tile_box(box: Box, *dtypes: str, by_columns: bool = False) -> Iterator[Box]:
    """Yield ``box`` in tiles that a ``TileReader`` can read in any of ``dtypes``."""
    most = TILE_BYTES // max(DTYPES[dtype].itemsize for dtype in dtypes)
    for tile in split_into_tiles(box.shape, most, by_columns=by_columns):
        yield Box(tuple(a + b for a, b in zip(tile.offset, box.offset, strict=True)), tile.shape)


def as_bits(values: Any) -> Any:
    """Return ``values`` as unsigned integers: NaN equals itself, 0.0 differs from -0.0."""
    return values.view(f"u{values.dtype.itemsize}")


class ByteProgress:
    """Report processed bytes and the total to a callback, from several threads."""

    def __init__(self, report: Callable[[int, int], None], total: int) -> None:
        self._report, self._total = report, total
        self._lock = threading.Lock()

    def __call__(self, numbytes: int) -> None:
        with self._lock:
            self._report(numbytes, self._total)
