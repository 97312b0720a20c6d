"""What a conversion will do, proven and counted without moving a byte: from the source's catalog and the target alone.

Proven are: every element of every tensor of the source lies in one piece, and in bytes that no other tensor has; the same of the
target's pieces, and of every byte of its files; the source gives every tensor of the target, and what is not used is named.

Large runs cut tensors of one shape alike, so a cut is proven and its reads are counted once, however many tensors have it, and
pieces are looked at one tensor at a time: 405 B parameters on 1,024 ranks take seconds and a few hundred MB. Imports no torch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from toolkit.checkpoint.catalog import BLOCK_BYTES, DTYPES, Catalog, TensorPiece, flat_span, swap_last_dims
from toolkit.checkpoint.offline.fill import plan_units, tile_elements
from toolkit.checkpoint.planner import MAX_PROBLEMS, SpanIndex, find_coverage_errors, shift_box
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, TensorInfo, TensorKey
from toolkit.checkpoint.target import CheckpointTarget, TargetFile
from toolkit.checkpoint.tile_reader import split_into_tiles
from toolkit.errors import CheckpointError, Problem


@dataclass(slots=True, kw_only=True)
class ReshardPlan:
    """Numbers of a conversion.

    Attributes:
        tensors: of the target.
        reads, bytes_read: calls to the system; blocks with hashes are read whole, masters' weights and copies too where values
            are examined.
        writes, bytes_written: of pieces. What files have besides is ``fixed_bytes`` (headers) and ``padding_bytes`` (zeros).
        worker_bytes: memory that one worker takes at most.
        unused: tensors of the source that the target has no use for.
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
        """Lengths of all files."""
        return self.bytes_written + self.fixed_bytes + self.padding_bytes


def plan_reshard(source: Catalog, target: CheckpointTarget, *, examine: bool = True) -> ReshardPlan:
    """Raises CheckpointError that names what is not covered, is covered twice, or cannot be given."""
    units, unused = plan_units(source, target)
    plan = ReshardPlan(tensors=len(target.tensors), unused=unused)
    there = _Described(source.tensors, "source")
    for key in source.tensors:
        plan.source_pieces += there.add(key, source.pieces.get(key, ()))
    there.conclude(str(source.folder), {})
    plan.files_read = len(there.ranges)
    made = _Described(target.tensors, "target")
    for unit in units:
        info = source.tensors[unit.source]
        pieces_of = {key: ([*target.pieces[key]], [*target.copies.get(key, ())]) for key in unit.targets}
        by_columns = any(piece.transposed for pieces, _ in pieces_of.values() for piece in pieces)
        tile = tile_elements(info.dtype, by_columns=by_columns)
        for key, (pieces, copies) in pieces_of.items():
            plan.target_pieces += made.add(key, pieces) + made.add_copies(copies)
            plan.writes += sum(made.writes(key, some, tile, by_columns) for some in (pieces, copies) if some)
            plan.bytes_written += sum(piece.end - piece.begin for piece in (*pieces, *copies))
        looked_at = [unit.source]
        weight = TensorKey(WEIGHT, unit.source.name)
        if examine and unit.source.state == MASTER and weight in source.tensors:
            looked_at.append(weight)
        for key in looked_at:
            reads, numbytes = there.reads(key, tile, by_columns)
            plan.reads += reads
            plan.bytes_read += numbytes
        copied = source.copies.get(unit.source, ()) if examine else ()
        plan.reads += len(copied)
        plan.bytes_read += sum(piece.end - piece.begin for piece in copied)
        dtypes = {target.tensors[key].dtype for key in unit.targets} - {info.dtype}
        casts = sum(DTYPES[dtype].itemsize for dtype in dtypes) / DTYPES[info.dtype].itemsize
        # Tiles and a block, the casts of a tile, and a part of it made contiguous.
        tile_bytes = tile * DTYPES[info.dtype].itemsize
        plan.worker_bytes = max(
            plan.worker_bytes,
            int(tile_bytes * (max(len(looked_at), 2 if copied else 1) + casts + 1)) + BLOCK_BYTES,
        )
    plan.files_written = len(target.files)
    plan.fixed_bytes, plan.padding_bytes = made.conclude(
        "the target", {file.name: file for file in target.files}
    )
    return plan


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a tensor is cut into pieces: the same for all tensors of one shape in most layouts."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    transposed: tuple[bool, ...]
    hashed: bool

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


@dataclass(slots=True, eq=False)
class _Known:
    """A cut that was looked at, kept by identity: thousands of boxes are hashed once a tensor.

    Attributes:
        wrong: why it is not its tensor once; empty where it is.
        numbytes: of each piece.
        counts: reads or writes and their elements, by tile and order of tiles.
    """

    cut: _Cut
    wrong: list[str]
    numbytes: tuple[int, ...]
    counts: dict[tuple[str, int, bool], tuple[int, int]] = field(default_factory=dict)


class _Described:
    """The tensors of one side, as they are added."""

    def __init__(self, tensors: Mapping[TensorKey, TensorInfo], side: str) -> None:
        self._tensors, self._side = tensors, side
        self._wrong: list[str] = []
        self._known: dict[_Cut, _Known] = {}
        self._of_tensor: dict[TensorKey, _Known] = {}
        self.ranges: dict[str, array[int]] = {}  # by file: begin and end of each piece, one after the other

    def add(self, key: TensorKey, pieces: Sequence[TensorPiece]) -> int:
        """Prove that ``pieces`` are ``key``, each element once. Returns how many they are."""
        info = self._tensors[key]
        known = self._of_tensor[key] = self._look_up(key, pieces)
        if known.wrong:
            if len(self._wrong) < MAX_PROBLEMS:
                self._wrong += (
                    find_coverage_errors({key: pieces}) if pieces else [f"{key}: no piece has any of it"]
                )
            return len(pieces)
        differing = next(
            (piece for piece in pieces if piece.dtype != info.dtype or piece.global_shape != info.shape), None
        )
        if differing is not None:
            self._wrong.append(
                f"{key} is {info.dtype} {info.shape} and {differing.dtype} {differing.global_shape} in {differing.file}"
            )
        self._lie(pieces, known.numbytes)
        return len(pieces)

    def add_copies(self, pieces: Sequence[TensorPiece]) -> int:
        """What is written a second time: only its place is proven."""
        self._lie(pieces, [piece.box.numel * piece.itemsize for piece in pieces])
        return len(pieces)

    def _look_up(self, key: TensorKey, pieces: Sequence[TensorPiece]) -> _Known:
        info = self._tensors[key]
        cut = _cut(info, pieces)
        known = self._known.get(cut)
        if known is None:
            wrong = find_coverage_errors({key: pieces}) if pieces else ["none"] * (math.prod(info.shape) > 0)
            known = self._known[cut] = _Known(
                cut, wrong, tuple(box.numel * cut.itemsize for box in cut.boxes)
            )
        return known

    def _lie(self, pieces: Sequence[TensorPiece], numbytes: Sequence[int]) -> None:
        """Record in which bytes they lie."""
        ranges = self.ranges
        for piece, length in zip(pieces, numbytes, strict=True):
            file, begin, end = piece.file, piece.begin, piece.end
            if end - begin != length:
                self._wrong.append(f"{piece.key}: {end - begin} bytes of {file} for {piece.box}")
            if file not in ranges:
                ranges[file] = array("q")
            ranges[file].extend((begin, end))

    def conclude(self, name: str, files: Mapping[str, TargetFile]) -> tuple[int, int]:
        """Prove that no byte is two pieces'. Returns fixed and padding bytes of ``files``, those of a target.

        Raises:
            CheckpointError: with what was wrong of any tensor or file so far.
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
                self._wrong.append(f"{file} has pieces and is no file of {name}")
            found = found[found[:, 1] > found[:, 0]]
            found = found[np.argsort(found[:, 0], kind="stable")]
            twice = np.flatnonzero(found[1:, 0] < found[:-1, 1])
            if len(twice):
                self._wrong.append(f"byte {int(found[twice[0] + 1, 0])} of {file} belongs to two pieces")
            if described is not None:
                if len(found) and (found[-1, 1] > described.numbytes or found[0, 0] < 0):
                    self._wrong.append(f"a piece lies outside the {described.numbytes} bytes of {file}")
                padding += described.numbytes - int((found[:, 1] - found[:, 0]).sum())
        if self._wrong:
            raise CheckpointError(
                *(
                    Problem(
                        self._side,
                        f"{name}: {sentence}",
                        "each element of each tensor lies in one place",
                        "bring all files of the checkpoint together, or report this: it is a defect of the format's reader or writer",
                    )
                    for sentence in self._wrong[:MAX_PROBLEMS]
                )
            )
        return fixed, padding

    def reads(self, key: TensorKey, tile: int, by_columns: bool) -> tuple[int, int]:
        """Reads, and their bytes, that take ``key`` in tiles of ``tile`` elements."""
        known = self._of_tensor[key]
        reads, elements = _counted(known, "reads", tile, by_columns, _count_reads)
        return reads, elements * known.cut.itemsize

    def writes(self, key: TensorKey, pieces: Sequence[TensorPiece], tile: int, by_columns: bool) -> int:
        """Writes of ``pieces``, which are ``key`` or copies of it, from tiles of ``tile`` elements."""
        return _counted(self._look_up(key, pieces), "writes", tile, by_columns, _count_writes)[0]


def _counted(
    known: _Known, what: str, tile: int, by_columns: bool, count: Callable[[_Cut, int, bool], tuple[int, int]]
) -> tuple[int, int]:
    if (what, tile, by_columns) not in known.counts:
        known.counts[what, tile, by_columns] = count(known.cut, tile, by_columns)
    return known.counts[what, tile, by_columns]


def _cut(info: TensorInfo, pieces: Sequence[TensorPiece]) -> _Cut:
    return _Cut(
        info.shape,
        info.dtype,
        tuple([piece.box for piece in pieces]),
        tuple([piece.transposed for piece in pieces]),
        bool(pieces and pieces[0].hashes),
    )


def _meetings(cut: _Cut, tile: int, by_columns: bool) -> Iterator[tuple[int, Box]]:
    """(Number of a piece, what it has of a tile), tile by tile."""
    index = SpanIndex(
        (*flat_span(cut.shape, box), number) for number, box in enumerate(cut.boxes) if box.numel
    )
    for one in split_into_tiles(cut.shape, tile, by_columns=by_columns):
        for number in index.overlapping(*flat_span(cut.shape, one)):
            common = cut.boxes[number].intersect(one)
            if common is not None:
                yield number, common


def _count_writes(cut: _Cut, tile: int, by_columns: bool) -> tuple[int, int]:
    """One for each part of a piece that a tile has."""
    found = [common.numel for _, common in _meetings(cut, tile, by_columns)]
    return len(found), sum(found)


def _count_reads(cut: _Cut, tile: int, by_columns: bool) -> tuple[int, int]:
    """As ``executor.read_piece`` makes them: by blocks of the piece. Where tiles do not come in the order of its file these are whole if
    they have hashes, and read once if the next tile begins in the same one."""
    per_block = BLOCK_BYTES // cut.itemsize
    reads = elements = 0
    kept: tuple[int, int] | None = None
    for number, common in _meetings(cut, tile, by_columns):
        box = cut.boxes[number]
        local, shape = shift_box(common, [-offset for offset in box.offset]), box.shape
        if cut.transposed[number]:
            local, shape = (
                Box(swap_last_dims(local.offset), swap_last_dims(local.shape)),
                swap_last_dims(shape),
            )
        low, high = flat_span(shape, local)
        for block in range(low // per_block, -(-high // per_block)):
            start, stop = block * per_block, min((block + 1) * per_block, box.numel)
            whole = cut.hashed and cut.transposed[number] != by_columns
            if whole and kept == (number, block):
                continue
            kept = (number, block) if whole else None
            reads += 1
            elements += stop - start if whole else min(stop, high) - max(start, low)
    return reads, elements
