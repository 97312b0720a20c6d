"""What verify and diff have in common: boxes of tensors as arrays, over a few threads, with progress. Imports no torch.

Memory is a few tiles and a block a thread, whatever the sizes of tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.checkpoint.blocks import Block, Files, numpy_dtype
from toolkit.checkpoint.catalog import DTYPES, Catalog, Made, Piece
from toolkit.checkpoint.executor import read_piece
from toolkit.checkpoint.planner import PieceRead, ReadPlanner, Target
from toolkit.checkpoint.shard import Box, Shard, TensorKey
from toolkit.checkpoint.tiles import tiles

TILE_BYTES = 4 * 2**20  # less than a block: what is compared stays in the processor's cache
WORKERS = 2


class TileReader:
    """Boxes of a catalog's tensors, in the dtypes in which they are stored; for several threads.

    Hashes are not looked at: a box of a tensor that is cut by columns would take whole blocks of every piece, again and again.
    """

    def __init__(self, catalog: Catalog, files: Files) -> None:
        def unhashed(key: TensorKey) -> tuple[Piece, ...]:
            return tuple(replace(piece, hashes=()) for piece in catalog.pieces[key])

        self.tensors = catalog.tensors
        self._planner = ReadPlanner(replace(catalog, pieces=Made(catalog.tensors, unhashed)))
        self._files = files
        self._rooms = threading.local()

    def read(self, key: TensorKey, box: Box) -> Any:
        """Shape ``box.shape``; of this thread until it asks for the next. Raises Damage."""
        info = self.tensors[key]
        values = self._room(info.dtype, box)
        for read in self._planner.plan([Shard(key, info.shape, box, values)]):
            read_piece(read, self._files, self._rooms.block)
        return values

    def read_from(self, piece: Piece, box: Box) -> Any:
        """The same, of one piece (which may be a copy) that holds all of ``box``."""
        values = self._room(piece.dtype, box)
        shard = Shard(piece.key, piece.global_shape, box, values)
        read_piece(
            PieceRead(replace(piece, hashes=()), (Target(shard, box),)), self._files, self._rooms.block
        )
        return values

    def _room(self, dtype: str, box: Box) -> Any:
        if not hasattr(self._rooms, "block"):
            self._rooms.block, self._rooms.tile = Block(), np.empty(TILE_BYTES, np.uint8)
        return self._rooms.tile.view(numpy_dtype(dtype))[: box.numel].reshape(box.shape)


def boxes(box: Box, *dtypes: str, by_columns: bool = False) -> Iterator[Box]:
    """``box`` in tiles of which a ``TileReader`` can read each in any of ``dtypes``."""
    most = TILE_BYTES // max(DTYPES[dtype].itemsize for dtype in dtypes)
    for tile in tiles(box.shape, most, by_columns=by_columns):
        yield Box(tuple(a + b for a, b in zip(tile.offset, box.offset, strict=True)), tile.shape)


def bits(values: Any) -> Any:
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
