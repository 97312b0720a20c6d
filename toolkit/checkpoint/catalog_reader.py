"""Read tensors from any catalog, and convert damage to errors with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from toolkit.checkpoint.catalog import BLOCK_BYTES, DTYPES, Catalog, DamagedFile
from toolkit.checkpoint.file_reader import VerifiedRecords, numpy_dtype
from toolkit.checkpoint.piece_reader import read_pieces
from toolkit.checkpoint.planner import ReadPlanner, shift_box
from toolkit.checkpoint.shard import Box, Shard, StateReader, TensorInfo, TensorKey, flat_boxes
from toolkit.errors import CheckpointError
from toolkit.paths import Location


class CatalogReader:
    """Implement ``StateReader`` for a catalog. ``step`` is None if the source has no step (published
    weights).
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        namespace: str,
        step: int | None,
        damage_error: Callable[[Location, DamagedFile], CheckpointError],
    ) -> None:
        self.path, self.namespace, self.step = catalog.folder, namespace, step
        self._catalog, self._damage_error = catalog, damage_error
        self._planner, self._checked = ReadPlanner(catalog), VerifiedRecords()

    @property
    def tensors(self) -> Mapping[TensorKey, TensorInfo]:
        return self._catalog.tensors

    @property
    def scalars(self) -> Mapping[str, object]:
        return self._catalog.scalars

    def read(self, shards: Sequence[Shard]) -> None:
        """Fill every shard's ``data``; see ``planner.source_key`` for states that are not stored. After an
        error the shards' content is undefined.
        """
        try:
            reads = self._planner.plan(shards)
            read_pieces(self.path, reads, self._checked)
        except DamagedFile as damage:
            raise self._damage_error(self.path, damage) from damage


def read_windows(
    reader: StateReader,
    key: TensorKey,
    global_shape: tuple[int, ...],
    box: Box,
    dtype: str,
    window_bytes: int = 4 * BLOCK_BYTES,
) -> Iterator[np.ndarray]:
    """Yield the elements of ``box`` in row-major order, cast to ``dtype``, as flat arrays that reuse one
    buffer.
    """
    step = window_bytes // DTYPES[dtype].itemsize
    buffer: Any = np.empty(min(step, box.numel), numpy_dtype(dtype))
    for start in range(0, box.numel, step):
        stop = min(start + step, box.numel)
        shards, at = [], 0
        for inner in flat_boxes(box.shape, start, stop):
            shards.append(
                Shard(
                    key,
                    global_shape,
                    shift_box(inner, box.offset),
                    buffer[at : at + inner.numel].reshape(inner.shape),
                )
            )
            at += inner.numel
        reader.read(shards)
        yield buffer[: stop - start]
