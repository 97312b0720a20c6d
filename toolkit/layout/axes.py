"""Rank arithmetic.

Example: 8 ranks, ``Axes(data=2, pipeline=2, context=1, tensor=2)``. Tensor is the innermost axis (its ranks
are neighbours and communicate most), then context, then data; pipeline is outermost:

    rank      0  1  2  3  4  5  6  7
    tensor    0  1  0  1  0  1  0  1
    data      0  0  1  1  0  0  1  1
    pipeline  0  0  0  0  1  1  1  1

This is the order ``tp-cp-ep-dp-pp`` of Megatron-core's ``parallel_state``, and DeepSpeed's AutoTP and
pipeline topologies agree with it. Expert parallelism adds no ranks: it regroups data and context ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, product


class Axis(StrEnum):
    TENSOR = "tensor"
    CONTEXT = "context"
    DATA = "data"
    PIPELINE = "pipeline"


# Innermost first: neighbouring ranks differ in the first of these.
ORDER: tuple[Axis, ...] = (Axis.TENSOR, Axis.CONTEXT, Axis.DATA, Axis.PIPELINE)


@dataclass(frozen=True, slots=True)
class Coordinates:
    """A rank's coordinates: ``0 <= tensor < axes.tensor`` and so on."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Sizes of the axes of parallelism. ``size`` is the world size; ``expert`` divides ``data * context``."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context", "expert"):
            assert getattr(self, name) >= 1, f"axis {name} has size {getattr(self, name)}"

    @property
    def size(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of ``rank``, ``0 <= rank < size``."""
        assert 0 <= rank < self.size, f"rank {rank} of {self.size}"
        coordinates: dict[str, int] = {}
        for axis in ORDER:
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**coordinates)

    def rank(self, coordinates: Coordinates) -> int:
        """Return the rank at ``coordinates``."""
        rank = 0
        for axis in reversed(ORDER):
            rank = rank * getattr(self, axis) + getattr(coordinates, axis)
        return rank

    def peers(self, rank: int, along: Collection[Axis]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` along these axes only, including itself, in rising
        order.
        """
        at = self.coordinates(rank)
        outer = tuple(reversed(ORDER))
        peers = product(
            *(range(getattr(self, axis)) if axis in along else (getattr(at, axis),) for axis in outer)
        )
        return tuple(self.rank(Coordinates(**dict(zip(outer, peer, strict=True)))) for peer in peers)

    def spanned(self, ranks: Iterable[int]) -> tuple[Axis, ...]:
        """Return the axes along which these ranks differ, innermost first."""
        coordinates = [self.coordinates(rank) for rank in ranks]
        return tuple(axis for axis in ORDER if len({getattr(at, axis) for at in coordinates}) > 1)

    def groups(self, axis: Axis) -> Iterator[tuple[int, ...]]:
        """Yield the process groups along ``axis``: every group of ranks that differ in that coordinate
        only.
        """
        stride = 1
        for inner in ORDER[: ORDER.index(axis)]:
            stride *= getattr(self, inner)
        length = getattr(self, axis)
        for first in range(self.size):
            if (first // stride) % length == 0:
                yield tuple(first + step * stride for step in range(length))


ALL, EXPERT, OTHER = "all", "expert", "other"


def axis_name(ranks: Collection[int], axes: Axes, *, exchange: bool = False) -> str:
    """Return the name of a group of ranks: the axes along which they differ, such as ``tensor`` or
    ``context+data``.

    ``all`` if these are all axes of several; empty for a single rank. Expert parallelism regroups data and
    context ranks: a group of neighbours among them is ``expert``. If that is the whole data group, only an
    all-to-all (``exchange``) can be attributed to the experts.
    """
    spanned = axes.spanned(ranks)
    if axes.expert > 1 and len(ranks) == axes.expert and set(spanned) <= {Axis.CONTEXT, Axis.DATA}:
        indices = [at.data * axes.context + at.context for at in map(axes.coordinates, ranks)]
        neighbours = max(indices) - min(indices) == axes.expert - 1
        if neighbours and (exchange or axes.expert < axes.data * axes.context):
            return EXPERT
    return ALL if len(spanned) > 1 and list(spanned) == _divided_axes(axes) else "+".join(spanned)


def axis_names(axes: Axes) -> tuple[str, ...]:
    """Return all names that :func:`axis_name` returns for several ranks, and ``other`` for unknown ranks."""
    divided = _divided_axes(axes)
    if not divided:
        return ()
    several = [
        "+".join(chosen) for size in range(1, max(len(divided), 2)) for chosen in combinations(divided, size)
    ]
    return (*several, *([ALL] if len(divided) > 1 else []), *([EXPERT] if axes.expert > 1 else []), OTHER)


def _divided_axes(axes: Axes) -> list[Axis]:
    return [axis for axis in ORDER if getattr(axes, axis) > 1]
