"""Deciding, without touching a byte: what a rank writes, whether a whole came together, which bytes a rank reads.

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

# A replicated box below this size is written by one holder: splitting it would cost more pieces than it saves time.
SPLIT_BYTES = 4 * 2**20
MAX_PROBLEMS = 8  # shown of one kind
CACHED_INDEXES = (
    32  # of tensors, which are read one after the other, by a few threads; of 1,024 ranks one takes 0.3 MB
)


# ---- writing


def boxes_to_write(shard: Shard) -> list[Box]:
    """The part of ``shard.box`` that this holder writes, in global coordinates; its replicas write the rest.

    A large box is cut into as many flat ranges as it has holders, along whole rows where there are enough of them. A
    small one is written by the holder that a hash of its name chooses, so that small tensors spread over the holders.
    """
    box, holders = shard.box, shard.replicas
    if shard.mirror or (box.numel == 0 and math.prod(shard.global_shape) > 0):
        return []
    if holders == 1:
        return [box]
    if box.numel * shard.data.element_size() < SPLIT_BYTES:
        chosen = xxhash.xxh3_64_intdigest(f"{shard.key}@{box.offset}".encode()) % holders
        return [box] if chosen == shard.replica else []
    rows = box.shape[0]
    unit = box.numel // rows if rows >= holders else 1
    units = box.numel // unit
    start, stop = (units * number // holders * unit for number in (shard.replica, shard.replica + 1))
    return [shift_box(part, box.offset) for part in flat_boxes(box.shape, start, stop)]


def shift_box(box: Box, by: Sequence[int]) -> Box:
    return Box(tuple(a + b for a, b in zip(box.offset, by, strict=True)), box.shape)


def find_coverage_errors(pieces: Mapping[TensorKey, Sequence[TensorPiece]]) -> list[str]:
    """Why the pieces are not each tensor exactly once, as sentences; empty if they are.

    No two boxes of a tensor meet and their sizes add up to the tensor's: then every element is covered exactly once.
    """
    wrong = []
    for key, of_key in pieces.items():
        first = of_key[0]
        differing = next(
            (
                piece
                for piece in of_key
                if (piece.dtype, piece.global_shape) != (first.dtype, first.global_shape)
            ),
            None,
        )
        if differing is not None:
            wrong.append(
                f"{key} is {first.dtype} {first.global_shape} in {first.file} and {differing.dtype} "
                f"{differing.global_shape} in {differing.file}"
            )
            continue
        if any(
            o < 0 or o + s > size
            for p in of_key
            for o, s, size in zip(p.box.offset, p.box.shape, p.global_shape, strict=True)
        ):
            wrong.append(f"{key} has a piece outside its shape {first.global_shape}")
            continue
        covered, whole = sum(piece.box.numel for piece in of_key), math.prod(first.global_shape)
        meeting = _meeting(of_key)
        if meeting is not None:
            wrong.append(
                f"{key}: {meeting[0].file} and {meeting[1].file} both hold {meeting[0].box.intersect(meeting[1].box)}"
            )
        elif covered != whole:
            wrong.append(f"{key}: {covered} of {whole} elements are there")
    return wrong


def _meeting(pieces: Sequence[TensorPiece]) -> tuple[TensorPiece, TensorPiece] | None:
    """Two pieces that share an element. Only pieces whose flat spans overlap are compared."""
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
    """Half-open intervals; finds those that meet a given one in O(log n + candidates)."""

    def __init__(self, spans: Iterable[tuple[int, int, T]]) -> None:
        self._spans = sorted(spans, key=lambda span: span[:2])
        self._starts = [start for start, _, _ in self._spans]
        # The furthest end so far never falls, so that it can be bisected although ends are not sorted.
        self._furthest = list(accumulate((end for _, end, _ in self._spans), max))

    def meeting(self, start: int, end: int) -> list[T]:
        low, high = bisect_right(self._furthest, start), bisect_left(self._starts, end)
        return [value for _, stop, value in self._spans[low:high] if stop > start]


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """``overlap`` (global coordinates) of the piece goes to the same place of ``shard``."""

    shard: Shard
    overlap: Box


@dataclass(frozen=True, slots=True)
class PieceRead:
    """One piece and everything that wants a part of it, so that its bytes are read and verified once."""

    piece: TensorPiece
    targets: tuple[ReadTarget, ...]


def source_key(key: TensorKey, dtype: str, tensors: Mapping[TensorKey, TensorInfo]) -> TensorKey | None:
    """Which stored tensor answers a request for ``key`` in ``dtype``; None if there is none. The one place for this policy.

    * A master that is not stored is read from the weight: exact where the weight is fp32 (there it is the master),
      cast up elsewhere.
    * A weight that is not stored is cast from the master, which is what it was made of.
    * A stored weight of another dtype than what is asked is read from the master if there is one: a bf16 run that
      resumes in fp32 or fp16 loses nothing.
    * Anything else (moments) has no substitute.
    """
    if key.state == MASTER and key not in tensors:
        key = TensorKey(WEIGHT, key.name)
    elif key.state == WEIGHT:
        master = TensorKey(MASTER, key.name)
        if master in tensors and (key not in tensors or tensors[key].dtype != dtype):
            key = master
    return key if key in tensors else None


class ReadPlanner:
    """Plans reads from one catalog. Indexes of tensors are built when they are asked for, and the last ones kept."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._index = lru_cache(maxsize=CACHED_INDEXES)(self._make_index)

    def plan(self, shards: Sequence[Shard]) -> list[PieceRead]:
        """In the order of the files' bytes. Raises CheckpointError that names every tensor absent or of another shape."""
        check_available(self._catalog, [(shard.key, _dtype(shard), shard.global_shape) for shard in shards])
        targets: dict[tuple[str, int, TensorKey], list[ReadTarget]] = {}
        pieces: dict[tuple[str, int, TensorKey], TensorPiece] = {}
        for shard in shards:
            if shard.box.numel == 0:
                continue
            key = source_key(shard.key, _dtype(shard), self._catalog.tensors)
            assert key is not None
            found = 0
            for piece in self._index(key).meeting(*flat_span(shard.global_shape, shard.box)):
                overlap = piece.box.intersect(shard.box)
                if overlap is not None:
                    place = (piece.file, piece.begin, key)
                    pieces[place] = piece
                    targets.setdefault(place, []).append(ReadTarget(shard, overlap))
                    found += overlap.numel
            assert found == shard.box.numel, (
                f"{key}: {found} of {shard.box.numel} elements found in a catalog that covers its tensors"
            )
        return [PieceRead(pieces[place], tuple(targets[place])) for place in sorted(targets)]

    def _make_index(self, key: TensorKey) -> SpanIndex[TensorPiece]:
        return build_span_index(self._catalog.pieces[key])


def build_span_index(pieces: Iterable[TensorPiece]) -> SpanIndex[TensorPiece]:
    """Pieces of one tensor, to be found by flat ranges that may meet them."""
    return SpanIndex(
        (*flat_span(piece.global_shape, piece.box), piece) for piece in pieces if piece.box.numel
    )


def check_available(catalog: Catalog, wanted: Iterable[tuple[TensorKey, str, tuple[int, ...]]]) -> None:
    """Whether ``catalog`` can answer for tensors of (key, dtype, global shape).

    Raises:
        CheckpointError: naming every tensor that is absent or of another shape.
    """
    tensors, folder = catalog.tensors, catalog.folder
    absent: dict[TensorKey, None] = {}
    shapes: dict[TensorKey, Problem] = {}
    for asked, dtype, global_shape in wanted:
        key = source_key(asked, dtype, tensors)
        if key is None:
            absent[asked] = None
        elif DTYPES[tensors[key].dtype].is_float != DTYPES[dtype].is_float:
            shapes[asked] = Problem(
                "resume",
                f"{asked} is {tensors[key].dtype} in {folder} and {dtype} in the model that is asked for",
                "integers are not read into floating-point tensors, nor these into integers",
                "take another checkpoint, or start without it",
            )
        elif tensors[key].shape != global_shape:
            shapes[asked] = Problem(
                "resume",
                f"{asked} has shape {tensors[key].shape} in {folder} and {global_shape} in the model that is asked for",
                "a checkpoint has the shapes of the model that it is of",
                "give the model the checkpoint's sizes, or start without it",
            )
    problems = list(shapes.values())[:MAX_PROBLEMS]
    for state in dict.fromkeys(key.state for key in absent):
        problems.append(_absence(state, [key.name for key in absent if key.state == state], catalog))
    if problems:
        raise CheckpointError(*problems)


def _absence(state: str, names: list[str], catalog: Catalog) -> Problem:
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    states = sorted({key.state for key in catalog.tensors})
    if state in states or state in (WEIGHT, MASTER):
        return Problem(
            "resume",
            f"{catalog.folder} holds no {state} of {listed}",
            "a checkpoint has every tensor of the model",
            "describe the model that the checkpoint was made of, or start without it",
        )
    return Problem(
        "resume",
        f"{catalog.folder} holds no {state} of {listed} (its states: {', '.join(states)})",
        "an optimizer continues from its own state",
        "use the optimizer that saved it, or take over the weights only: model.pretrained=PATH of an exported folder",
    )


def _dtype(shard: Shard) -> str:
    return str(shard.data.dtype).removeprefix("torch.")
