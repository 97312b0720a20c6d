r"""Compare two checkpoints of any formats and layouts tensor by tensor, under canonical names.

    python -c "from toolkit.checkpoint.offline.diff import diff; print(*diff('A', 'B').lines(), sep='\n')"

Equal means that training continues identically from either: the other side stores every tensor, or one that
it can be derived from. ``planner.source_key`` decides which tensors are compared: an fp32 weight on one side
with a master on the other, and a bf16 weight with an fp32 one after a cast. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.checkpoint.catalog import DTYPES, DamagedFile, byte_length
from toolkit.checkpoint.file_reader import CheckpointFiles, numpy_dtype, open_files
from toolkit.checkpoint.piece_reader import parallel_map
from toolkit.checkpoint.planner import source_key
from toolkit.checkpoint.scalars import CONSUMED, LOSS_SCALER, OPTIMIZER_STEP, STEP
from toolkit.checkpoint.shard import Box, TensorInfo, TensorKey
from toolkit.checkpoint.source import CheckpointSource, open_source
from toolkit.checkpoint.tile_reader import WORKER_THREADS, ByteProgress, TileReader, as_bits, tile_box
from toolkit.errors import InputError, Problem
from toolkit.families.base import ModelShape
from toolkit.paths import Location

COMPARED_SCALARS = (STEP, CONSUMED, OPTIMIZER_STEP, LOSS_SCALER)

Tensors = Mapping[TensorKey, TensorInfo]


class DiffOutcome(StrEnum):
    EQUAL = "equal"  # bitwise
    ABSENT = "absent"  # only on one side
    SHAPE = "shape"
    DTYPE = (
        # One side's dtype cannot represent the other's values; values are compared in the narrower dtype.
        "dtype"
    )
    VALUES = "values"


@dataclass(frozen=True, slots=True)
class TensorPair:
    """The tensors that are compared; None if a side has none.

    Attributes:
        left, right: The tensor of each side.
        lossy: One side has a narrower dtype.
    """

    left: TensorKey | None
    right: TensorKey | None
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The result for one pair.

    Attributes:
        pair: The tensors.
        outcome: Kind of difference.
        dtypes, shapes: Of left and right; empty if a side has none.
        differing: Number of elements with different bits (different values, if the dtypes have no common
            one).
        max_abs, max_relative: Maximum of |a - b| and of |a - b| / max(|a|, |b|); infinite if one is NaN.
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
            f"{self.differing} of {Box.whole(self.shapes[0]).numel} values differ, by {self.max_abs:.3g} at "
            "most, relatively by "
            f"{self.max_relative:.3g}"
            if self.differing
            else "equal"
        )
        if self.outcome is DiffOutcome.DTYPE:
            return f"{what}: {as_stored}; {values} in the narrower"
        return f"{what}: {as_stored}, {values}"


@dataclass(frozen=True, slots=True)
class CheckpointDiff:
    """The result for two checkpoints.

    Attributes:
        left, right: The two folders.
        tensors: Every pair, also equal ones, in the left's order.
        scalars: (name, left, right) of scalars that differ; None if a side lacks it.
    """

    left: Location
    right: Location
    tensors: tuple[TensorDifference, ...]
    scalars: tuple[tuple[str, object, object], ...]

    @property
    def equal(self) -> bool:
        """Whether there is no difference. A command that compares exits with 0 if so, otherwise with 1."""
        return not self.scalars and all(tensor.outcome is DiffOutcome.EQUAL for tensor in self.tensors)

    def lines(self, most: int = 20) -> list[str]:
        """Format the result: differences, at most ``most`` of each kind, corresponding states, and a
        summary."""
        lines = [f"{name}: {left} on the left, {right} on the right" for name, left, right in self.scalars]
        for outcome in DiffOutcome:
            matching = [tensor for tensor in self.tensors if tensor.outcome is outcome]
            if outcome is DiffOutcome.EQUAL:
                continue
            lines += [str(tensor) for tensor in matching[:most]]
            if len(matching) > most:
                lines.append(f"and {len(matching) - most} more: {outcome}")
        equal = [tensor for tensor in self.tensors if tensor.outcome is DiffOutcome.EQUAL]
        correspondences = sorted(
            {
                (tensor.pair.left.state, tensor.pair.right.state, *tensor.dtypes)
                for tensor in equal
                if tensor.pair.left
                and tensor.pair.right
                and (tensor.pair.left != tensor.pair.right or tensor.dtypes[0] != tensor.dtypes[1])
            }
        )
        lines += [
            f"{a} ({of_a}) of the left is {b} ({of_b}) of the right" for a, b, of_a, of_b in correspondences
        ]
        verdict = "equal" if self.equal else "not equal"
        numbers = f"; scalars that differ: {len(self.scalars)}" if self.scalars else ""
        return [
            *lines,
            f"{verdict}: {len(equal)} of {len(self.tensors)} tensors are equal in {self.left} and "
            f"{self.right}{numbers}",
        ]


def diff(
    left: str | Path,
    right: str | Path,
    model: ModelShape | None = None,
    *,
    workers: int = WORKER_THREADS,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> CheckpointDiff:
    """Compare the checkpoints that two paths are or lead to. See ``diff_sources``."""
    return diff_sources(open_source(left, model), open_source(right, model), workers=workers, advance=advance)


def diff_sources(
    left: CheckpointSource,
    right: CheckpointSource,
    *,
    workers: int = WORKER_THREADS,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> CheckpointDiff:
    """Compare every tensor of both sources. Hashes are not verified: any difference is reported.

    Args:
        left, right: The sources.
        workers: Number of threads.
        advance: Called with the bytes compared since the last call, and the total.

    Raises:
        InputError: The sources are of different kinds of models. CheckpointError: A file cannot be read.
    """
    if left.namespace != right.namespace:
        raise InputError(
            Problem(
                "target",
                f"{left.folder} has names of {left.namespace}, {right.folder} of {right.namespace}",
                "tensors are compared by name",
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
        sides = [_Side(source, opened.enter_context(open_files(source.folder))) for source in (left, right)]
        work = _Comparison(sides[0], sides[1], ByteProgress(advance, total))
        differences = parallel_map(work.compare, found, workers)
    of_left, of_right = left.catalog.scalars, right.catalog.scalars
    scalars = tuple(
        (name, of_left.get(name), of_right.get(name))
        for name in COMPARED_SCALARS
        if of_left.get(name) != of_right.get(name)
    )
    return CheckpointDiff(left.folder, right.folder, tuple(differences), scalars)


def pair_tensors(left: Tensors, right: Tensors) -> list[TensorPair]:
    """Return each tensor of either side with its counterpart on the other."""
    pairs: dict[tuple[TensorKey | None, TensorKey | None], bool] = {}
    for key in {**left, **right}:
        if key in left and key in right and left[key].dtype == right[key].dtype:
            pairs.setdefault((key, key), False)
            continue
        if key in left:
            answer = source_key(key, left[key].dtype, right)
            lossy = answer is not None and not _can_represent(right[answer].dtype, left[key].dtype)
            pairs[key, answer] = pairs.get((key, answer), False) or lossy
        if key in right:
            answer = source_key(key, right[key].dtype, left)
            lossy = answer is not None and not _can_represent(left[answer].dtype, right[key].dtype)
            pairs[answer, key] = pairs.get((answer, key), False) or lossy
    return [TensorPair(*both, lossy) for both, lossy in pairs.items()]


def _can_represent(wide: str, narrow: str) -> bool:
    """Return whether ``wide`` can represent every value of ``narrow``."""
    a, b = DTYPES[wide], DTYPES[narrow]
    return wide == narrow or (a.is_float == b.is_float and a.itemsize > b.itemsize)


def _both(pair: TensorPair) -> bool:
    return pair.left is not None and pair.right is not None


def _bytes(key: TensorKey | None, tensors: Tensors) -> int:
    return byte_length(tensors[key].dtype, tensors[key].shape) if key is not None else 0


class _Side:
    """One checkpoint, whose damage is reported as its format does."""

    def __init__(self, source: CheckpointSource, files: CheckpointFiles) -> None:
        self.source, self.tensors = source, source.catalog.tensors
        self._reader = TileReader(source.catalog, files)

    def is_transposed(self, key: TensorKey) -> bool:
        return any(piece.transposed for piece in self.source.catalog.pieces[key])

    def read(self, key: TensorKey, box: Box) -> Any:
        try:
            return self._reader.read(key, box)
        except DamagedFile as damage:
            raise self.source.damage_error(self.source.folder, damage) from damage


class _Comparison:
    def __init__(self, left: _Side, right: _Side, advance: ByteProgress) -> None:
        self._left, self._right, self._advance = left, right, advance

    def compare(self, pair: TensorPair) -> TensorDifference:
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
        """Yield the result of ``measure_difference`` for each tile."""
        by_columns = self._left.is_transposed(left) and self._right.is_transposed(right)
        for box in tile_box(Box.whole(a.shape), a.dtype, b.dtype, by_columns=by_columns):
            mine, theirs = self._left.read(left, box), self._right.read(right, box)
            numbytes = mine.nbytes + theirs.nbytes
            with np.errstate(over="ignore"):
                if _can_represent(a.dtype, b.dtype):
                    mine = mine.astype(numpy_dtype(b.dtype), copy=False)
                elif _can_represent(b.dtype, a.dtype):
                    theirs = theirs.astype(numpy_dtype(a.dtype), copy=False)
            yield measure_difference(mine, theirs)
            self._advance(numbytes)


def measure_difference(a: Any, b: Any) -> tuple[int, float, float]:
    """Return how many elements differ between two arrays of one shape, and the maximum absolute and relative
    differences.

    Relative differences are relative to the larger of the two magnitudes.
    """
    where = as_bits(a) != as_bits(b) if a.dtype == b.dtype else a.astype(np.float64) != b.astype(np.float64)
    count = int(np.count_nonzero(where))
    if not count:
        return 0, 0.0, 0.0
    x, y = a[where].astype(np.float64), b[where].astype(np.float64)
    with np.errstate(all="ignore"):
        absolute = np.abs(x - y)
        absolute[np.isnan(absolute)] = np.inf
        relative = absolute / np.maximum(np.abs(x), np.abs(y))
        relative[np.isnan(relative)] = np.inf  # NaN or infinite
        relative[absolute == 0] = 0.0  # 0.0 and -0.0
    return count, float(absolute.max()), float(relative.max())
