"""Write the target tensors derived from one source tensor: read tiles, examine, cast, write and hash them.
Imports no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.checkpoint.catalog import DTYPES, Catalog, TensorPiece, byte_length, flat_span
from toolkit.checkpoint.file_reader import (
    BlockBuffer,
    CheckpointFiles,
    SequentialVerifier,
    box_slices,
    numpy_dtype,
)
from toolkit.checkpoint.offline.output import PieceWriter, Segment, TargetOutput, as_bytes
from toolkit.checkpoint.piece_reader import read_piece
from toolkit.checkpoint.planner import (
    PieceRead,
    ReadPlanner,
    ReadTarget,
    SpanIndex,
    build_span_index,
    check_available,
    find_coverage_errors,
    shift_box,
    source_key,
)
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, Shard, TensorKey
from toolkit.checkpoint.target import CheckpointTarget
from toolkit.checkpoint.tile_reader import element_offset, split_into_tiles
from toolkit.checkpoint.value_checks import MASTER_RULE, differs_from_cast, find_value_faults
from toolkit.errors import CheckpointError, Problem
from toolkit.paths import Location

# smaller than a block, so that a tile stays in the processor's cache from reading to writing
TILE_BYTES = 4 * 2**20
COLUMN_TILE_FACTOR = 4  # larger tiles by columns, because each passes over all rows of a source in row order


def tile_elements(dtype: str, *, by_columns: bool) -> int:
    """Return the maximum number of elements of a tensor that are in memory at once."""
    return TILE_BYTES * (COLUMN_TILE_FACTOR if by_columns else 1) // DTYPES[dtype].itemsize


@dataclass(frozen=True, slots=True)
class ConversionUnit:
    """One source tensor, and the target tensors derived from it."""

    source: TensorKey
    targets: tuple[TensorKey, ...]

    def pieces(self, target: CheckpointTarget) -> list[TensorPiece]:
        return [piece for key in self.targets for piece in (*target.pieces[key], *target.copies.get(key, ()))]


def plan_units(source: Catalog, target: CheckpointTarget) -> tuple[list[ConversionUnit], list[TensorKey]]:
    """Return the units in the order of the source's tensors, and the source tensors that are not used.

    Raises:
        CheckpointError: The target has tensors that the source cannot provide.
    """
    check_available(source, [(key, info.dtype, info.shape) for key, info in target.tensors.items()])
    targets_of: dict[TensorKey, list[TensorKey]] = {}
    for key, info in target.tensors.items():
        found = source_key(key, info.dtype, source.tensors)
        assert found is not None
        targets_of.setdefault(found, []).append(key)
    return [ConversionUnit(key, tuple(targets_of[key])) for key in source.tensors if key in targets_of], [
        key for key in source.tensors if key not in targets_of
    ]


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """The hash of each block of a written piece, and checksums if its file needs them."""

    hashes: tuple[str, ...]
    segments: tuple[Segment, ...]


class UnitWriter:
    """Write units from several threads. Each thread needs two tiles and a block, and more if dtypes are cast.

    Args:
        source: Catalog to read.
        target: Description of what to write.
        examine: Reject values that no correct run has: not finite, negative second moments, weights that are
            not their masters cast, copies that differ.
        advance: Called with the bytes of finished source tensors, by one thread at a time.
    """

    def __init__(
        self, source: Catalog, target: CheckpointTarget, *, examine: bool, advance: Callable[[int], None]
    ) -> None:
        self._source, self._target, self._examine, self._advance = source, target, examine, advance
        self._planner = ReadPlanner(source)
        self._buffers = threading.local()
        self._reporting = threading.Lock()

    def source_bytes(self, unit: ConversionUnit) -> int:
        """Return the bytes reported to ``advance`` for a unit."""
        info = self._source.tensors[unit.source]
        return byte_length(info.dtype, info.shape)

    def write(self, unit: ConversionUnit, files: CheckpointFiles, output: TargetOutput) -> list[WrittenPiece]:
        """Write every piece of ``unit``, in the order of ``unit.pieces``.

        Raises:
            DamagedFile, CheckpointError: The source is damaged or implausible.
        """
        info, pieces = self._source.tensors[unit.source], unit.pieces(self._target)
        wrong = find_coverage_errors({key: self._target.pieces[key] for key in unit.targets})
        assert not wrong, f"a target that is not complete: {'; '.join(wrong)}"
        by_columns = any(piece.transposed for piece in pieces)
        assert not by_columns or all(piece.transposed for piece in pieces), (
            f"{unit.source}: a target has transposed and other pieces"
        )
        index, writers = build_span_index(pieces), {id(piece): PieceWriter(piece, output) for piece in pieces}
        copies, verifier = (
            build_span_index(self._source.copies.get(unit.source, ())),
            SequentialVerifier(by_columns=by_columns),
        )
        for tile in split_into_tiles(
            info.shape, tile_elements(info.dtype, by_columns=by_columns), by_columns=by_columns
        ):
            values = self._read(unit.source, tile, files, verifier, "tile")
            if self._examine:
                self._examine_values(unit.source, tile, values, files, verifier)
                self._compare_copies(unit.source, copies, tile, values, files, verifier)
            casts: dict[str, Any] = {info.dtype: values}
            for piece in index.overlapping(*flat_span(info.shape, tile)):
                common = piece.box.intersect(tile)
                if common is None:
                    continue
                if piece.dtype not in casts:
                    casts[piece.dtype] = self._cast(unit.source, values, piece.dtype)
                part = casts[piece.dtype][box_slices(shift_box(common, [-offset for offset in tile.offset]))]
                part = np.ascontiguousarray(part.swapaxes(-1, -2) if piece.transposed else part)
                begin = (
                    piece.begin
                    + element_offset(piece.box, common, transposed=piece.transposed) * piece.itemsize
                )
                writers[id(piece)].write(begin, as_bytes(part))
            with self._reporting:
                self._advance(values.nbytes)
        verifier.finish()
        for writer in writers.values():
            writer.finish()
        return [WrittenPiece(tuple(writer.hashes), tuple(writer.segments)) for writer in writers.values()]

    def skip(self, unit: ConversionUnit) -> None:
        """Report a unit that an earlier attempt wrote."""
        with self._reporting:
            self._advance(self.source_bytes(unit))

    def _cast(self, key: TensorKey, values: Any, dtype: str) -> Any:
        with np.errstate(over="ignore"):
            cast = values.astype(numpy_dtype(dtype))
        if self._examine and not np.isfinite(cast).all():
            raise CheckpointError(
                Problem(
                    "target.precision",
                    f"{key} of {self._source.folder} has values that {dtype} cannot represent",
                    "weights keep their values except for rounding",
                    "write target.precision=bf16",
                )
            )
        return cast

    def _read(
        self, key: TensorKey, tile: Box, files: CheckpointFiles, verifier: SequentialVerifier, use: str
    ) -> Any:
        info = self._source.tensors[key]
        values = self._buffer(use, info.dtype, tile)
        for read in self._planner.plan([Shard(key, info.shape, tile, values)]):
            read_piece(read, files, self._block(), verifier)
        return values

    def _buffer(self, use: str, dtype: str, box: Box) -> Any:
        """Return this thread's memory for a tile or a part of one."""
        numbytes = byte_length(dtype, box.shape)
        buffer = getattr(self._buffers, use, None)
        if buffer is None or buffer.nbytes < numbytes:
            buffer = np.empty(max(numbytes, TILE_BYTES), np.uint8)
            setattr(self._buffers, use, buffer)
        return buffer[:numbytes].view(numpy_dtype(dtype)).reshape(box.shape)

    def _block(self) -> BlockBuffer:
        if not hasattr(self._buffers, "block"):
            self._buffers.block = BlockBuffer()
        block: BlockBuffer = self._buffers.block
        return block

    def _examine_values(
        self, key: TensorKey, tile: Box, values: Any, files: CheckpointFiles, verifier: SequentialVerifier
    ) -> None:
        """Raise CheckpointError for values that no correct run has."""
        folder = self._source.folder
        for seen, rule in find_value_faults(key.state, values):
            raise _corrupt_error(folder, f"{key}: {seen}", rule)
        weight = TensorKey(WEIGHT, key.name)
        if key.state != MASTER or weight not in self._source.tensors:
            return
        stored = self._read(weight, tile, files, verifier, "second")
        differing = int(np.count_nonzero(differs_from_cast(values, stored)))
        if differing:
            raise _corrupt_error(
                folder,
                f"{weight}: {differing} of {tile.numel} values at {tile.offset} are not their master "
                "weights, cast to "
                f"{stored.dtype}",
                MASTER_RULE,
            )

    def _compare_copies(
        self,
        key: TensorKey,
        copies: SpanIndex[TensorPiece],
        tile: Box,
        values: Any,
        files: CheckpointFiles,
        verifier: SequentialVerifier,
    ) -> None:
        """Raise CheckpointError if a copy differs."""
        for copy in copies.overlapping(*flat_span(self._source.tensors[key].shape, tile)):
            common = copy.box.intersect(tile)
            if common is None:
                continue
            other = self._buffer("second", copy.dtype, common)
            read_piece(
                PieceRead(copy, (ReadTarget(Shard(key, copy.global_shape, common, other), common),)),
                files,
                self._block(),
                verifier,
            )
            differing = int(
                np.count_nonzero(
                    values[box_slices(shift_box(common, [-offset for offset in tile.offset]))] != other
                )
            )
            if differing:
                raise _corrupt_error(
                    self._source.folder,
                    f"{key}: {differing} of {common.numel} values at {common.offset} differ in {copy.file}",
                    "copies of a tensor are equal",
                )


def _corrupt_error(folder: Location, seen: str, rule: str) -> CheckpointError:
    remedy = "use an earlier checkpoint; action=verify checks all of it; examine=false converts it unchanged"
    return CheckpointError(Problem("source", f"{folder} is corrupt: {seen}", rule, remedy))
