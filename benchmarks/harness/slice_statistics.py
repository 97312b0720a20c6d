"""Compare the speed of two jobs that ran in time slices by the parts of their steps (step_marks.py).

A part lies between two marks. Only parts that ran completely within a slice count, because a part that a
stop divides includes the wait, cold caches and late timers. In a slice of S seconds a part of d seconds has
room to begin in S - d of them, so each part is weighted by the inverse of its room in all slices (Horvitz
and Thompson, 1952); otherwise long parts would be under-represented.

A job's slowness over some slices is the time that its parts took, divided by the time that they usually
take. A pair's figure is the ratio of both jobs' slowness. Delays longer than a slice are not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from harness.step_marks import Marks

Floats = npt.NDArray[np.float64]

SETTLED_SECONDS = 0.005  # at the beginning of a slice, in which no part counts
RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class CompleteParts:
    """Parts that ran completely within a slice: position in the step, slice, seconds and weight."""

    positions: npt.NDArray[np.int64]
    slices: npt.NDArray[np.int64]
    seconds: Floats
    weights: Floats


def complete_parts(marks: Marks, slices: Sequence[tuple[float, float]]) -> CompleteParts:
    """Return the parts within ``slices``, pairs of begin and end in seconds of the marks' clock."""
    begins, ends = np.array(slices).T
    begins = begins + SETTLED_SECONDS
    times = marks.ravel()
    positions = np.arange(1, len(times)) % marks.shape[1]
    within = np.searchsorted(begins, times[:-1], side="right") - 1
    whole = (within >= 0) & (times[1:] <= ends[within])
    seconds = np.diff(times)[whole]
    return CompleteParts(
        positions[whole], within[whole], seconds, 1 / start_room_seconds(seconds, ends - begins)
    )


def start_room_seconds(parts: Floats, slices: Floats) -> Floats:
    """Return the seconds in which a part could begin and still be whole, over all slices. Both are in
    seconds."""
    lengths = np.sort(slices)
    longer = np.searchsorted(lengths, parts)  # index of the first longer slice
    of_longer = np.append(np.cumsum(lengths[::-1])[::-1], 0.0)[longer]
    return np.asarray(of_longer - parts * (len(lengths) - longer))


def mean_seconds_by_position(parts: CompleteParts, position_count: int) -> Floats:
    """Return the mean of each position in a step, ``(position_count,)``.

    Raises:
        SystemExit: a position was never seen.
    """
    seen = np.bincount(parts.positions, parts.weights, position_count)
    if not seen.all():
        raise SystemExit(
            f"too few slices: {int((seen == 0).sum())} of a step's {position_count} parts were never "
            "seen whole"
        )
    return np.bincount(parts.positions, parts.weights * parts.seconds, position_count) / seen


def ratios(
    ours: CompleteParts, theirs: CompleteParts, usual: Floats, slices: int, slices_a_pair: int
) -> Floats:
    """Return our slowness over theirs for each group of ``slices_a_pair`` slices; a remainder is dropped."""
    count = slices // slices_a_pair * slices_a_pair

    def slowness(parts: CompleteParts) -> Floats:
        took, usually = (
            np.bincount(parts.slices, parts.weights * seconds, slices)[:count]
            .reshape(-1, slices_a_pair)
            .sum(1)
            for seconds in (parts.seconds, usual[parts.positions])
        )
        return np.asarray(took / usually)

    return slowness(ours) / slowness(theirs)


def median_over_launches(launches: Sequence[Floats]) -> tuple[float, float, float]:
    """Return the median over all pairs and its one-sided 95% bounds.

    The bootstrap (Efron, 1979) draws launches and then pairs, because each start of a job is a little faster
    or slower.
    """
    draw = np.random.default_rng(0)

    def drawn() -> float:
        chosen = draw.integers(len(launches), size=len(launches))
        return float(
            np.median(
                np.concatenate([draw.choice(launches[launch], len(launches[launch])) for launch in chosen])
            )
        )

    lower, upper = np.quantile([drawn() for _ in range(RESAMPLES)], [0.05, 0.95])
    return float(np.median(np.concatenate(list(launches)))), float(lower), float(upper)
