"""Plan writes and reads without touching a byte: which boxes a rank writes, whether tensors are complete,
which bytes a rank reads.

Imports no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Generic, TypeVar

import xxhash

from toolkit.checkpoint.catalog import DTYPES, Catalog, TensorPiece, flat_span
from toolkit.checkpoint.shard import MASTER, WEIGHT, Box, Shard, TensorInfo, TensorKey, flat_boxes
from toolkit.errors import CheckpointError, Problem

# A replicated box below this size is written by one rank: splitting it would add more pieces than it saves
# time.
SPLIT_BYTES = 4 * 2**20
MAX_PROBLEMS = 8  # of one kind that are reported
CACHED_INDEXES = (
    32  # of tensors, which are read one after the other, by a few threads; of 1,024 ranks one takes 0.3 MB
)


# ---- writing


def boxes_to_write(shard: Shard) -> list[Box]:
    """Return the boxes of ``shard``, in global coordinates, that this rank writes. Its replicas write the
    rest.

    A large box is split into one flat range per replica, along whole rows if there are enough. A small box is
    written by the replica that a hash of its name selects, so that small tensors spread over the ranks.
    """
    box, replicas = shard.box, shard.replicas
    if shard.mirror or (box.numel == 0 and math.prod(shard.global_shape) > 0):
        return []
    if replicas == 1:
        return [box]
    if box.numel * shard.data.element_size() < SPLIT_BYTES:
        chosen = xxhash.xxh3_64_intdigest(f"{shard.key}@{box.offset}".encode()) % replicas
        return [box] if chosen == shard.replica else []
    rows = box.shape[0]
    unit = box.numel // rows if rows >= replicas else 1
    units = box.numel // unit
    start, stop = (units * number // replicas * unit for number in (shard.replica, shard.replica + 1))
    return [shift_box(part, box.offset) for part in flat_boxes(box.shape, start, stop)]


def shift_box(box: Box, by: Sequence[int]) -> Box:
    """Return ``box`` moved by the given offsets."""
    return Box(tuple(a + b for a, b in zip(box.offset, by, strict=True)), box.shape)


def find_coverage_errors(pieces: Mapping[TensorKey, Sequence[TensorPiece]]) -> list[str]:
    """Return sentences that explain why the pieces do not cover each tensor exactly once; an empty list if
    they do.

    If no two boxes of a tensor overlap and their sizes add up to the tensor's, every element is covered
    exactly once.
    """
    errors = []
    for key, same_key in pieces.items():
        first = same_key[0]
        differing = next(
            (
                piece
                for piece in same_key
                if (piece.dtype, piece.global_shape) != (first.dtype, first.global_shape)
            ),
            None,
        )
        if differing is not None:
            errors.append(
                f"{key} is {first.dtype} {first.global_shape} in {first.file} and {differing.dtype} "
                f"{differing.global_shape} in {differing.file}"
            )
            continue
        if any(
            o < 0 or o + s > size
            for p in same_key
            for o, s, size in zip(p.box.offset, p.box.shape, p.global_shape, strict=True)
        ):
            errors.append(f"{key} has a piece outside its shape {first.global_shape}")
            continue
        covered, whole = sum(piece.box.numel for piece in same_key), math.prod(first.global_shape)
        overlapping = _find_overlap(same_key)
        if overlapping is not None:
            errors.append(
                f"{key}: {overlapping[0].file} and {overlapping[1].file} both contain "
                f"{overlapping[0].box.intersect(overlapping[1].box)}"
            )
        elif covered != whole:
            errors.append(f"{key}: {covered} of {whole} elements are stored")
    return errors


def _find_overlap(pieces: Sequence[TensorPiece]) -> tuple[TensorPiece, TensorPiece] | None:
    """Return two pieces that share an element. Only pieces whose flat spans overlap are compared."""
    spans = sorted(
        ((*flat_span(p.global_shape, p.box), p) for p in pieces if p.box.numel), key=lambda span: span[:2]
    )
    open_spans: list[tuple[int, TensorPiece]] = []
    for first, end, piece in spans:
        open_spans = [(other_end, other) for other_end, other in open_spans if other_end > first]
        for _, other in open_spans:
            if piece.box.intersect(other.box) is not None:
                return other, piece
        open_spans.append((end, piece))
    return None


# ---- reading

T = TypeVar("T")


class SpanIndex(Generic[T]):
    """Half-open intervals, searchable for those that overlap a given interval in O(log n + candidates)."""

    def __init__(self, spans: Iterable[tuple[int, int, T]]) -> None:
        self._spans = sorted(spans, key=lambda span: span[:2])
        self._starts = [start for start, _, _ in self._spans]
        # The running maximum of the ends never decreases, so it can be bisected although the ends are not
        # sorted.
        self._furthest = list(accumulate((end for _, end, _ in self._spans), max))

    def overlapping(self, start: int, end: int) -> list[T]:
        low, high = bisect_right(self._furthest, start), bisect_left(self._starts, end)
        return [value for _, stop, value in self._spans[low:high] if stop > start]


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """The part ``overlap`` (global coordinates) of a piece, to be copied to the same coordinates of
    ``shard``.
    """

    shard: Shard
    overlap: Box


@dataclass(frozen=True, slots=True)
class PieceRead:
    """One piece and all shards that need a part of it, so that its bytes are read and verified once."""

    piece: TensorPiece
    targets: tuple[ReadTarget, ...]


def source_key(key: TensorKey, dtype: str, tensors: Mapping[TensorKey, TensorInfo]) -> TensorKey | None:
    """Return the stored tensor that answers a request for ``key`` in ``dtype``, or None. Only this function
    decides it.

    * A master that is not stored is read from the weight: exact if the weight is fp32 (the weight is the
    master then), otherwise cast up.
    * A weight that is not stored is cast from the master.
    * A weight that is stored in another dtype than requested is read from the master if there is one: a bf16
    run that resumes in fp32 or fp16 loses nothing.
    * Other states (moments) have no substitute.
    """
    if key.state == MASTER and key not in tensors:
        key = TensorKey(WEIGHT, key.name)
    elif key.state == WEIGHT:
        master = TensorKey(MASTER, key.name)
        if master in tensors and (key not in tensors or tensors[key].dtype != dtype):
            key = master
    return key if key in tensors else None


class ReadPlanner:
    """Plan reads from one catalog. The indexes of the most recent tensors are cached."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._index = lru_cache(maxsize=CACHED_INDEXES)(self._make_index)

    def plan(self, shards: Sequence[Shard]) -> list[PieceRead]:
        """Return the reads in the order of the files' bytes. Raises CheckpointError naming every absent or
        mismatched tensor.
        """
        check_available(self._catalog, [(shard.key, _dtype(shard), shard.global_shape) for shard in shards])
        targets: dict[tuple[str, int, TensorKey], list[ReadTarget]] = {}
        pieces: dict[tuple[str, int, TensorKey], TensorPiece] = {}
        for shard in shards:
            if shard.box.numel == 0:
                continue
            key = source_key(shard.key, _dtype(shard), self._catalog.tensors)
            assert key is not None
            covered = 0
            for piece in self._index(key).overlapping(*flat_span(shard.global_shape, shard.box)):
                overlap = piece.box.intersect(shard.box)
                if overlap is not None:
                    position = (piece.file, piece.begin, key)
                    pieces[position] = piece
                    targets.setdefault(position, []).append(ReadTarget(shard, overlap))
                    covered += overlap.numel
            assert covered == shard.box.numel, (
                f"{key}: {covered} of {shard.box.numel} elements found in a catalog that covers its tensors"
            )
        return [PieceRead(pieces[position], tuple(targets[position])) for position in sorted(targets)]

    def _make_index(self, key: TensorKey) -> SpanIndex[TensorPiece]:
        return build_span_index(self._catalog.pieces[key])


def build_span_index(pieces: Iterable[TensorPiece]) -> SpanIndex[TensorPiece]:
    """Index the pieces of one tensor by their flat ranges."""
    return SpanIndex(
        (*flat_span(piece.global_shape, piece.box), piece) for piece in pieces if piece.box.numel
    )


def check_available(catalog: Catalog, requested: Iterable[tuple[TensorKey, str, tuple[int, ...]]]) -> None:
    """Check that ``catalog`` can provide tensors of (key, dtype, global shape).

    Raises:
        CheckpointError: Names every tensor that is absent or has another shape.
    """
    tensors, folder = catalog.tensors, catalog.folder
    absent: dict[TensorKey, None] = {}
    shapes: dict[TensorKey, Problem] = {}
    for requested_key, dtype, global_shape in requested:
        key = source_key(requested_key, dtype, tensors)
        if key is None:
            absent[requested_key] = None
        elif DTYPES[tensors[key].dtype].is_float != DTYPES[dtype].is_float:
            shapes[requested_key] = Problem(
                "resume",
                f"{requested_key} is {tensors[key].dtype} in {folder} and {dtype} in the requested model",
                "integers are not converted to floating point, nor floating point to integers",
                "use another checkpoint, or start without it",
            )
        elif tensors[key].shape != global_shape:
            shapes[requested_key] = Problem(
                "resume",
                f"{requested_key} has shape {tensors[key].shape} in {folder} and {global_shape} in the "
                "requested model",
                "the model must have the shapes of the checkpoint",
                "set the model's sizes to the checkpoint's, or start without it",
            )
    problems = list(shapes.values())[:MAX_PROBLEMS]
    for state in dict.fromkeys(key.state for key in absent):
        problems.append(_absence_problem(state, [key.name for key in absent if key.state == state], catalog))
    if problems:
        raise CheckpointError(*problems)


def _absence_problem(state: str, names: list[str], catalog: Catalog) -> Problem:
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    states = sorted({key.state for key in catalog.tensors})
    if state in states or state in (WEIGHT, MASTER):
        return Problem(
            "resume",
            f"{catalog.folder} has no {state} of {listed}",
            "a checkpoint must have every tensor of the model",
            "set the model options to those of the checkpoint, or start without it",
        )
    return Problem(
        "resume",
        f"{catalog.folder} has no {state} of {listed} (its states: {', '.join(states)})",
        "an optimizer continues from its own state",
        "use the optimizer that saved it, or load the weights only: model.pretrained=PATH of an exported "
        "folder",
    )


def _dtype(shard: Shard) -> str:
    return str(shard.data.dtype).removeprefix("torch.")
