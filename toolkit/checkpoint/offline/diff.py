"""Two checkpoints of any formats, compared tensor by tensor under canonical names, whatever their layouts.

    python -c "from toolkit.checkpoint.offline.diff import diff; print(*diff('A', 'B').lines(), sep='\\n')"

Equal means that training goes on from either as from the other: every tensor that one stores, the other stores, or stores more of it. So
``planner.source_key`` decides what is compared: the fp32 weight of one is the master of the other, and a bf16 weight is compared with an
fp32 one cast. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.checkpoint.blocks import CheckpointFiles, numpy_dtype
from toolkit.checkpoint.catalog import DTYPES, DamagedFile, byte_length
from toolkit.checkpoint.executor import parallel_map
from toolkit.checkpoint.planner import source_key
from toolkit.checkpoint.scalars import CONSUMED, LOSS_SCALER, OPTIMIZER_STEP, STEP
from toolkit.checkpoint.shard import Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.tile_reader import WORKERS, ByteProgress, TileReader, as_bits, tile_box
from toolkit.errors import InputError, Problem
from toolkit.families.base import ModelShape

COMPARED_SCALARS = (STEP, CONSUMED, OPTIMIZER_STEP, LOSS_SCALER)  # scalars that are compared

Tensors = Mapping[TensorKey, TensorInfo]


class DiffOutcome(StrEnum):
    EQUAL = "equal"  # in every bit
    ABSENT = "absent"  # one side has nothing of it
    SHAPE = "shape"
    DTYPE = (
        "dtype"  # what one side has cannot hold what the other has; values are compared in the narrower dtype
    )
    VALUES = "values"


@dataclass(frozen=True, slots=True)
class TensorPair:
    """What is compared: a tensor of each side; None where a side has none.

    Attributes:
        lossy: a side has less than the other: a narrower dtype.
    """

    left: TensorKey | None
    right: TensorKey | None
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Of one pair.

    Attributes:
        dtypes, shapes: of the left and the right; empty where a side has none.
        differing: elements that are not the same bits (values, where dtypes have none in common).
        max_abs, max_relative: of these, |a - b| and |a - b| / max(|a|, |b|); infinite where one is not a number.
    """

    pair: TensorPair
    outcome: DiffOutcome
    dtypes: tuple[str, str] = ("", "")
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    differing: int = 0
    max_abs: float = 0.0
    max_relative: float = 0.0

    def __str__(self) -> str:
        left, right = self.pair.left, self.pair.right
        if self.outcome is DiffOutcome.ABSENT:
            return f"{left or right}: only on the {'left' if left else 'right'}"
        what = str(left) if left == right else f"{left} on the left, {right} on the right"
        if self.outcome is DiffOutcome.SHAPE:
            return f"{what}: {self.shapes[0]} on the left, {self.shapes[1]} on the right"
        as_stored = (
            self.dtypes[0] if self.dtypes[0] == self.dtypes[1] else f"{self.dtypes[0]} and {self.dtypes[1]}"
        )
        values = (
            f"{self.differing} of {Box.whole(self.shapes[0]).numel} values differ, by {self.max_abs:.3g} at most, relatively by "
            f"{self.max_relative:.3g}"
            if self.differing
            else "equal"
        )
        if self.outcome is DiffOutcome.DTYPE:
            return f"{what}: {as_stored}; {values} in the narrower"
        return f"{what}: {as_stored}, {values}"


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """Attributes:
    tensors: every pair, equal ones too, in the left's order.
    scalars: (name, left, right) of what training resumes from and is not the same; None: not there.
    """

    left: Path
    right: Path
    tensors: tuple[TensorDifference, ...]
    scalars: tuple[tuple[str, object, object], ...]

    @property
    def equal(self) -> bool:
        """A command that compares ends with 0 where this is so, and with 1 where it is not."""
        return not self.scalars and all(one.outcome is DiffOutcome.EQUAL for one in self.tensors)

    def lines(self, most: int = 20) -> list[str]:
        """For people: what differs, of each kind no more than ``most``; what stands for what; a summary."""
        lines = [f"{name}: {left} on the left, {right} on the right" for name, left, right in self.scalars]
        for outcome in DiffOutcome:
            of_kind = [one for one in self.tensors if one.outcome is outcome]
            if outcome is DiffOutcome.EQUAL:
                continue
            lines += [str(one) for one in of_kind[:most]]
            if len(of_kind) > most:
                lines.append(f"and {len(of_kind) - most} more: {outcome}")
        same = [one for one in self.tensors if one.outcome is DiffOutcome.EQUAL]
        stand_ins = sorted(
            {
                (one.pair.left.state, one.pair.right.state, *one.dtypes)
                for one in same
                if one.pair.left
                and one.pair.right
                and (one.pair.left != one.pair.right or one.dtypes[0] != one.dtypes[1])
            }
        )
        lines += [f"{a} ({of_a}) of the left is {b} ({of_b}) of the right" for a, b, of_a, of_b in stand_ins]
        verdict = "equal" if self.equal else "not equal"
        numbers = f"; of what else training resumes from, {len(self.scalars)} differ" if self.scalars else ""
        return [
            *lines,
            f"{verdict}: {len(same)} of {len(self.tensors)} tensors are the same in {self.left} and {self.right}{numbers}",
        ]


def diff(
    left: str | Path,
    right: str | Path,
    model: ModelShape | None = None,
    *,
    workers: int = WORKERS,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> CheckpointDiff:
    """Compare what two paths are or point to. See ``diff_sources``."""
    return diff_sources(open_source(left, model), open_source(right, model), workers=workers, advance=advance)


def diff_sources(
    left: CheckpointSource,
    right: CheckpointSource,
    *,
    workers: int = WORKERS,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> CheckpointDiff:
    """Every tensor of both. Hashes are not looked at: what differs is said, whatever the reason.

    Args:
        advance: told of bytes that were compared since it was told last, and of how many there are.

    Raises:
        InputError: they are of different kinds of models. CheckpointError: a file cannot be read.
    """
    if left.namespace != right.namespace:
        raise InputError(
            Problem(
                "target",
                f"{left.folder} has the names of {left.namespace}, {right.folder} those of {right.namespace}",
                "tensors are compared by their names",
                "compare checkpoints of one family",
            )
        )
    found = pair_tensors(left.catalog.tensors, right.catalog.tensors)
    total = sum(
        _bytes(pair.left, left.catalog.tensors) + _bytes(pair.right, right.catalog.tensors)
        for pair in found
        if _both(pair)
    )
    with ExitStack() as opened:
        sides = [
            _Side(source, opened.enter_context(CheckpointFiles(source.folder))) for source in (left, right)
        ]
        work = _Comparison(sides[0], sides[1], ByteProgress(advance, total))
        differences = parallel_map(work.of, found, workers)
    of_left, of_right = left.catalog.scalars, right.catalog.scalars
    scalars = tuple(
        (name, of_left.get(name), of_right.get(name))
        for name in COMPARED_SCALARS
        if of_left.get(name) != of_right.get(name)
    )
    return CheckpointDiff(left.folder, right.folder, tuple(differences), scalars)


def pair_tensors(left: Tensors, right: Tensors) -> list[TensorPair]:
    """What to compare: each tensor of either side with what the other has for it."""
    found: dict[tuple[TensorKey | None, TensorKey | None], bool] = {}
    for key in {**left, **right}:
        if key in left and key in right and left[key].dtype == right[key].dtype:
            found.setdefault((key, key), False)
            continue
        if key in left:
            answer = source_key(key, left[key].dtype, right)
            lossy = answer is not None and not _holds(right[answer].dtype, left[key].dtype)
            found[key, answer] = found.get((key, answer), False) or lossy
        if key in right:
            answer = source_key(key, right[key].dtype, left)
            lossy = answer is not None and not _holds(left[answer].dtype, right[key].dtype)
            found[answer, key] = found.get((answer, key), False) or lossy
    return [TensorPair(*both, lossy) for both, lossy in found.items()]


def _holds(wide: str, narrow: str) -> bool:
    """Whether every value of one dtype is one of the other."""
    a, b = DTYPES[wide], DTYPES[narrow]
    return wide == narrow or (a.is_float == b.is_float and a.itemsize > b.itemsize)


def _both(pair: TensorPair) -> bool:
    return pair.left is not None and pair.right is not None


def _bytes(key: TensorKey | None, tensors: Tensors) -> int:
    return byte_length(tensors[key].dtype, tensors[key].shape) if key is not None else 0


class _Side:
    """One checkpoint. Says of damage what its format says."""

    def __init__(self, source: CheckpointSource, files: CheckpointFiles) -> None:
        self.source, self.tensors = source, source.catalog.tensors
        self._looker = TileReader(source.catalog, files)

    def turned(self, key: TensorKey) -> bool:
        return any(piece.transposed for piece in self.source.catalog.pieces[key])

    def read(self, key: TensorKey, box: Box) -> Any:
        try:
            return self._looker.read(key, box)
        except DamagedFile as damage:
            raise self.source.refuse(self.source.folder, damage) from damage


class _Comparison:
    def __init__(self, left: _Side, right: _Side, advance: ByteProgress) -> None:
        self._left, self._right, self._advance = left, right, advance

    def of(self, pair: TensorPair) -> TensorDifference:
        if pair.left is None or pair.right is None:
            return TensorDifference(pair, DiffOutcome.ABSENT)
        a, b = self._left.tensors[pair.left], self._right.tensors[pair.right]
        dtypes, shapes = (a.dtype, b.dtype), (a.shape, b.shape)
        if a.shape != b.shape:
            self._advance(_bytes(pair.left, self._left.tensors) + _bytes(pair.right, self._right.tensors))
            return TensorDifference(pair, DiffOutcome.SHAPE, dtypes, shapes)
        differing, most, relative = 0, 0.0, 0.0
        for count, by, by_relative in self._tiles(pair.left, pair.right, a, b):
            differing, most, relative = differing + count, max(most, by), max(relative, by_relative)
        outcome = DiffOutcome.DTYPE if pair.lossy else DiffOutcome.VALUES if differing else DiffOutcome.EQUAL
        return TensorDifference(pair, outcome, dtypes, shapes, differing, most, relative)

    def _tiles(
        self, left: TensorKey, right: TensorKey, a: TensorInfo, b: TensorInfo
    ) -> Iterator[tuple[int, float, float]]:
        """Of each tile: see ``apart``."""
        both_turned = self._left.turned(left) and self._right.turned(right)
        for box in tile_box(Box.whole(a.shape), a.dtype, b.dtype, by_columns=both_turned):
            mine, theirs = self._left.read(left, box), self._right.read(right, box)
            numbytes = mine.nbytes + theirs.nbytes
            with np.errstate(over="ignore"):
                if _holds(a.dtype, b.dtype):
                    mine = mine.astype(numpy_dtype(b.dtype), copy=False)
                elif _holds(b.dtype, a.dtype):
                    theirs = theirs.astype(numpy_dtype(a.dtype), copy=False)
            yield measure_difference(mine, theirs)
            self._advance(numbytes)


def measure_difference(a: Any, b: Any) -> tuple[int, float, float]:
    """Elements of two arrays of one shape that differ, and by how much at most: absolutely, relatively to the larger of the two."""
    where = as_bits(a) != as_bits(b) if a.dtype == b.dtype else a.astype(np.float64) != b.astype(np.float64)
    count = int(np.count_nonzero(where))
    if not count:
        return 0, 0.0, 0.0
    x, y = a[where].astype(np.float64), b[where].astype(np.float64)
    with np.errstate(all="ignore"):
        absolute = np.abs(x - y)
        absolute[np.isnan(absolute)] = np.inf
        relative = absolute / np.maximum(np.abs(x), np.abs(y))
        relative[np.isnan(relative)] = np.inf  # not numbers, or infinite
        relative[absolute == 0] = 0.0  # 0.0 and -0.0
    return count, float(absolute.max()), float(relative.max())
