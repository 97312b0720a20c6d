"""Prove and count what a conversion will do, from the source's catalog and the target alone, without moving a
byte.

It proves that every element of every source tensor is in exactly one piece, whose bytes belong to no other
tensor; the same for the target's pieces and every byte of its files; and that the source provides every
target tensor. Unused source tensors are listed.

Large runs divide tensors of one shape equally, so each division is proven and its reads are counted only
once, and pieces are created for one tensor at a time: 405 B parameters on 1,024 ranks take seconds and a few
hundred MB. Imports no torch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from toolkit.checkpoint.catalog import BLOCK_BYTES, DTYPES, Catalog, TensorPiece, flat_span, swap_last_dims
from toolkit.checkpoint.offline.unit_writer import plan_units, tile_elements
from toolkit.checkpoint.planner import MAX_PROBLEMS, SpanIndex, find_coverage_errors, shift_box
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.target import CheckpointTarget, TargetFile
from toolkit.checkpoint.tile_reader import split_into_tiles
from toolkit.errors import CheckpointError, Problem


@dataclass(slots=True, kw_only=True)
class ReshardPlan:
    """The numbers of a conversion.

    Attributes:
        tensors: Target tensors.
        source_pieces, target_pieces: Number of pieces.
        reads, bytes_read: System calls and bytes. Blocks with hashes are read whole; masters' weights and
            copies are read too if values are examined.
        writes, bytes_written: System calls and bytes of pieces.
        fixed_bytes: Bytes of headers.
        padding_bytes: Zero bytes.
        files_read, files_written: Number of files.
        worker_bytes: Maximum memory of one worker.
        unused: Source tensors that the target does not use.
    """

    tensors: int = 0
    source_pieces: int = 0
    target_pieces: int = 0
    reads: int = 0
    bytes_read: int = 0
    writes: int = 0
    bytes_written: int = 0
    fixed_bytes: int = 0
    padding_bytes: int = 0
    files_read: int = 0
    files_written: int = 0
    worker_bytes: int = 0
    unused: list[TensorKey] = field(default_factory=list)

    @property
    def target_bytes(self) -> int:
        """Total length of all files."""
        return self.bytes_written + self.fixed_bytes + self.padding_bytes


def plan_reshard(source: Catalog, target: CheckpointTarget, *, examine: bool = True) -> ReshardPlan:
    """Plan which bytes are read and written. Raises CheckpointError naming what is not covered, covered twice
    or unavailable.
    """
    units, unused = plan_units(source, target)
    plan = ReshardPlan(tensors=len(target.tensors), unused=unused)
    source_side = _Side(source.tensors, "source")
    for key in source.tensors:
        plan.source_pieces += source_side.add(key, source.pieces.get(key, ()))
    source_side.prove_disjoint(str(source.folder), {})
    plan.files_read = len(source_side.ranges)
    target_side = _Side(target.tensors, "target")
    for unit in units:
        info = source.tensors[unit.source]
        pieces_of = {key: ([*target.pieces[key]], [*target.copies.get(key, ())]) for key in unit.targets}
        by_columns = any(piece.transposed for pieces, _ in pieces_of.values() for piece in pieces)
        tile = tile_elements(info.dtype, by_columns=by_columns)
        for key, (pieces, copies) in pieces_of.items():
            plan.target_pieces += target_side.add(key, pieces) + target_side.add_copies(copies)
            plan.writes += sum(
                target_side.writes(key, group, tile, by_columns) for group in (pieces, copies) if group
            )
            plan.bytes_written += sum(piece.end - piece.begin for piece in (*pieces, *copies))
        examined = [unit.source]
        weight = TensorKey(WEIGHT, unit.source.name)
        if examine and unit.source.state == MASTER and weight in source.tensors:
            examined.append(weight)
        for key in examined:
            reads, numbytes = source_side.reads(key, tile, by_columns)
            plan.reads += reads
            plan.bytes_read += numbytes
        copied = source.copies.get(unit.source, ()) if examine else ()
        plan.reads += len(copied)
        plan.bytes_read += sum(piece.end - piece.begin for piece in copied)
        dtypes = {target.tensors[key].dtype for key in unit.targets} - {info.dtype}
        casts = sum(DTYPES[dtype].itemsize for dtype in dtypes) / DTYPES[info.dtype].itemsize
        # tiles and a block, casts of a tile, and a contiguous copy of a part of it
        tile_bytes = tile * DTYPES[info.dtype].itemsize
        plan.worker_bytes = max(
            plan.worker_bytes,
            int(tile_bytes * (max(len(examined), 2 if copied else 1) + casts + 1)) + BLOCK_BYTES,
        )
    plan.files_written = len(target.files)
    plan.fixed_bytes, plan.padding_bytes = target_side.prove_disjoint(
        "the target", {file.name: file for file in target.files}
    )
    return plan


@dataclass(frozen=True, slots=True)
class _PieceLayout:
    """The boxes of a tensor's pieces and how files store them; equal for most tensors of one shape."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    transposed: tuple[bool, ...]
    hashed: bool

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


@dataclass(slots=True, eq=False)
class _AnalyzedLayout:
    """A layout of pieces and what was computed of it.

    Compared by identity, because hashing thousands of boxes is slow.

    Attributes:
        layout: Boxes and storage of the pieces.
        errors: Why it does not cover its tensor exactly once; empty if it does.
        numbytes: Bytes of each piece.
        counts: Number of reads or writes and their elements, by kind, tile size and tile order.
    """

    layout: _PieceLayout
    errors: list[str]
    numbytes: tuple[int, ...]
    counts: dict[tuple[str, int, bool], tuple[int, int]] = field(default_factory=dict)


class _Side:
    """The tensors of the source or of the target, added one by one."""

    def __init__(self, tensors: Mapping[TensorKey, TensorInfo], side: str) -> None:
        self._tensors, self._side = tensors, side
        self._errors: list[str] = []
        self._layouts: dict[_PieceLayout, _AnalyzedLayout] = {}
        self._of_tensor: dict[TensorKey, _AnalyzedLayout] = {}
        self.ranges: dict[str, array[int]] = {}  # file -> begin and end of each piece, flattened

    def add(self, key: TensorKey, pieces: Sequence[TensorPiece]) -> int:
        """Prove that ``pieces`` cover ``key`` exactly once. Returns their number."""
        info = self._tensors[key]
        analyzed = self._of_tensor[key] = self._analyze(key, pieces)
        if analyzed.errors:
            if len(self._errors) < MAX_PROBLEMS:
                self._errors += (
                    find_coverage_errors({key: pieces}) if pieces else [f"{key}: no piece contains it"]
                )
            return len(pieces)
        differing = next(
            (piece for piece in pieces if piece.dtype != info.dtype or piece.global_shape != info.shape), None
        )
        if differing is not None:
            self._errors.append(
                f"{key} is {info.dtype} {info.shape} and {differing.dtype} {differing.global_shape} in "
                f"{differing.file}"
            )
        self._record_ranges(pieces, analyzed.numbytes)
        return len(pieces)

    def add_copies(self, pieces: Sequence[TensorPiece]) -> int:
        """Record the position of copies."""
        self._record_ranges(pieces, [piece.box.numel * piece.itemsize for piece in pieces])
        return len(pieces)

    def _analyze(self, key: TensorKey, pieces: Sequence[TensorPiece]) -> _AnalyzedLayout:
        info = self._tensors[key]
        layout = _make_layout(info, pieces)
        analyzed = self._layouts.get(layout)
        if analyzed is None:
            errors = find_coverage_errors({key: pieces}) if pieces else ["none"] * (math.prod(info.shape) > 0)
            analyzed = self._layouts[layout] = _AnalyzedLayout(
                layout, errors, tuple(box.numel * layout.itemsize for box in layout.boxes)
            )
        return analyzed

    def _record_ranges(self, pieces: Sequence[TensorPiece], numbytes: Sequence[int]) -> None:
        """Record the bytes of each piece."""
        ranges = self.ranges
        for piece, length in zip(pieces, numbytes, strict=True):
            file, begin, end = piece.file, piece.begin, piece.end
            if end - begin != length:
                self._errors.append(f"{piece.key}: {end - begin} bytes of {file} for {piece.box}")
            if file not in ranges:
                ranges[file] = array("q")
            ranges[file].extend((begin, end))

    def prove_disjoint(self, name: str, files: Mapping[str, TargetFile]) -> tuple[int, int]:
        """Prove that no byte belongs to two pieces. Returns fixed and padding bytes of ``files``, the
        target's files.

        Raises:
            CheckpointError: Lists all errors found so far in tensors and files.
        """
        fixed = padding = 0
        for file in {**dict.fromkeys(self.ranges), **dict.fromkeys(files)}:
            found = np.array(self.ranges.get(file, ()), np.int64).reshape(-1, 2)
            described = files.get(file)
            if described is not None:
                own = np.array(
                    [(at, at + len(content)) for at, content in described.fixed.items()], np.int64
                ).reshape(-1, 2)
                fixed += int((own[:, 1] - own[:, 0]).sum())
                found = np.concatenate([found, own])
            elif files:
                self._errors.append(f"{file} has pieces but is not a file of {name}")
            found = found[found[:, 1] > found[:, 0]]
            found = found[np.argsort(found[:, 0], kind="stable")]
            twice = np.flatnonzero(found[1:, 0] < found[:-1, 1])
            if len(twice):
                self._errors.append(f"byte {int(found[twice[0] + 1, 0])} of {file} belongs to two pieces")
            if described is not None:
                if len(found) and (found[-1, 1] > described.numbytes or found[0, 0] < 0):
                    self._errors.append(f"a piece lies outside the {described.numbytes} bytes of {file}")
                padding += described.numbytes - int((found[:, 1] - found[:, 0]).sum())
        if self._errors:
            raise CheckpointError(
                *(
                    Problem(
                        self._side,
                        f"{name}: {sentence}",
                        "each element of each tensor must be stored exactly once",
                        "collect all files of the checkpoint, or report this as a bug of the format's "
                        "reader or writer",
                    )
                    for sentence in self._errors[:MAX_PROBLEMS]
                )
            )
        return fixed, padding

    def reads(self, key: TensorKey, tile: int, by_columns: bool) -> tuple[int, int]:
        """Return the number and bytes of the reads of ``key`` in tiles of ``tile`` elements."""
        analyzed = self._of_tensor[key]
        reads, elements = _cached_count(analyzed, "reads", tile, by_columns, _count_reads)
        return reads, elements * analyzed.layout.itemsize

    def writes(self, key: TensorKey, pieces: Sequence[TensorPiece], tile: int, by_columns: bool) -> int:
        """Return the number of writes of ``pieces``, which are ``key`` or copies of it, from tiles of
        ``tile`` elements.
        """
        return _cached_count(self._analyze(key, pieces), "writes", tile, by_columns, _count_writes)[0]


def _cached_count(
    analyzed: _AnalyzedLayout,
    kind: str,
    tile: int,
    by_columns: bool,
    count: Callable[[_PieceLayout, int, bool], tuple[int, int]],
) -> tuple[int, int]:
    if (kind, tile, by_columns) not in analyzed.counts:
        analyzed.counts[kind, tile, by_columns] = count(analyzed.layout, tile, by_columns)
    return analyzed.counts[kind, tile, by_columns]


def _make_layout(info: TensorInfo, pieces: Sequence[TensorPiece]) -> _PieceLayout:
    return _PieceLayout(
        info.shape,
        info.dtype,
        tuple([piece.box for piece in pieces]),
        tuple([piece.transposed for piece in pieces]),
        bool(pieces and pieces[0].hashes),
    )


def _intersections(layout: _PieceLayout, tile: int, by_columns: bool) -> Iterator[tuple[int, Box]]:
    """Yield (index of a piece, its intersection with a tile), tile by tile."""
    index = SpanIndex(
        (*flat_span(layout.shape, box), number) for number, box in enumerate(layout.boxes) if box.numel
    )
    for tile_box in split_into_tiles(layout.shape, tile, by_columns=by_columns):
        for number in index.overlapping(*flat_span(layout.shape, tile_box)):
            common = layout.boxes[number].intersect(tile_box)
            if common is not None:
                yield number, common


def _count_writes(layout: _PieceLayout, tile: int, by_columns: bool) -> tuple[int, int]:
    """Count one write for each intersection of a piece and a tile."""
    found = [common.numel for _, common in _intersections(layout, tile, by_columns)]
    return len(found), sum(found)


def _count_reads(layout: _PieceLayout, tile: int, by_columns: bool) -> tuple[int, int]:
    """Count reads as ``piece_reader.read_piece`` performs them, by blocks of the piece.

    If tiles do not follow the order of the file, blocks with hashes are read whole, and only once if the next
    tile begins in the same block.
    """
    per_block = BLOCK_BYTES // layout.itemsize
    reads = elements = 0
    cached: tuple[int, int] | None = None
    for number, common in _intersections(layout, tile, by_columns):
        box = layout.boxes[number]
        local, shape = shift_box(common, [-offset for offset in box.offset]), box.shape
        if layout.transposed[number]:
            local, shape = (
                Box(swap_last_dims(local.offset), swap_last_dims(local.shape)),
                swap_last_dims(shape),
            )
        low, high = flat_span(shape, local)
        for block in range(low // per_block, -(-high // per_block)):
            start, stop = block * per_block, min((block + 1) * per_block, box.numel)
            whole = layout.hashed and layout.transposed[number] != by_columns
            if whole and cached == (number, block):
                continue
            cached = (number, block) if whole else None
            reads += 1
            elements += stop - start if whole else min(stop, high) - max(start, low)
    return reads, elements
