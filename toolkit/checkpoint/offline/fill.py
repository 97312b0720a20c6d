"""Filling what is made of one tensor: read in tiles, looked at, cast, written, hashed. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.checkpoint.blocks import (
    BlockBuffer,
    CheckpointFiles,
    SequentialVerifier,
    box_slices,
    numpy_dtype,
)
from toolkit.checkpoint.catalog import DTYPES, Catalog, TensorPiece, byte_length, flat_span
from toolkit.checkpoint.executor import read_piece
from toolkit.checkpoint.offline.output import PieceWriter, Segment, TargetOutput, as_bytes
from toolkit.checkpoint.planner import (
    PieceRead,
    ReadPlanner,
    SpanIndex,
    build_span_index,
    check_available,
    find_coverage_errors,
    shift_box,
    source_key,
)
from toolkit.checkpoint.planner import ReadTarget as Wanted
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, Shard, TensorKey
from toolkit.checkpoint.target import CheckpointTarget
from toolkit.checkpoint.tile_reader import element_offset, split_into_tiles
from toolkit.checkpoint.value_checks import MASTER_RULE, differs_from_cast, find_value_faults
from toolkit.errors import CheckpointError, Problem

TILE_BYTES = 4 * 2**20  # less than a block: it stays in the processor's cache from reading to writing
TURNED_TILES = (
    4  # times as much by columns: each such tile passes over all rows of a source that has them in order
)


def tile_elements(dtype: str, *, by_columns: bool) -> int:
    """The most of a tensor that is in memory at once."""
    return TILE_BYTES * (TURNED_TILES if by_columns else 1) // DTYPES[dtype].itemsize


@dataclass(frozen=True, slots=True)
class ConversionUnit:
    """One tensor of the source, and the tensors of the target that are made of it."""

    source: TensorKey
    targets: tuple[TensorKey, ...]

    def pieces(self, target: CheckpointTarget) -> list[TensorPiece]:
        return [piece for key in self.targets for piece in (*target.pieces[key], *target.copies.get(key, ()))]


def plan_units(source: Catalog, target: CheckpointTarget) -> tuple[list[ConversionUnit], list[TensorKey]]:
    """What to do, in the order of the source's tensors, and which tensors of the source nothing is made of.

    Raises:
        CheckpointError: the target has tensors that the source cannot give.
    """
    check_available(source, [(key, info.dtype, info.shape) for key, info in target.tensors.items()])
    wanted: dict[TensorKey, list[TensorKey]] = {}
    for key, info in target.tensors.items():
        found = source_key(key, info.dtype, source.tensors)
        assert found is not None
        wanted.setdefault(found, []).append(key)
    return [ConversionUnit(key, tuple(wanted[key])) for key in source.tensors if key in wanted], [
        key for key in source.tensors if key not in wanted
    ]


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """A piece that is written: the hash of each of its blocks, and its checksum where its file asks for one."""

    hashes: tuple[str, ...]
    segments: tuple[Segment, ...]


class UnitWriter:
    """Fills units, from several threads. Each takes two tiles and a block, and more where dtypes are cast.

    Args:
        examine: refuse values that no sound run has: not finite, negative averages of squares, weights that are not their masters
            cast, copies that differ.
        advance: told of the bytes of source tensors that are done, one call at a time.
    """

    def __init__(
        self, source: Catalog, target: CheckpointTarget, *, examine: bool, advance: Callable[[int], None]
    ) -> None:
        self._source, self._target, self._examine, self._advance = source, target, examine, advance
        self._planner = ReadPlanner(source)
        self._rooms = threading.local()
        self._telling = threading.Lock()

    def numbytes(self, unit: ConversionUnit) -> int:
        """What ``advance`` is told of a unit."""
        info = self._source.tensors[unit.source]
        return byte_length(info.dtype, info.shape)

    def fill(self, unit: ConversionUnit, files: CheckpointFiles, output: TargetOutput) -> list[WrittenPiece]:
        """Write every piece of ``unit``, in the order of ``unit.pieces``.

        Raises:
            Damage, CheckpointError: the source is not what it was, or not what it can be.
        """
        info, pieces = self._source.tensors[unit.source], unit.pieces(self._target)
        wrong = find_coverage_errors({key: self._target.pieces[key] for key in unit.targets})
        assert not wrong, f"a target that is not whole: {'; '.join(wrong)}"
        by_columns = any(piece.transposed for piece in pieces)
        assert not by_columns or all(piece.transposed for piece in pieces), (
            f"{unit.source}: a target has it both ways"
        )
        index, writers = build_span_index(pieces), {id(piece): PieceWriter(piece, output) for piece in pieces}
        copies, check = (
            build_span_index(self._source.copies.get(unit.source, ())),
            SequentialVerifier(by_columns=by_columns),
        )
        for tile in split_into_tiles(
            info.shape, tile_elements(info.dtype, by_columns=by_columns), by_columns=by_columns
        ):
            values = self._read(unit.source, tile, files, check, "tile")
            if self._examine:
                self._look_at(unit.source, tile, values, files, check)
                self._compare(unit.source, copies, tile, values, files, check)
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
            with self._telling:
                self._advance(values.nbytes)
        check.finish()
        for writer in writers.values():
            writer.finish()
        return [WrittenPiece(tuple(writer.hashes), tuple(writer.segments)) for writer in writers.values()]

    def skip(self, unit: ConversionUnit) -> None:
        """It was filled before."""
        with self._telling:
            self._advance(self.numbytes(unit))

    def _cast(self, key: TensorKey, values: Any, dtype: str) -> Any:
        with np.errstate(over="ignore"):
            found = values.astype(numpy_dtype(dtype))
        if self._examine and not np.isfinite(found).all():
            raise CheckpointError(
                Problem(
                    "target.precision",
                    f"{key} of {self._source.folder} has values that {dtype} cannot hold",
                    "weights keep their values, rounded",
                    "write target.precision=bf16",
                )
            )
        return found

    def _read(
        self, key: TensorKey, tile: Box, files: CheckpointFiles, check: SequentialVerifier, use: str
    ) -> Any:
        info = self._source.tensors[key]
        values = self._room(use, info.dtype, tile)
        for read in self._planner.plan([Shard(key, info.shape, tile, values)]):
            read_piece(read, files, self._block(), check)
        return values

    def _room(self, use: str, dtype: str, box: Box) -> Any:
        """Where this thread has a tile, or a part of one."""
        numbytes = byte_length(dtype, box.shape)
        room = getattr(self._rooms, use, None)
        if room is None or room.nbytes < numbytes:
            room = np.empty(max(numbytes, TILE_BYTES), np.uint8)
            setattr(self._rooms, use, room)
        return room[:numbytes].view(numpy_dtype(dtype)).reshape(box.shape)

    def _block(self) -> BlockBuffer:
        if not hasattr(self._rooms, "block"):
            self._rooms.block = BlockBuffer()
        found: BlockBuffer = self._rooms.block
        return found

    def _look_at(
        self, key: TensorKey, tile: Box, values: Any, files: CheckpointFiles, check: SequentialVerifier
    ) -> None:
        """Raises CheckpointError for values that no sound run has."""
        folder = self._source.folder
        for seen, rule in find_value_faults(key.state, values):
            raise _refused(folder, f"{key}: {seen}", rule)
        weight = TensorKey(WEIGHT, key.name)
        if key.state != MASTER or weight not in self._source.tensors:
            return
        stored = self._read(weight, tile, files, check, "second")
        differing = int(np.count_nonzero(differs_from_cast(values, stored)))
        if differing:
            raise _refused(
                folder,
                f"{weight}: {differing} of {tile.numel} values at {tile.offset} are not their master weights, cast to "
                f"{stored.dtype}",
                MASTER_RULE,
            )

    def _compare(
        self,
        key: TensorKey,
        copies: SpanIndex[TensorPiece],
        tile: Box,
        values: Any,
        files: CheckpointFiles,
        check: SequentialVerifier,
    ) -> None:
        """Raises CheckpointError: what is stored a second time is not the same."""
        for copy in copies.overlapping(*flat_span(self._source.tensors[key].shape, tile)):
            common = copy.box.intersect(tile)
            if common is None:
                continue
            other = self._room("second", copy.dtype, common)
            read_piece(
                PieceRead(copy, (Wanted(Shard(key, copy.global_shape, common, other), common),)),
                files,
                self._block(),
                check,
            )
            differing = int(
                np.count_nonzero(
                    values[box_slices(shift_box(common, [-offset for offset in tile.offset]))] != other
                )
            )
            if differing:
                raise _refused(
                    self._source.folder,
                    f"{key}: {differing} of {common.numel} values at {common.offset} are others in "
                    f"{copy.file}",
                    "what is stored twice is the same",
                )


def _refused(folder: Path, seen: str, rule: str) -> CheckpointError:
    remedy = (
        "take a checkpoint from before; action=verify looks at all of it; examine=false converts it as it is"
    )
    return CheckpointError(Problem("source", f"{folder} is corrupt: {seen}", rule, remedy))
